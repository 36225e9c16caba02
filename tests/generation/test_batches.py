"""Batches contain every prompt once, within the budget, next to prompts with the same prefix."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evalkit.generation.capacity import Capacity
from evalkit.generation.prompts import Prompt, shared_tokens

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def prompt(index: int, tokens: list[int], most: int) -> Prompt:
    return Prompt(index, np.array(tokens, np.int64), most)


@given(st.lists(st.tuples(TOKENS, st.integers(1, 9)), max_size=25), st.integers(1, 120), st.integers(1, 6),
       st.integers(1, 8))  # fmt: skip
def test_plans(rows: list[tuple[list[int], int]], budget: int, chunk: int, most_rows: int) -> None:
    prompts = [prompt(number, tokens, most) for number, (tokens, most) in enumerate(rows)]
    plan = Capacity(budget, most_rows, chunk, 0).batches(prompts)
    order = [one for batch in plan for one in batch]
    assert sorted(one.index for one in order) == list(range(len(prompts)))
    for batch in plan:
        columns = max(len(one.tokens) for one in batch) + max(one.max_new_tokens for one in batch)
        assert len(batch) == 1 or (columns * len(batch) <= budget and len(batch) <= most_rows)
    # Prompts with a common prefix of at least a chunk are contiguous
    beginnings = [tuple(one.tokens[:chunk]) if len(one.tokens) > chunk else None for one in order]
    runs = [key for place, key in enumerate(beginnings) if key and (place == 0 or beginnings[place - 1] != key)]
    assert len(runs) == len(set(runs))


@given(TOKENS, TOKENS, st.integers(1, 6))
def test_shared_tokens(one: list[int], other: list[int], chunk: int) -> None:
    found = shared_tokens(np.array(one), np.array(other), chunk)
    assert found % chunk == 0
    assert found < min(len(one), len(other))  # the last token's output is needed, and is not stored
    assert one[:found] == other[:found]
    longer = found + chunk
    assert longer >= min(len(one), len(other)) or one[:longer] != other[:longer]


def test_the_longest_families_come_first() -> None:
    prompts = [prompt(0, [1, 1, 1], 4), prompt(1, [2] * 9, 4), prompt(2, [1, 1, 2], 4), prompt(3, [3] * 5, 4)]
    plan = Capacity(10**6, 1, 2, 0).batches(prompts)
    assert [batch[0].index for batch in plan] == [1, 3, 0, 2]
