"""Order, common prefixes and sizes of sequences, and plans of batches, compared with loops over lists."""

from __future__ import annotations

import pickle
from functools import reduce
from itertools import pairwise, takewhile
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.errors import ScoringError
from evalkit.scoring import pack
from evalkit.scoring.pack import MIN_SAVING, MIN_TRUNK, Sequences, SequenceSet, batches_of, plan
from tests.marks import fast

ITEMS = st.lists(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7), min_size=1, max_size=4), min_size=1, max_size=8
)
Lists = list[list[list[int]]]


def sequences_of(items: Lists, groups: list[str] | None = None) -> Sequences:
    """All tokens are scored; item 3 of group "a" is "a 3" in messages."""
    names = groups or [""] * len(items)
    arrays = [[np.array(sequence, np.int32) for sequence in item] for item in items]
    return Sequences.of(
        SequenceSet(f"{name} {number}", name, item, [np.ones(len(sequence), np.bool_) for sequence in item])
        for number, (name, item) in enumerate(zip(names, arrays, strict=True))
    )


def common(left: list[int], right: list[int]) -> list[int]:
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))]


def nodes(item: list[list[int]]) -> int:
    return len({tuple(sequence[:n]) for sequence in item for n in range(1, len(sequence))})


@given(ITEMS, st.integers(1, 12), st.data())
def test_order_common_prefixes_and_sizes(items: Lists, at_once: int, data: st.DataObject) -> None:
    whole, sequences = [sequence for item in items for sequence in item], sequences_of(items)
    assert np.argsort(sequences.ranks).tolist() == sorted(range(len(whole)), key=lambda i: (whole[i], i))
    lowest, highest = sequences.extremes
    assert [whole[i] for i in lowest] == [min(item) for item in items]
    assert [whole[i] for i in highest] == [max(item) for item in items]
    assert [[sequence.tolist() for sequence in sequences[i].sequences] for i in range(len(items))] == items
    assert sequences.nodes.tolist() == list(map(nodes, items))
    pairs = data.draw(st.lists(st.tuples(*[st.integers(0, len(whole) - 1)] * 2), max_size=9))
    left, right = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "_AT_ONCE", at_once)
        found = sequences.common(left, right).tolist()
    assert found == [len(common(whole[a], whole[b])) for a, b in pairs]


def test_large_ids_are_in_numeric_order() -> None:
    sequences = sequences_of([[[255, 1], [256], [65_536], [2, 70_000], [2]]])
    assert np.argsort(sequences.ranks).tolist() == [4, 3, 0, 1, 2]


def random_items(seed: int) -> tuple[Lists, list[str]]:
    """Items of four groups with preambles, a passage, and endings; some sequences are equal."""
    dice = np.random.default_rng(seed)

    def some(most: int, ids: int = 4) -> list[int]:
        return dice.integers(0, ids, dice.integers(0, most)).tolist()

    first, preambles = some(30), [some(200) for _ in range(4)]
    often = (0, 0.5, 1)[seed % 3]
    items, groups = [], []
    for _ in range(int(dice.integers(1, 60))):
        group = int(dice.integers(0, 4))
        stem = (first if dice.random() < often else []) + preambles[group] + some(8, 3)
        items.append([[*stem, *some(9), 1, 2] for _ in range(int(dice.integers(1, 5)))])
        groups.append(f"group {group}")
    return items, groups


def expected_plan(items: Lists, groups: list[str], budget: int) -> list[tuple[int, list[int]]]:
    """(length of the trunk, numbers of items) of each batch."""
    lists = [sorted(item) for item in items]
    order = sorted(range(len(items)), key=lambda number: (lists[number][0], number))

    def trunk(members: list[int]) -> int:
        whole = [sequence for number in members for sequence in lists[number]]
        length = max(0, min(len(reduce(common, whole)), min(map(len, whole)) - 2))
        return length if length >= MIN_TRUNK else 0

    by_group: dict[str, list[int]] = {}
    for number in order:
        by_group.setdefault(groups[number], []).append(number)
    single = []
    for members in by_group.values():
        batches = ceil(sum(nodes(lists[number]) - trunk(members) for number in members) / budget)
        if len(by_group) == 1 or (batches - 1) * (trunk(members) - trunk(order)) >= MIN_SAVING:
            single.append(members)
    pooled = [number for number in order if not any(number in members for members in single)]
    planned = []
    for members in [*single, *([pooled] if pooled else [])]:
        length = trunk(members) if sum(nodes(lists[number]) for number in members) > budget else 0
        fresh = {number: nodes(lists[number]) - length for number in members}
        shared = {b: len(common(lists[a][0], lists[b][0])) - length for a, b in pairwise(members)}
        total = sum(fresh.values()) - sum(shared.values())
        size = total / max(1, ceil(total / budget))
        batch, tokens = [], 0
        for number in members:
            added = fresh[number] - (shared[number] if batch else 0)
            if batch and (tokens + added > budget or tokens + added / 2 > size):
                planned.append((length, batch))
                batch, tokens, added = [], 0, fresh[number]
            batch = [*batch, number]
            tokens += added
        planned.append((length, batch))
    return planned


@pytest.mark.parametrize("seed", fast(range(6), range(60)))
def test_batches_are_those_of_a_plan_by_loops(seed: int) -> None:
    items, groups = random_items(seed)
    sequences = sequences_of(items, groups)
    for budget in (5, 60, 300):
        planned = plan(sequences, budget)
        assert [(batch.trunk, list(batch.items)) for batch in planned] == expected_plan(items, groups, budget)
        for batch in batches_of(sequences, budget):
            assert len(batch.tree.tokens) <= budget or len(batch.items) == 1
            assert len(batch.tree.paths) == sum(len(items[number]) for number in batch.items)
            other = pickle.loads(pickle.dumps(batch))
            assert "tree" not in vars(other) and other.items == batch.items
            assert other.tree.tokens.tolist() == batch.tree.tokens.tolist()
    assert plan(sequences_of([]), 5) == []


@pytest.mark.parametrize("tail", [5, 100])
def test_too_small_a_budget_names_one_that_is_enough(tail: int) -> None:
    """Two groups with preambles of 60 tokens, and after them so many of each item's own."""
    dice = np.random.default_rng(0)
    preambles = dice.integers(0, 500, (2, 60)).tolist()
    items = [[preambles[number % 2] + dice.integers(0, 500, tail).tolist()] for number in range(12)]
    sequences = sequences_of(items, [f"subject {number % 2}" for number in range(12)])
    with pytest.raises(ScoringError, match=r"subject \d \d+ takes \d+ tokens .* give at least \d+") as caught:
        plan(sequences, 3, must_fit=True)
    enough = int(str(caught.value).split("give at least ")[1].split(",")[0])
    assert all(len(planned.of(sequences).tree.tokens) <= enough for planned in plan(sequences, enough, must_fit=True))


def test_a_group_has_a_trunk_of_its_own_where_that_saves_passes() -> None:
    dice = np.random.default_rng(0)
    preambles = dice.integers(0, 500, (2, 300)).tolist()
    items = [[preambles[number % 2] + dice.integers(0, 500, 20).tolist()] for number in range(20)]
    sequences = sequences_of(items, [str(number % 2) for number in range(20)])
    small = batches_of(sequences, 100)
    assert {len(batch.trunk) for batch in small} == {300}
    assert all(len(set(batch.sequences.groups)) == 1 for batch in small)
    assert [batch.trunk for batch in plan(sequences, 5000)] == [0]
