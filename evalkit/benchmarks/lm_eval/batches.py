"""Batches of lm-eval's requests, in which sequences to score and prompts to continue share their prefixes.

In: a plan's requests, the finished rows, and facts about the model. Out: the batches that are not finished, grouped
whatever is finished, so that a resumed run gives the same answers bit for bit; or an estimate of a run's tokens.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np

from evalkit.benchmarks.base import Batch, Batches, Planned
from evalkit.benchmarks.lm_eval.plan import TaskPlan, first_requests
from evalkit.benchmarks.lm_eval.requests import (
    GENERATED,
    Continuation,
    Encoding,
    ModelRequest,
    RequestRow,
    continuations_of,
    group_by_task,
    unanswered,
)
from evalkit.benchmarks.lm_eval.tasks import log_from
from evalkit.benchmarks.request import TaskTokens, spread
from evalkit.compatibility.lm_eval import generation_arguments
from evalkit.display import Say
from evalkit.errors import ScoringError, UsageError
from evalkit.generation.prompts import Capacity, Decoding, Prompt, Stops
from evalkit.inputs.values import check_text, whole
from evalkit.models.context.extension import refuse_generation
from evalkit.models.loading.load import LoadedModel
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import window_of
from evalkit.runs.journal import FinishedRows
from evalkit.scoring.pack import SampledGroup, Sequences, SequenceSet, TreeBatch, estimated_tokens, plan

NEW_TOKENS = 256
_EMPTY_TEXTS = -1
"""Number of the batch of a task's empty texts, which have no tokens to score."""
_CANDIDATES = 8
_BLOCK = 4


@dataclass(frozen=True)
class TextFacts:
    ends: tuple[int, ...]
    """Token ids that end a text."""
    new_tokens: int | None
    """max_new_tokens of the model's generation config, which overrides the task's in `generate`; None if not set."""
    capacity: Capacity


class _Settings(NamedTuple):
    until: tuple[str, ...]
    new_tokens: int
    """Most generated tokens; the prompt is truncated to leave room for them."""
    length: int | None
    """Most tokens of prompt and text, if the task sets max_length."""
    decoding: dict[str, Any]
    """The other settings, of transformers' generation config."""


def _settings_of(request: ModelRequest) -> _Settings:
    try:
        # lm-eval's warning does not apply here: the default temperature is the model's
        with log_from(logging.ERROR):
            decoding = generation_arguments(request.arguments[1], NEW_TOKENS)
        until, length = decoding.pop("until"), decoding.pop("max_length", None)
        if not all(isinstance(text, str) for text in until):
            raise TypeError("until is not a text or a list of texts")
        if not isinstance(decoding["do_sample"], bool):
            raise TypeError(f"do_sample is {decoding['do_sample']!r}; it must be true or false")
        new_tokens = whole("max_gen_toks", decoding.pop("max_gen_toks"), 1)
        length = None if length is None else whole("max_length", length or 1, 1)
    except (TypeError, ValueError, UsageError) as error:
        raise ScoringError(f"{request.label}: its generation_kwargs are not valid ({error})") from error
    if not decoding["do_sample"] or decoding.get("temperature") is None:
        decoding.pop("temperature", None)
    return _Settings(tuple(until), new_tokens, length, decoding)


def validate_generation(requests: Sequence[ModelRequest], loaded: LoadedModel, window: int) -> None:
    """Refuse requests of more new tokens than `window`, of unknown settings, or for a model that only scores."""
    from evalkit.generation.rows import check_settings

    checked: set[str] = set()
    for request in requests:
        check_text(request.arguments[0], request.label)
        if loaded.extension is not None:
            refuse_generation(loaded.extension, request.label)
        settings = _settings_of(request)
        if settings.new_tokens >= window:
            raise ScoringError(
                f"{request.label}: asks for {settings.new_tokens} tokens of text, and the model's window is {window}; "
                "lower max_gen_toks in the task's generation_kwargs"
            )
        if repr(settings.decoding) not in checked:
            checked.add(repr(settings.decoding))
            try:
                check_settings(loaded.model, settings.decoding)
            except UsageError as error:
                raise ScoringError(
                    f"{request.label}: its generation_kwargs, with the model's generation config, are not supported: "
                    f"{error}"
                ) from error


def prompts_of(requests: Sequence[ModelRequest], encoding: Encoding, facts: TextFacts) -> list[Prompt]:
    """Return the prompts of `generate_until` requests; a sampled text depends on nothing but its own request."""
    tokenizer = encoding.tokenizer
    end_texts = [] if tokenizer.eos_token_id is None else [tokenizer.decode(tokenizer.eos_token_id)]
    # lm-eval's rule for generation checks for the BOS token only
    texts = [encoding.special(request.arguments[0], tokenizer.bos_token) for request in requests]
    ids = encoding.ids(texts)
    prompts = []
    for index, (request, text) in enumerate(zip(requests, texts, strict=True)):
        settings = _settings_of(request)
        kept = ids[text][-(encoding.window - settings.new_tokens) :]
        tokens = np.array(kept or [encoding.prefix_id], dtype=np.int64)
        most = settings.new_tokens if settings.length is None else settings.length - len(tokens)
        if facts.new_tokens is not None:
            most = min(facts.new_tokens, encoding.window - len(tokens))
        if most < 1:
            raise ScoringError(
                f"{request.label}: its generation_kwargs have max_length {settings.length}, and its prompt has "
                f"{len(tokens)} tokens; give max_gen_toks instead"
            )
        own_ends = settings.decoding.get("eos_token_id")
        ends = facts.ends if own_ends is None else own_ends if isinstance(own_ends, list) else [own_ends]
        stops = Stops(frozenset(ends), until=tuple(dict.fromkeys((*settings.until, *end_texts))))
        # With lm-eval's default seed for torch
        name = f"1234 {request.task} {request.doc_id} {request.number} {request.sample}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
        prompts.append(Prompt(index, tokens, most, stops, Decoding(settings.decoding, seed)))
    return prompts


def answer_text(tokenizer: Any, prompt: Prompt, tokens: Sequence[int]) -> str:
    """Return the answer: the generated text without special tokens, cut at the first stop string."""
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    for end in prompt.stops.until:
        text = text.partition(end)[0] if end else text
    return text


@dataclass(frozen=True)
class RequestFacts:
    token_budget: int
    shares: bool
    """Whether shared prefixes are computed once."""
    window: int
    prefix_id: int
    """The token that precedes a text without context."""
    prefix_text: str
    texts: TextFacts | None


@dataclass(frozen=True)
class RequestBatch:
    """Content of a batch: sequences to score, prompts to continue, or neither for empty texts."""

    rows: list[RequestRow]
    """One for each sequence or prompt, in order, without the answer."""
    sequences: TreeBatch | None = None
    prompts: list[Prompt] | None = None

    def warm(self) -> None:
        if self.sequences is not None:
            _ = self.sequences.tree


def candidates(plan: TaskPlan) -> list[ModelRequest]:
    """Return some requests to score, for the start-up check, and one of each generation_kwargs."""
    requests = [request for members in plan.requests.values() for request in members]
    generated: dict[str, ModelRequest] = {}
    for request in requests:
        if request.kind == GENERATED:
            check_text(request.arguments[0], request.label)
            generated.setdefault(repr(request.arguments[1]), request)
    # An empty text has no token
    scored = (request for request in requests if request.kind != GENERATED and request.arguments[-1])
    return [*islice(scored, _CANDIDATES), *generated.values()]


def planned(plan: TaskPlan, facts: RequestFacts, tokenizer: Any, finished: FinishedRows, say: Say) -> Planned:
    """Return the batches of unanswered requests; `say` if continuations are encoded without their context."""
    encoding = Encoding(tokenizer, facts.prefix_id, facts.window)
    missing = {journal: unanswered(finished, requests) for journal, requests in plan.requests.items()}

    def batches() -> Batches:
        for requests in (plan.requests[journal] for journal, members in missing.items() if members):
            if requests[0].kind == GENERATED:
                yield from _generation_batches(requests, facts, encoding, finished)
            else:
                yield from _scoring_batches(requests, facts, encoding, finished, plan.request.token_budget, say)

    total, left = (
        sum(request.work for requests in groups for request in requests)
        for groups in (plan.requests.values(), missing.values())
    )
    return Planned(batches(), total, total - left)


def items_of(continuations: Sequence[Continuation]) -> tuple[Sequences, list[list[Continuation]]]:
    """Return one item for each run of continuations with the same owner, and its continuations."""
    items: list[SequenceSet] = []
    members: list[list[Continuation]] = []
    for _, same_owner in groupby(continuations, key=lambda continuation: continuation.owner):
        parts = list(same_owner)
        sequences = tuple(np.array((*part.context, *part.continuation), dtype=np.int32) for part in parts)
        scored = tuple(np.arange(len(s)) >= len(part.context) for part, s in zip(parts, sequences, strict=True))
        request, window = parts[0].request, parts[0].window
        if parts[0].is_window:
            items.append(SequenceSet(f"{request.label}, window {window}", "", sequences, scored))
        else:
            items.append(SequenceSet(request.label, request.task or "", sequences, scored))
        members.append(parts)
    return Sequences.of(items), members


def _scoring_batches(
    requests: Sequence[ModelRequest],
    facts: RequestFacts,
    encoding: Encoding,
    finished: FinishedRows,
    budget: int | None,
    say: Say,
) -> Batches:
    continuations = continuations_of(requests, encoding, say)
    with_tokens = {continuation.position for continuation in continuations}
    empty = [request for index, request in enumerate(requests) if index not in with_tokens]
    if any(request.key() not in finished for request in empty):
        rows = [request.row(0, windows=0)._replace(likelihood=0.0) for request in empty]
        yield _batch(_EMPTY_TEXTS, RequestBatch(rows), empty, sum(request.work for request in empty))
    items, members = items_of(continuations)
    must_fit = facts.shares and budget == facts.token_budget
    for number, batch in enumerate(plan(items, facts.token_budget, must_fit)):
        parts = [part for item in batch.items for part in members[item]]
        if missing := [part for part in parts if part.request.key(part.window) not in finished]:
            work = sum(part.request.work / part.windows for part in missing)
            content = RequestBatch([part.row for part in parts], sequences=batch.of(items))
            yield _batch(number, content, [part.request for part in missing], work)


def _generation_batches(
    requests: Sequence[ModelRequest], facts: RequestFacts, encoding: Encoding, finished: FinishedRows
) -> Batches:
    assert facts.texts is not None
    prompts = prompts_of(requests, encoding, facts.texts)
    for number, batch in enumerate(facts.texts.capacity.batches(prompts)):
        in_batch = [requests[prompt.index] for prompt in batch]
        if missing := [request for request in in_batch if request.key() not in finished]:
            rows = [request.row(len(prompt.tokens)) for request, prompt in zip(in_batch, batch, strict=True)]
            work = sum(request.work for request in missing)
            yield _batch(number, RequestBatch(rows, prompts=batch), missing, work)


def _batch(number: int, content: RequestBatch, missing: Sequence[ModelRequest], work: float) -> Batch:
    documents = len({request.doc_id for request in missing})
    return Batch(str(missing[0].task), number, content, work, documents, missing[0].journal)


def estimated(plan: TaskPlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
    """Return the estimates for each task; arguments as in `Benchmark.token_counts`."""
    window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
    prefix = next(token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id, 0) if token is not None)
    encoding = Encoding(tokenizer, prefix, window)
    estimates = []
    plan.randomness.restore()
    for name, task in plan.tasks.tasks.items():
        documents = len(plan.request.selection.places(name, [name] * len(task.eval_docs)))
        numbers = spread(documents, sample, _BLOCK)
        scale = documents / len(numbers)
        for requests in group_by_task(first_requests(task, documents, set(numbers))).values():
            if requests[0].kind == GENERATED:
                prompts = prompts_of(requests, encoding, TextFacts((), None, Capacity(encoding.window, 1, 1, 0)))
                alone = scale * sum(len(prompt.tokens) for prompt in prompts)
                new = scale * sum(prompt.max_new_tokens for prompt in prompts)
                counts, members = (alone, alone, new), len(requests)
            else:
                continuations = continuations_of(requests, encoding, silent)
                sequences = [np.array((*part.context, *part.continuation), np.int32) for part in continuations]
                group = SampledGroup(sequences, len(numbers), documents)
                counts = (*(estimated_tokens([group]) if sequences else (0.0, 0.0)), 0.0)
                members = len(sequences)
            estimates.append(TaskTokens(name, documents, len(numbers), scale * members, *counts))
    return estimates
