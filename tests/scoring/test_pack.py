"""Plans of batches, compared with a plan made by loops over single sequences."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise, takewhile
from math import ceil

import numpy as np
import pytest

from evalkit.scoring.pack import MIN_SAVING, MIN_TRUNK, batches_of
from evalkit.scoring.sequences import Sequences, SequenceSet
from tests.marks import fast


def random_items(seed: int) -> list[SequenceSet]:
    """Items of four groups with preambles, a passage, and endings; some sequences are equal."""
    rng = np.random.default_rng(seed)

    def some(most: int, ids: int = 4) -> list[int]:
        return list(rng.integers(0, ids, rng.integers(0, most)))

    first, preambles = some(30), [some(200) for _ in range(4)]
    often = (0, 0.5, 1)[seed % 3]
    items = []
    for index in range(int(rng.integers(1, 60))):
        group = int(rng.integers(0, 4))
        stem = (first if rng.random() < often else []) + preambles[group] + some(8, 3)
        sequences = [np.array(stem + some(9) + [1, 2], np.int32) for _ in range(int(rng.integers(1, 5)))]
        masks = tuple(np.ones(len(one), bool) for one in sequences)
        items.append(SequenceSet(f"document {index}", f"group {group}", tuple(sequences), masks))
    return items


def same_start(one: list[int], other: list[int]) -> list[int]:
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def nodes(sequences: list[list[int]]) -> int:
    return len({tuple(one[:n]) for one in sequences for n in range(1, len(one))})


def expected(items: list[SequenceSet], budget: int) -> list[tuple[list[int], list[int]]]:
    """(trunk, indices of items) of each batch."""
    lists = {index: sorted(one.tolist() for one in item.sequences) for index, item in enumerate(items)}
    order = sorted(lists, key=lambda index: (lists[index][0], index))

    def trunk(members: list[int]) -> int:
        whole = [one for index in members for one in lists[index]]
        length = max(0, min(len(reduce(same_start, whole)), min(map(len, whole)) - 2))
        return length if length >= MIN_TRUNK else 0

    by_group: dict[str, list[int]] = {}
    for index in order:
        by_group.setdefault(items[index].group, []).append(index)
    own = []
    for members in by_group.values():
        batches = ceil(sum(nodes(lists[index]) - trunk(members) for index in members) / budget)
        if len(by_group) == 1 or (batches - 1) * (trunk(members) - trunk(order)) >= MIN_SAVING:
            own.append(members)
    pooled = [index for index in order if not any(index in members for members in own)]
    found = []
    for members in [*own, *([pooled] if pooled else [])]:
        length = trunk(members) if sum(nodes(lists[index]) for index in members) > budget else 0
        fresh = {index: nodes(lists[index]) - length for index in members}
        shared = {b: len(same_start(lists[a][0], lists[b][0])) - length for a, b in pairwise(members)}
        total = sum(fresh.values()) - sum(shared.values())
        size = total / max(1, ceil(total / budget))
        batch, tokens = [], 0
        for index in members:
            added = fresh[index] - (shared[index] if batch else 0)
            if batch and (tokens + added > budget or tokens + added / 2 > size):
                found.append((lists[members[0]][0][:length], batch))
                batch, tokens, added = [], 0, fresh[index]
            batch = [*batch, index]
            tokens += added
        found.append((lists[members[0]][0][:length], batch))
    return found


@pytest.mark.parametrize("seed", fast(range(20), range(60)))
def test_batches_are_those_of_a_plan_by_loops(seed: int) -> None:
    items = random_items(seed)
    for budget in (5, 60, 300):
        found = [(one.trunk.tolist(), list(one.items)) for one in batches_of(Sequences.of(items), budget)]
        assert found == expected(items, budget)


def test_the_reference_has_trunks_and_groups() -> None:
    """The comparison above is of plans with everything in them."""
    plans = [expected(random_items(seed), 60) for seed in range(60)]
    assert any(trunk for batches in plans for trunk, _ in batches)
    assert any(len({len(t) for t, _ in batches}) > 1 for batches in plans)


def test_nothing_is_planned_for_nothing() -> None:
    assert batches_of(Sequences.of([]), 100) == []
