"""Order, common prefixes and sizes of sequences in flat arrays, compared with loops over lists."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evalkit.scoring import sequences as module
from evalkit.scoring.sequences import Sequences, SequenceSet

SEQUENCES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7), min_size=1, max_size=4)
ITEMS = st.lists(SEQUENCES, min_size=1, max_size=8)


def arrays_of(items: list[list[list[int]]]) -> Sequences:
    arrays = [[np.array(one, np.int32) for one in item] for item in items]
    return Sequences.of(SequenceSet("", "", item, [one > 0 for one in item]) for item in arrays)


def same_start(one: list[int], other: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def flat(items: list[list[list[int]]]) -> list[list[int]]:
    return [sequence for item in items for sequence in item]


@given(ITEMS)
def test_ranks_are_the_lexicographic_order(items: list[list[list[int]]]) -> None:
    whole, arrays = flat(items), arrays_of(items)
    order = sorted(range(len(whole)), key=lambda i: (whole[i], i))
    assert np.argsort(arrays.ranks).tolist() == order
    lowest, highest = arrays.extremes
    assert [whole[i] for i in lowest] == [min(item) for item in items]
    assert [whole[i] for i in highest] == [max(item) for item in items]
    assert [[one.tolist() for one in item.sequences] for item in arrays] == items


def test_large_ids_are_in_numeric_order() -> None:
    arrays = arrays_of([[[255, 1], [256], [65_536], [2, 70_000], [2]]])
    assert np.argsort(arrays.ranks).tolist() == [4, 3, 0, 1, 2]


@given(ITEMS)
def test_nodes_are_the_distinct_prefixes_of_the_inputs(items: list[list[list[int]]]) -> None:
    expected = [len({tuple(one[:n]) for one in item for n in range(1, len(one))}) for item in items]
    assert arrays_of(items).nodes.tolist() == expected


@given(ITEMS, st.integers(1, 12), st.data())
def test_common_prefixes_whatever_is_compared_at_a_time(
    items: list[list[list[int]]], at_once: int, data: st.DataObject
) -> None:
    whole = flat(items)
    pairs = data.draw(st.lists(st.tuples(*[st.integers(0, len(whole) - 1)] * 2), max_size=9))
    one, other = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    expected = [same_start(whole[a], whole[b]) for a, b in pairs]
    before, module._AT_ONCE = module._AT_ONCE, at_once
    try:
        assert arrays_of(items).common(one, other).tolist() == expected
    finally:
        module._AT_ONCE = before
