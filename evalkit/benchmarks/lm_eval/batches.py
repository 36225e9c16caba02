"""Batches of lm-eval's requests, in which sequences to score and prompts to continue share their prefixes.

In: a plan's requests, the finished rows, and facts about the model. Out: the batches that are not finished, grouped
whatever is finished, so that a resumed run gives the same answers bit for bit; or an estimate of a run's tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np

from evalkit.benchmarks.base import Batch, Batches, Planned
from evalkit.benchmarks.lm_eval.plan import TaskPlan, first_requests
from evalkit.benchmarks.lm_eval.requests import (
    GENERATED,
    ROLLING,
    ModelRequest,
    RequestRow,
    group_by_task,
    rows_of,
    stored_rows,
)
from evalkit.benchmarks.lm_eval.tokens import Continuation, Encoding, TextFacts, continuations_of, prompts_of
from evalkit.benchmarks.request import TaskTokens, spread
from evalkit.display import Say
from evalkit.generation.prompts import Capacity, Prompt
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import window_of
from evalkit.runs.journal import FinishedRows
from evalkit.scoring.pack import SampledGroup, Sequences, SequenceSet, TreeBatch, estimated_tokens, plan

_EMPTY_TEXTS = -1
"""Number of the batch of a task's empty texts, which have no tokens to score."""
_CANDIDATES = 8
_BLOCK = 4


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
            generated.setdefault(repr(request.arguments[1]), request)
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
    must_fit = facts.shares and plan.request.token_budget == facts.token_budget

    def batches() -> Batches:
        for journal in (journal for journal, requests in missing.items() if requests):
            contents = contents_of(plan.requests[journal], facts, encoding, must_fit, say)
            for number, members, content in contents:
                pairs = zip(members, content.rows, strict=True)
                absent = [(request, row) for request, row in pairs if (journal, *row[:4]) not in rows]
                if absent:
                    work = sum(request.work / max(1, row.parts) for request, row in absent)
                    documents = len({request.doc_id for request, _ in absent})
                    yield Batch(str(members[0].task), number, content, work, documents, journal)

    return Planned(batches(), total, total - left)


def contents_of(
    requests: Sequence[ModelRequest], facts: RequestFacts, encoding: Encoding, must_fit: bool, say: Say
) -> Iterator[tuple[int, list[ModelRequest], RequestBatch]]:
    """Yield the batches of requests of one kind: number, the request of each row, and content.

    Raises a `ScoringError` if a document exceeds the token budget and it `must_fit`.
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
        yield _EMPTY_TEXTS, [part.request for part in empty], RequestBatch(rows)
    items = items_of(continuations)
    sequences = sequences_of(items)
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


def sequences_of(items: Sequence[Sequence[Continuation]]) -> Sequences:
    sets = []
    for parts in items:
        scored = [np.arange(len(part.tokens)) >= part.row.context_tokens for part in parts]
        request = parts[0].request
        sets.append(SequenceSet(request.label, request.task or "", [part.tokens for part in parts], scored))
    return Sequences.of(sets)


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
                prompts = prompts_of(requests, encoding, TextFacts((), None, Capacity(window, 1, 1, 0)))
                alone = scale * sum(len(prompt.tokens) for prompt in prompts)
                new = scale * sum(prompt.max_new_tokens for prompt in prompts)
                counts, members = (alone, alone, new), len(requests)
            else:
                parts = continuations_of(requests, encoding, silent)
                sequences = [part.tokens for part in parts if len(part.tokens)]
                group = SampledGroup(sequences, len(numbers), documents)
                counts = (*(estimated_tokens([group]) if sequences else (0.0, 0.0)), 0.0)
                members = len(sequences)
            estimates.append(TaskTokens(name, documents, len(numbers), scale * members, *counts))
    return estimates
