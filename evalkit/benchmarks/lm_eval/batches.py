"""Batches of lm-eval's requests, in which sequences to score and prompts to continue share their prefixes.

In: a plan's requests, the finished rows, and facts about the model. Out: the batches that are not finished; or an
estimate of a run's tokens. How requests are grouped does not depend on what is finished, so a resumed run gives the
answers of an uninterrupted one, bit for bit on the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np

from evalkit.benchmarks.base import Batch, Batches, Planned
from evalkit.benchmarks.lm_eval.generation import TextFacts, prompts_of
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
from evalkit.benchmarks.request import TaskTokens, spread
from evalkit.display import Say
from evalkit.generation.capacity import Capacity
from evalkit.generation.prompts import Prompt
from evalkit.inputs.values import check_text
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import window_of
from evalkit.runs.journal import FinishedRows
from evalkit.scoring.pack import SampledGroup, Sequences, SequenceSet, TreeBatch, estimated_tokens, plan

_EMPTY_TEXTS = -1
"""Number of the batch of a task's empty texts, which have no tokens to score."""
_CANDIDATES = 8
"""Requests among which the start-up check chooses."""
_BLOCK = 4
"""Documents next to each other in a sample."""


@dataclass(frozen=True)
class RequestFacts:
    """Facts about the model that planning needs."""

    token_budget: int
    """Most tokens of a scored batch."""
    shares: bool
    """Whether shared prefixes are computed once."""
    window: int
    prefix_id: int
    """The token that precedes a text without context."""
    prefix_text: str
    texts: TextFacts | None
    """None if no text is generated."""


@dataclass(frozen=True)
class RequestBatch:
    """Content of a batch: sequences to score, prompts to continue, or neither for empty texts."""

    rows: list[RequestRow]
    """One for each sequence or prompt, in order, without the answer."""
    sequences: TreeBatch | None = None
    prompts: list[Prompt] | None = None

    def warm(self) -> None:
        """See `Batch.warm`."""
        if self.sequences is not None:
            _ = self.sequences.tree


def candidates(plan: TaskPlan) -> list[ModelRequest]:
    """Return the requests of a plan that show how the model is prepared: see `Benchmark.setup`.

    These are some to score, among which the start-up check chooses, and one of each distinct generation_kwargs.

    Raises:
        ScoringError: a prompt is not valid text; names task and document.
    """
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
    """Return the batches of all requests without an answer; see `Benchmark.batches`.

    `say` is called once for a task in which continuations are encoded without their context.
    """
    encoding = Encoding(tokenizer, facts.prefix_id, facts.window)
    missing = {journal: unanswered(finished, requests) for journal, requests in plan.requests.items()}

    def batches() -> Batches:
        for requests in (plan.requests[journal] for journal, members in missing.items() if members):
            if requests[0].kind == GENERATED:
                yield from _generation_batches(requests, facts, encoding, finished)
            else:
                continuations = continuations_of(requests, encoding, say)
                yield from _empty_texts(requests, continuations, finished)
                yield from _scoring_batches(continuations, facts, finished, plan.request.token_budget)

    total, left = (
        sum(request.work for requests in groups for request in requests)
        for groups in (plan.requests.values(), missing.values())
    )
    return Planned(batches(), total, total - left)


def _empty_texts(
    requests: Sequence[ModelRequest], continuations: Sequence[Continuation], finished: FinishedRows
) -> Batches:
    with_tokens = {continuation.position for continuation in continuations}
    empty = [request for index, request in enumerate(requests) if index not in with_tokens]
    if any(request.key() not in finished for request in empty):
        rows = [request.row(0, windows=0)._replace(likelihood=0.0) for request in empty]
        yield _batch(_EMPTY_TEXTS, RequestBatch(rows), empty, sum(request.work for request in empty))


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
    continuations: Sequence[Continuation], facts: RequestFacts, finished: FinishedRows, budget: int | None
) -> Batches:
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
    """Return a batch whose work and documents are those of the requests without an answer."""
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
        for requests in group_by_task(first_requests(task, documents, set(numbers))).values():
            estimates.append(_estimate(name, requests, encoding, len(numbers), documents))
    return estimates


def _estimate(
    name: str, requests: Sequence[ModelRequest], encoding: Encoding, sampled: int, documents: int
) -> TaskTokens:
    scale = documents / sampled
    if requests[0].kind == GENERATED:
        prompts = prompts_of(requests, encoding, TextFacts((), None, Capacity(encoding.window, 1, 1, 0)))
        alone = scale * sum(len(prompt.tokens) for prompt in prompts)
        new = scale * sum(prompt.max_new_tokens for prompt in prompts)
        return TaskTokens(name, documents, sampled, scale * len(requests), alone, alone, new)
    continuations = continuations_of(requests, encoding, silent)
    sequences = [np.array((*part.context, *part.continuation), np.int32) for part in continuations]
    counts = estimated_tokens([SampledGroup(sequences, sampled, documents)]) if sequences else (0.0, 0.0)
    return TaskTokens(name, documents, sampled, scale * len(sequences), *counts)
