"""Token ids to log-likelihoods, batch by batch, through evalkit's engine.

In: (context, continuation) token ids, each with the document that it belongs to. Out: of each finished batch its
log-likelihoods. One document is never parted, and the batches are the same however much of them is done already.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import Item, plan


class Wanted(NamedTuple):
    """One continuation to score."""

    context: Sequence[int]
    continuation: Sequence[int]
    label: str
    """What messages call it."""
    owner: Hashable
    """What it belongs to, such as a document; neighbours with the same owner go through the model together."""


class Scored(NamedTuple):
    """One continuation's score."""

    place: int
    """Which of the wanted ones it is."""
    likelihood: float
    """Log-likelihood in nats, summed in float64."""
    greedy: bool
    """Whether greedy decoding gives exactly this continuation."""


def score_batches(engine: Engine, wanted: Sequence[Wanted], done: Container[int] = ()) -> Iterator[list[Scored]]:
    """Score continuations, leaving out batches of which everything is done.

    Args:
        engine: made with `greedy=True`.
        wanted: what to score, in an order of its own.
        done: indices that need no score; a batch that holds another one is scored whole.

    Yields:
        A batch's scores when it is finished; nothing but an empty list for a batch that is left out.

    Raises:
        EvalkitError: whatever the engine finds wrong with the model, its memory or a score.
    """
    items, members = _items(wanted)
    if not items:
        return
    engine.check(items)
    for batch in plan(items, engine.budget):
        if all(index in done for item in batch.items for index in members[item.index]):
            yield []
            continue
        found = []
        for item, sequences in engine.score(batch):
            for index, places, scores in zip(members[item.index], item.wanted, sequences, strict=True):
                likelihood = float(scores.logprobs[places].astype(np.float64).sum())
                found.append(Scored(index, likelihood, bool(scores.greedy[places].all())))
        yield found


def _items(wanted: Sequence[Wanted]) -> tuple[list[Item], list[list[int]]]:
    """One item for each stretch of the same owner, and the indices that are in it."""
    items: list[Item] = []
    members: list[list[int]] = []
    for _, stretch in groupby(range(len(wanted)), key=lambda index: wanted[index].owner):
        places = list(stretch)
        sequences = [np.array((*wanted[i].context, *wanted[i].continuation), dtype=np.int32) for i in places]
        scored = [np.arange(len(s)) >= len(wanted[i].context) for i, s in zip(places, sequences, strict=True)]
        items.append(Item(len(items), wanted[places[0]].label, "", tuple(sequences), tuple(scored)))
        members.append(places)
    return items, members
