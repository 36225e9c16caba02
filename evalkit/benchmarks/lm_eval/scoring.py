"""Log-likelihoods of continuations, batch by batch, with evalkit's engine.

In: (context, continuation) token ids, each with the document that it belongs to. Out: the log-likelihoods of each
batch. A document is never split over batches. The batches do not depend on how many of them are finished.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import SequenceSet, TreeBatch, check_budget, plan
from evalkit.scoring.prefetch import prefetched


class Continuation(NamedTuple):
    """A continuation to score, after its context."""

    context: Sequence[int]
    continuation: Sequence[int]
    label: str
    """Its name in messages."""
    owner: Hashable
    """The document or other unit it belongs to; consecutive continuations of one owner stay in one batch."""
    group: str = ""
    """A name, such as its task; members of a group often share a prefix."""


def score_all(
    engine: Engine, continuations: Sequence[Continuation], given_budget: int | None = None
) -> Iterator[tuple[int, float, bool]]:
    """Score continuations.

    Args:
        engine: an engine with `greedy=True`.
        continuations: the continuations to score.
        given_budget: the token budget that the user gave, if any.

    Yields:
        (index of the continuation, log-likelihood, is greedy) as in `likelihoods`, batch by batch.

    Raises:
        EvalkitError: the engine rejects the model or a score, or runs out of memory.
    """
    items, members = items_of(continuations)
    if not items:
        return
    if not engine.checked:
        engine.check(items)
    if engine.shares and given_budget == engine.budget:
        check_budget(items, given_budget)
    for batch in prefetched(iter(plan(items, engine.budget)), build_tree_of):
        for item, scores in likelihoods(engine, batch):
            for index, (likelihood, greedy) in zip(members[item.index], scores, strict=True):
                yield index, likelihood, greedy


def build_tree_of(batch: TreeBatch) -> None:
    """Build a batch's tree."""
    _ = batch.tree


def likelihoods(engine: Engine, batch: TreeBatch) -> Iterator[tuple[SequenceSet, list[tuple[float, bool]]]]:
    """Yield each item with its continuations' (log-likelihood in nats, summed in float64; is greedy)."""
    for item, sequences in engine.score(batch):
        pairs = zip(item.is_scored, sequences, strict=True)
        yield (
            item,
            [(float(s.logprobs[w].astype(np.float64).sum()), bool(s.greedy[w].all())) for w, s in pairs],
        )


def items_of(continuations: Sequence[Continuation]) -> tuple[list[SequenceSet], list[list[int]]]:
    """Return one item for each run of continuations with the same owner, and the indices of its continuations."""
    items: list[SequenceSet] = []
    members: list[list[int]] = []
    for _, same_owner in groupby(range(len(continuations)), key=lambda index: continuations[index].owner):
        indices = list(same_owner)
        parts = [continuations[index] for index in indices]
        sequences = [np.array((*part.context, *part.continuation), dtype=np.int32) for part in parts]
        scored = [np.arange(len(s)) >= len(part.context) for part, s in zip(parts, sequences, strict=True)]
        items.append(SequenceSet(len(items), parts[0].label, parts[0].group, tuple(sequences), tuple(scored)))
        members.append(indices)
    return items, members
