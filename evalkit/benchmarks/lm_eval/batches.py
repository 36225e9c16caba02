"""Batches of lm-eval's requests, in which sequences to score and prompts to continue share their prefixes.

In: requests, finished rows, and facts about the model. Out: the batches that are not finished. How requests are grouped
does not depend on what is finished, so a resumed run gives the answers of an uninterrupted one, bit for bit on the same
machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from evalkit.benchmarks.base import Batch, Batches
from evalkit.benchmarks.lm_eval.encoding import Continuation, Encoding, continuations_of
from evalkit.benchmarks.lm_eval.requests import GENERATED, ModelRequest, RequestRow, unanswered
from evalkit.benchmarks.lm_eval.texts import TextFacts, prompts_of
from evalkit.display import Say
from evalkit.generation.prompts import Prompt
from evalkit.runs.journal import FinishedRows
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import TreeBatch, plan
from evalkit.scoring.sequences import Sequences, SequenceSet

EMPTY_TEXTS = -1
"""Number of the batch of a task's empty texts, which have no tokens to score."""


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
class ScoringContent:
    """Content of a batch of sequences to score."""

    batch: TreeBatch
    rows: list[RequestRow]
    """One for each sequence, in order, without the answer."""

    def warm(self) -> None:
        """See `Batch.warm`."""
        _ = self.batch.tree


@dataclass(frozen=True)
class GenerationContent:
    """Content of a batch of prompts to continue."""

    prompts: list[Prompt]
    rows: list[RequestRow]
    """One for each prompt, without the text."""


def items_of(continuations: Sequence[Continuation]) -> tuple[Sequences, list[list[Continuation]]]:
    """Return one item for each run of continuations with the same owner, and its continuations."""
    items: list[SequenceSet] = []
    members: list[list[Continuation]] = []
    for _, same_owner in groupby(continuations, key=lambda continuation: continuation.owner):
        parts = list(same_owner)
        sequences = [np.array((*part.context, *part.continuation), dtype=np.int32) for part in parts]
        scored = [np.arange(len(s)) >= len(part.context) for part, s in zip(parts, sequences, strict=True)]
        group = "" if parts[0].is_window else parts[0].request.task or ""
        items.append(SequenceSet(parts[0].label, group, tuple(sequences), tuple(scored)))
        members.append(parts)
    return Sequences.of(items), members


def likelihoods(engine: Engine, batch: TreeBatch) -> list[tuple[float, bool]]:
    """Return each sequence's (log-likelihood in nats, summed in float64; is greedy), in order."""
    return [
        (float(scores.logprobs[scored].astype(np.float64).sum()), bool(scores.greedy[scored].all()))
        for item, (_, sequences) in zip(batch.sets, engine.score(batch), strict=True)
        for scored, scores in zip(item.is_scored, sequences, strict=True)
    ]


def batches_of(
    requests: Mapping[str, Sequence[ModelRequest]],
    facts: RequestFacts,
    tokenizer: Any,
    finished: FinishedRows,
    budget: int | None,
    say: Say,
) -> Batches:
    """Yield the batches of all requests without an answer.

    Args:
        requests: by task, see `group_by_task`.
        facts: about the model.
        tokenizer: the model's tokenizer.
        finished: the rows in the journal.
        budget: the token budget that the user gave, if any.
        say: called once if continuations were encoded without their context.
    """
    encoding = Encoding(tokenizer, facts.prefix_id, facts.window)
    for members in requests.values():
        if not unanswered(finished, members):
            continue
        if members[0].kind == GENERATED:
            yield from _generation_batches(members, facts, encoding, finished)
        else:
            continuations = continuations_of(members, encoding, say)
            yield from _empty_texts(members, continuations, finished)
            yield from _scoring_batches(continuations, facts, finished, budget)


def _empty_texts(
    requests: Sequence[ModelRequest], continuations: Sequence[Continuation], finished: FinishedRows
) -> Batches:
    with_tokens = {continuation.place for continuation in continuations}
    empty = [request for index, request in enumerate(requests) if index not in with_tokens]
    if any(request.key() not in finished for request in empty):
        rows = [request.row(0, windows=0)._replace(likelihood=0.0) for request in empty]
        yield _batch(EMPTY_TEXTS, rows, empty, sum(request.work for request in empty))


def _scoring_batches(
    continuations: Sequence[Continuation], facts: RequestFacts, finished: FinishedRows, budget: int | None
) -> Batches:
    items, members = items_of(continuations)
    must_fit = facts.shares and budget == facts.token_budget
    for number, planned in enumerate(plan(items, facts.token_budget, must_fit)):
        in_batch = [continuation for item in planned.items for continuation in members[item]]
        if missing := [continuation for continuation in in_batch if continuation.key not in finished]:
            content = ScoringContent(planned.of(items), [continuation.row for continuation in in_batch])
            work = sum(continuation.request.work / continuation.windows for continuation in missing)
            yield _batch(number, content, [continuation.request for continuation in missing], work)


def _generation_batches(
    requests: Sequence[ModelRequest], facts: RequestFacts, encoding: Encoding, finished: FinishedRows
) -> Batches:
    assert facts.texts is not None
    prompts = prompts_of(requests, encoding, facts.texts)
    for number, batch in enumerate(facts.texts.capacity.batches(prompts)):
        in_batch = [requests[prompt.index] for prompt in batch]
        if missing := [request for request in in_batch if request.key() not in finished]:
            rows = [request.row(len(prompt.tokens)) for request, prompt in zip(in_batch, batch, strict=True)]
            yield _batch(number, GenerationContent(batch, rows), missing, sum(request.work for request in missing))


def _batch(number: int, content: Any, missing: Sequence[ModelRequest], work: float) -> Batch:
    """Return a batch whose work and documents are those of the requests without an answer."""
    first, documents = missing[0], len({request.doc_id for request in missing})
    return Batch(str(first.task), number, content, work, documents, first.journal)
