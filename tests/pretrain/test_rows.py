"""The order of rows: a function of seed and position, equal for all models, processes and micro-batches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from recipe.rows import OrderedRows, as_rows, spread_rows, stacked
from torch.utils.data import BatchSampler, SequentialSampler

TOKENS = np.arange(1000, dtype=np.uint16)


def ordered(count: int = 70, seed: int = 5) -> OrderedRows:
    """Rows of 40 tokens, of which there are 25."""
    return OrderedRows(as_rows(TOKENS, 40, "text"), count, seed)


def first_tokens(rows: OrderedRows) -> list[int]:
    return [int(rows[position]["input_ids"][0]) for position in range(len(rows))]


def test_an_item_is_input_and_labels() -> None:
    item = ordered()[0]
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert (
        item["input_ids"].tolist() == item["labels"].tolist() == list(range(item["labels"][0], item["labels"][0] + 40))
    )
    assert stacked([item, item])["labels"].shape == (2, 40)


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    found = first_tokens(ordered(count=75))
    epochs = [found[start : start + 25] for start in (0, 25, 50)]
    assert all(sorted(epoch) == list(range(0, 1000, 40)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_depends_on_seed_and_position_alone() -> None:
    expected = first_tokens(ordered())
    assert first_tokens(ordered()) == expected
    assert first_tokens(ordered(seed=6)) != expected
    assert first_tokens(ordered(count=30)) == expected[:30]
    # Read in any order, and with another seed's rows between
    backwards = [
        int(ordered()[position]["input_ids"][0]) + 0 * ordered(seed=6)[3]["labels"][0] for position in range(69, -1, -1)
    ]
    assert backwards == expected[::-1]


def test_the_order_is_this_one() -> None:
    """By numpy 2.4's PCG64. Another one would not resume, or repeat, earlier trainings."""
    assert [ordered(seed=1).index(position) for position in range(5)] == [1, 20, 7, 21, 17]
    assert [ordered(seed=1).index(position) for position in range(25, 30)] == [21, 4, 15, 6, 7]


@pytest.mark.parametrize(("processes", "micro"), list(itertools.product((1, 2, 4), (1, 2))))
def test_an_update_has_the_same_rows_for_all_processes_and_micro_batches(processes: int, micro: int) -> None:
    """By the samplers that Trainer and accelerate use."""
    rows, batch = ordered(count=24), 8
    samplers = [
        BatchSamplerShard(BatchSampler(SequentialSampler(rows), micro, drop_last=False), processes, process)
        for process in range(processes)
    ]
    shards = [list(sampler) for sampler in samplers]
    own = batch // micro // processes
    for update in range(3):
        read = [place for shard in shards for part in shard[update * own : (update + 1) * own] for place in part]
        assert sorted(read) == list(range(update * batch, (update + 1) * batch))


@pytest.mark.parametrize(("most", "expected"), [(1, [0]), (3, [0, 12, 24]), (25, range(25)), (99, range(25))])
def test_spread_rows(most: int, expected: list[int]) -> None:
    found = spread_rows(as_rows(TOKENS, 40, "held_out"), most)
    assert [int(item["input_ids"][0]) // 40 for item in found] == list(expected)
