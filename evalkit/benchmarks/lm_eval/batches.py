"""Batches of lm-eval's requests, with the tokens of its Hugging Face class; sequences and prompts share their prefixes.

In: a plan's requests, a tokenizer, the finished rows, and facts about the model. Out: the batches that are not
finished, grouped whatever is finished, so that a resumed run gives the same answers bit for bit. From top to bottom:
sequences to score, prompts to continue, and their batches. Neither torch nor lm-eval's model classes are needed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from evalkit.benchmarks.base import Batch, Batches, Planned
from evalkit.benchmarks.lm_eval.requests import GENERATED, ROLLING, ModelRequest, RequestRow, rows_of, stored_rows
from evalkit.compatibility.lm_eval import generation_arguments, rolling_windows
from evalkit.display import Say
from evalkit.errors import ScoringError, UsageError
from evalkit.generation.prompts import Capacity, Decoding, Prompt, Stops
from evalkit.inputs.values import in_calls, whole
from evalkit.models.loading.locate import silent
from evalkit.runs.journal import FinishedRows
from evalkit.runs.traits import NO_BATCH
from evalkit.scoring.pack import Sequences, SequenceSet, TreeBatch, plan
from evalkit.scoring.tree import Ints
from evalkit.suites.lm_eval_tasks import log_from

if TYPE_CHECKING:
    from evalkit.benchmarks.lm_eval.plan import TaskPlan

NEW_TOKENS = 256
"""lm-eval's default of max_gen_toks."""
_AT_ONCE = 20_000
"""Texts in one call of the tokenizer, which bounds memory."""
_CANDIDATES = 8


@dataclass(frozen=True)
class Encoding:
    """The tokenizer and the tokenisation settings of an `HFLM`."""

    tokenizer: Any
    prefix_id: int
    """The token that precedes a text without context: BOS, or EOS if there is no BOS."""
    window: int
    add_bos: bool | None = None
    """Whether texts begin with the BOS token; None: the tokenizer's default."""

    @cached_property
    def prefix_text(self) -> str:
        return str(self.tokenizer.decode(self.prefix_id))

    def ids(self, texts: Iterable[str], prefix: str | None = None, special: bool = True) -> dict[str, list[int]]:
        """Return text → token ids. Special tokens are added to a text unless it already begins with the prefix."""
        added = special and self.add_bos is not False
        by_special: dict[bool, list[str]] = {True: [], False: []}
        for text in dict.fromkeys(texts):
            by_special[added and not (prefix is not None and text.startswith(prefix))].append(text)
        encoded: dict[str, list[int]] = {}
        for with_special, members in by_special.items():
            for part in in_calls(members, str, _AT_ONCE):
                ids = self.tokenizer(part, add_special_tokens=with_special, return_attention_mask=False, verbose=False)
                encoded.update(zip(part, ids["input_ids"], strict=True))
        return encoded


class Continuation(NamedTuple):
    """What is scored of a request: its continuation, or one window of its text."""

    request: ModelRequest
    row: RequestRow
    """Row of the journal without the answer, with the numbers of tokens."""
    tokens: Ints
    """[length] token ids of the context and of the continuation after it; empty for a text without tokens."""

    @classmethod
    def of(cls, request: ModelRequest, context: list[int], continuation: list[int], *place: int) -> Continuation:
        """Return it with the further arguments of `ModelRequest.row`."""
        row = request.row(len(context), len(continuation), *place)
        return cls(request, row, np.array(context + continuation, dtype=np.int32))


def continuations_of(requests: Sequence[ModelRequest], encoding: Encoding, say: Say) -> list[Continuation]:
    """Encode requests of one kind that is scored.

    White space at the end of a context moves to the continuation. Both are encoded together and split at the length of
    the context's own encoding. An empty context becomes the prefix token. Two cases that fail an assertion in lm-eval
    0.4.13 are supported: if one token spans the boundary and no token is left for the continuation, the continuation is
    encoded without its context (as in lm-eval's pull request 4055), which `say` reports once; a context of white space
    only is treated as empty. A continuation without tokens, or longer than the context window, is a `ScoringError`.
    """
    if requests and requests[0].kind == ROLLING:
        return _windows(requests, encoding)
    moved = []
    for request in requests:
        context, continuation = request.arguments
        kept = context.rstrip()
        moved.append((kept, context[len(kept) :] + continuation))
    with_context = [text for context, rest in moved if context for text in (context + rest, context)]
    ids = encoding.ids(with_context, encoding.prefix_text)
    without_context = encoding.ids((rest for context, rest in moved if not context), special=False)
    continuations, spanned = [], []
    for request, (context, rest) in zip(requests, moved, strict=True):
        if context:
            head = ids[context]
            tail = ids[context + rest][len(head) :]
            if not tail and rest:
                [tail] = encoding.ids([rest], special=False).values()
                spanned.append(request)
        else:
            tail = without_context[rest]
            # Its own first token is the context if it is the prefix token
            head, tail = (tail[:1], tail[1:]) if tail[:1] == [encoding.prefix_id] else ([encoding.prefix_id], tail)
        if not 0 < len(tail) <= encoding.window:
            raise ScoringError(
                f"{request.label}: its continuation has {len(tail)} tokens; it must have at least 1, and fit into the "
                f"model's window of {encoding.window}"
            )
        # The last token is only predicted, so one more than the window fits
        cut = max(0, len(head) + len(tail) - encoding.window - 1)
        continuations.append(Continuation.of(request, head[cut:], tail, cut))
    if spanned:
        say(
            f"{len(spanned)} continuation(s) end inside a token that begins in their context, {spanned[0].label} "
            "for one; they are encoded without their context (lm-eval 0.4.13 fails on them)"
        )
    return continuations


def _windows(requests: Sequence[ModelRequest], encoding: Encoding) -> list[Continuation]:
    ids = encoding.ids((request.arguments[0] for request in requests), encoding.prefix_text)
    continuations = []
    for request in requests:
        windows = rolling_windows(ids[request.arguments[0]], encoding.prefix_id, encoding.window)
        for number, (context, continuation) in enumerate(windows or [([], [])]):
            continuations.append(Continuation.of(request, context, continuation, 0, number, len(windows)))
    return continuations


@dataclass(frozen=True)
class TextFacts:
    ends: tuple[int, ...]
    """Token ids that end a text."""
    new_tokens: int | None
    """max_new_tokens of the model's generation config, which overrides the task's in `generate`; None if not set."""
    capacity: Capacity


def prompts_of(requests: Sequence[ModelRequest], encoding: Encoding, facts: TextFacts) -> list[Prompt]:
    """Return the prompts of `generate_until` requests; a sampled text depends on nothing but its own request.

    generation_kwargs that are not valid, or ask for more tokens than the window has, are a `ScoringError`.
    """
    # lm-eval's rule for generation checks for the BOS token only
    ids = encoding.ids((request.arguments[0] for request in requests), encoding.tokenizer.bos_token)
    prompts = []
    for index, request in enumerate(requests):
        try:
            prompts.append(_prompt(index, request, ids[request.arguments[0]], encoding, facts))
        except (TypeError, ValueError, UsageError) as error:
            raise ScoringError(f"{request.label}: its generation_kwargs are not valid ({error})") from error
    return prompts


def _prompt(index: int, request: ModelRequest, ids: list[int], encoding: Encoding, facts: TextFacts) -> Prompt:
    # lm-eval's warning does not apply here: the default temperature is the model's
    with log_from(logging.ERROR):
        settings = generation_arguments(request.arguments[1], NEW_TOKENS)
    until, length = settings.pop("until"), settings.pop("max_length", None)
    most = new_tokens = whole("max_gen_toks", settings.pop("max_gen_toks"), 1)
    if not all(isinstance(text, str) for text in until):
        raise TypeError("until is not a text or a list of texts")
    if not isinstance(settings["do_sample"], bool):
        raise TypeError(f"do_sample is {settings['do_sample']!r}; it must be true or false")
    if not settings["do_sample"] or settings.get("temperature") is None:
        settings.pop("temperature", None)
    if new_tokens >= encoding.window:
        raise ValueError(f"max_gen_toks is {new_tokens}; it must be less than the model's window, {encoding.window}")
    # The prompt is truncated to leave room for the text
    tokens = np.array(ids[-(encoding.window - new_tokens) :] or [encoding.prefix_id], dtype=np.int64)
    if length is not None:
        most = whole("max_length", length, 1) - len(tokens)
    if facts.new_tokens is not None:
        most = min(facts.new_tokens, encoding.window - len(tokens))
    if most < 1:
        raise ValueError(f"max_length is {length}, and the prompt has {len(tokens)} tokens; give max_gen_toks instead")
    own_ends, tokenizer = settings.get("eos_token_id"), encoding.tokenizer
    ends = facts.ends if own_ends is None else own_ends if isinstance(own_ends, list) else [own_ends]
    end_texts = [] if tokenizer.eos_token_id is None else [tokenizer.decode(tokenizer.eos_token_id)]
    stops = Stops(frozenset(ends), until=tuple(dict.fromkeys((*until, *end_texts))))
    # With lm-eval's default seed for torch
    name = f"1234 {request.task} {request.doc_id} {request.number} {request.sample}"
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    return Prompt(index, tokens, most, stops, Decoding(settings, seed), label=request.label)


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
    generated = {repr(request.arguments[1]): request for request in requests if request.kind == GENERATED}
    # An empty text has no token
    scored = (request for request in requests if request.kind != GENERATED and request.arguments[-1])
    return [*islice(scored, _CANDIDATES), *generated.values()]


def planned(plan: TaskPlan, facts: RequestFacts, tokenizer: Any, finished: FinishedRows, say: Say) -> Planned:
    """Return the batches of unanswered requests; `say` if continuations are encoded without their context."""
    encoding = Encoding(tokenizer, facts.prefix_id, facts.window)
    rows = stored_rows(finished, plan.requests)
    missing = {
        journal: [request for request in requests if not rows_of(request, rows)]
        for journal, requests in plan.requests.items()
    }
    total, left = (
        sum(request.work for requests in groups for request in requests)
        for groups in (plan.requests.values(), missing.values())
    )

    def batches() -> Batches:
        for journal in (journal for journal, requests in missing.items() if requests):
            contents = contents_of(plan.requests[journal], facts, encoding, plan.request.token_budget, say)
            for number, members, content in contents:
                pairs = zip(members, content.rows, strict=True)
                absent = [(request, row) for request, row in pairs if (journal, *row[:4]) not in rows]
                if absent:
                    work = sum(request.work / max(1, row.parts) for request, row in absent)
                    documents = len({request.doc_id for request, _ in absent})
                    yield Batch(str(members[0].task), number, content, work, documents, journal)

    return Planned(batches(), total, total - left)


def contents_of(
    requests: Sequence[ModelRequest], facts: RequestFacts, encoding: Encoding, budget: int | None, say: Say
) -> Iterator[tuple[int, list[ModelRequest], RequestBatch]]:
    """Yield the batches of requests of one kind: number, the request of each row, and content.

    Raises a `ScoringError` if a document exceeds the token budget, and that is the one that was given, `budget`.
    """
    if requests[0].kind == GENERATED:
        assert facts.texts is not None
        for number, batch in enumerate(facts.texts.capacity.batches(prompts_of(requests, encoding, facts.texts))):
            members = [requests[prompt.index] for prompt in batch]
            rows = [request.row(len(prompt.tokens)) for request, prompt in zip(members, batch, strict=True)]
            yield number, members, RequestBatch(rows, prompts=batch)
        return
    continuations = continuations_of(requests, encoding, say)
    if empty := [part for part in continuations if not len(part.tokens)]:
        rows = [part.row._replace(likelihood=0.0) for part in empty]
        yield NO_BATCH, [part.request for part in empty], RequestBatch(rows)
    items = items_of(continuations)
    sequences = sequences_of(items)
    must_fit = facts.shares and budget == facts.token_budget
    for number, planned_batch in enumerate(plan(sequences, facts.token_budget, must_fit)):
        parts = [part for item in planned_batch.items for part in items[item]]
        content = RequestBatch([part.row for part in parts], sequences=planned_batch.of(sequences))
        yield number, [part.request for part in parts], content


def items_of(continuations: Sequence[Continuation]) -> list[list[Continuation]]:
    """Group consecutive continuations of a document; windows of a text, and what has no task, stay alone."""

    def owner(part: Continuation) -> Hashable:
        request = part.request
        alone = request.kind == ROLLING or request.task is None
        return part.request.key(part.row.part) if alone else (request.task, request.doc_id)

    with_tokens = (part for part in continuations if len(part.tokens))
    return [list(members) for _, members in groupby(with_tokens, key=owner)]


def first_sequences(requests: Sequence[ModelRequest], encoding: Encoding) -> Sequences | None:
    """Return the sequences of the first request that has a token to score, for the start-up check."""
    for request in requests:
        if request.kind != GENERATED and (items := items_of(continuations_of([request], encoding, silent))):
            return sequences_of(items)
    return None


def sequences_of(items: Sequence[Sequence[Continuation]]) -> Sequences:
    sets = []
    for parts in items:
        scored = [np.arange(len(part.tokens)) >= part.row.context_tokens for part in parts]
        request = parts[0].request
        sets.append(SequenceSet(request.label, request.task or "", [part.tokens for part in parts], scored))
    return Sequences.of(sets)
