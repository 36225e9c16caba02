"""Prefetching of token trees."""

from __future__ import annotations

import numpy as np
import pytest

from evalkit.scoring.pack import SequenceSet, TreeBatch
from evalkit.scoring.prefetch import prefetched


def batches(count: int) -> list[TreeBatch]:
    tokens = np.arange(5, dtype=np.int32)
    item = SequenceSet(0, "", "", (tokens,), (np.ones(5, np.bool_),))
    return [TreeBatch(tokens[:number], (item,)) for number in range(count)]


def test_each_batch_comes_once_with_its_number_and_its_tree() -> None:
    plan = batches(4)
    numbers = []
    for number, batch in prefetched(plan, lambda batch: len(batch.trunk) == 2):
        assert "tree" in vars(batch)
        assert number == len(batch.trunk)
        numbers.append(number)
    assert numbers == [0, 1, 3]
    assert not plan


def test_nothing_to_do() -> None:
    assert list(prefetched([], lambda batch: False)) == []
    assert list(prefetched(batches(3), lambda batch: True)) == []


def test_an_error_in_the_tree_builder_is_raised() -> None:
    broken = TreeBatch(np.empty(0, np.int32), (SequenceSet(0, "", "", (np.arange(3, dtype=np.int32),), ()),))
    with pytest.raises(IndexError):
        list(prefetched([broken], lambda batch: False))
