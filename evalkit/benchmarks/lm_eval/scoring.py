"""Token ids to log-likelihoods, batch by batch, through evalkit's engine.

In: (context, continuation) token ids, each with the document that it belongs to. Out: of each finished batch its
log-likelihoods. One document is never parted, and the batches are the same however much of them is done already.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import SequenceSet, TreeBatch, check_budget, plan
from evalkit.scoring.prefetch import prefetched


class Wanted(NamedTuple):
    """One continuation to score."""

    context: Sequence[int]
    continuation: Sequence[int]
    label: str
    """What messages call it."""
    owner: Hashable
    """What it belongs to, such as a document; neighbours with the same owner go through the model together."""
    group: str = ""
    """Such as its task: what is in a group is likely to begin alike."""


def score_all(engine: Engine, wanted: Sequence[Wanted], asked: int | None = None) -> Iterator[tuple[int, float, bool]]:
    """Score continuations.

    Args:
        engine: made with `greedy=True`.
        wanted: what to score, in an order of its own.
        asked: the token budget that the user gave, if any.

    Yields:
        Which of the wanted ones it is, and as `likelihoods`; batch by batch.

    Raises:
        EvalkitError: whatever the engine finds wrong with the model, its memory or a score.
    """
    items, members = items_of(wanted)
    if not items:
        return
    if not engine.checked:
        engine.check(items)
    if engine.shares and asked == engine.budget:
        check_budget(items, asked)
    for _, batch in prefetched(plan(items, engine.budget), lambda _: False):
        for item, found in likelihoods(engine, batch):
            for index, (likelihood, greedy) in zip(members[item.index], found, strict=True):
                yield index, likelihood, greedy


def likelihoods(engine: Engine, batch: TreeBatch) -> Iterator[tuple[SequenceSet, list[tuple[float, bool]]]]:
    """(log-likelihood in nats, summed in float64; whether greedy decoding gives it) of an item's continuations."""
    for item, sequences in engine.score(batch):
        pairs = zip(item.is_scored, sequences, strict=True)
        yield (
            item,
            [(float(s.logprobs[w].astype(np.float64).sum()), bool(s.greedy[w].all())) for w, s in pairs],
        )


def items_of(wanted: Sequence[Wanted]) -> tuple[list[SequenceSet], list[list[int]]]:
    """One item for each stretch of the same owner, and the indices that are in it."""
    items: list[SequenceSet] = []
    members: list[list[int]] = []
    for _, stretch in groupby(range(len(wanted)), key=lambda index: wanted[index].owner):
        places = list(stretch)
        sequences = [np.array((*wanted[i].context, *wanted[i].continuation), dtype=np.int32) for i in places]
        scored = [np.arange(len(s)) >= len(wanted[i].context) for i, s in zip(places, sequences, strict=True)]
        items.append(
            SequenceSet(len(items), wanted[places[0]].label, wanted[places[0]].group, tuple(sequences), tuple(scored))
        )
        members.append(places)
    return items, members
