"""Passes over whole rows, and behind stored states."""

from __future__ import annotations

import numpy as np
import pytest

from evalkit.scoring.passes import UNLIMITED, Rows, StateLimit
from evalkit.scoring.tree import build_tree


def rows_of(*sequences: list[int]) -> Rows:
    arrays = [np.array(sequence, np.int32) for sequence in sequences]
    return Rows(build_tree(arrays, [np.ones(len(array), np.bool_) for array in arrays]))


@pytest.mark.parametrize("most_rows", [0, 1, 3, 7, 100])
def test_a_pass_stores_no_more_states_than_its_limit_also_of_a_single_family(most_rows: int) -> None:
    beginning = list(range(40))
    rows = rows_of(*([*beginning, 100 + last, 1, 2] for last in range(20)))
    passes = rows.passes(10**9, StateLimit(40.0 * most_rows, 0, 1))
    assert all(len(part.rows) <= max(1, most_rows) for part in passes)
    nodes = np.concatenate([rows.places(part)[0] for part in passes])
    assert sorted(nodes.tolist()) == list(range(len(rows.tree.tokens)))


def test_sequences_of_one_token_have_no_passes() -> None:
    assert not rows_of([3], [4]).passes(100, UNLIMITED)
    assert not rows_of([3], [4]).passes(100, None)
