"""Passes over whole rows compute every prefix once, at the place where it is read, and save the most tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.scoring.passes import _LEAST_SHARED, UNLIMITED, Family, Pass, Rows, StateLimit
from evalkit.scoring.tree import build_tree

Prefix = tuple[int, ...]
TOKENS = st.integers(0, 2)
"""Few, so that sequences share prefixes."""
REPEATED = st.integers(1, 30)


@st.composite
def rows_of(draw: st.DrawFn, most: int = 9, has_trunk: bool = True) -> Rows:
    """Rows of a random tree: beginnings that sequences share in part, some equal, some prefixes of others."""
    trunk = draw(st.integers(0, 12)) if has_trunk else 0
    common = draw(st.lists(TOKENS, min_size=trunk, max_size=trunk))
    beginnings = draw(st.lists(st.lists(TOKENS, max_size=30), min_size=1, max_size=3))
    sequences = []
    for _ in range(draw(st.integers(1, most))):
        beginning = draw(st.sampled_from(beginnings))
        cut = draw(st.integers(0, len(beginning)))
        tail = draw(st.lists(TOKENS, min_size=2, max_size=6))
        sequences.append(np.array([*common, *beginning[:cut], *tail], np.int32))
    return Rows(build_tree(sequences, [np.ones(len(tokens), np.bool_) for tokens in sequences]), trunk)


def prefixes(rows: Rows) -> list[Prefix]:
    """The tokens up to each node, from the positions of a depth-first order alone."""
    path: list[int] = []
    found = []
    for token, position in zip(rows.tree.tokens.tolist(), rows.tree.positions.tolist(), strict=True):
        path[position:] = [token]
        found.append(tuple(path))
    return found


def computed(rows: Rows, part: Pass) -> list[Prefix]:
    """The prefix at each place of a pass, from its inputs: the trunk's, the beginnings', the rows'."""
    beginnings, tokens, family = rows.inputs(part)
    trunk = tuple(rows.tokens(0)[: rows.trunk].tolist()) if part.start else ()
    before = [trunk + tuple(beginning) for beginning in beginnings.tolist()]
    places = [trunk[: end + 1] for end in range(len(trunk))]
    places += [whole[: end + 1] for whole in before for end in range(len(trunk), len(whole))]
    for row, number in zip(tokens.tolist(), family.tolist(), strict=True):
        places += [before[number] + tuple(row[: end + 1]) for end in range(len(row))]
    return places


def halved(part: Pass) -> Iterator[Pass]:
    """A pass, and all passes into which it is split where memory runs out."""
    yield part
    if len(part.rows) > 1:
        for half in part.halves():
            assert len(half.rows) < len(part.rows) or len(half.families) > len(part.families)
            yield from halved(half)


def assert_covers(rows: Rows, passes: list[Pass], nodes: list[int]) -> None:
    """Each of the nodes is read in one pass, where its prefix is computed."""
    expected = prefixes(rows)
    read = []
    for part in passes:
        places = computed(rows, part)
        of_part, indices = rows.places(part)
        for node, place in zip(of_part.tolist(), indices.tolist(), strict=True):
            assert places[place] == expected[node]
        read += of_part.tolist()
    assert sorted(read) == nodes


@given(rows_of(), REPEATED, st.booleans())
def test_every_node_is_read_once_where_it_is_computed(rows: Rows, most: int, with_states: bool) -> None:
    for tokens in (1, most, 10**9):
        passes = rows.passes(tokens, UNLIMITED if with_states else None)
        assert_covers(rows, passes, list(range(len(rows.tree.tokens))))
        if tokens == 10**9 and not with_states:
            assert len(passes) == 1
        for part in passes:
            assert len({family.shared == 0 for family in part.families}) == 1


@given(rows_of(), REPEATED, st.booleans())
def test_halves_of_a_pass_compute_the_same_nodes(rows: Rows, most: int, with_states: bool) -> None:
    for part in rows.passes(most, UNLIMITED if with_states else None):
        for whole in halved(part):
            if len(whole.rows) > 1:
                assert_covers(rows, whole.halves(), sorted(rows.places(whole)[0].tolist()))


@given(rows_of(), REPEATED, st.booleans())
def test_passes_are_within_their_limit(rows: Rows, most: int, with_states: bool) -> None:
    """And none is cut where the next family would fit."""
    passes = rows.passes(most, UNLIMITED if with_states else None)
    for part in passes:
        beginnings, tokens, _ = rows.inputs(part)
        assert len(part.families) == 1 or max(beginnings.size, tokens.size) <= most
        assert all(family.shared >= part.start for family in part.families if family.shared)
        lengths = rows.lengths[part.rows]
        assert tokens.shape == (len(part.rows), lengths.max() - part.start) and (lengths > part.start).all()
    for part, following in pairwise(passes):
        if part.start == following.start:
            joined = Pass(part.start, [*part.families, following.families[0]])
            beginnings, tokens, _ = rows.inputs(joined)
            assert max(beginnings.size, tokens.size) > most
    sizes = [rows.inputs(part)[:2] for part in passes]
    assert rows.computed(passes) == sum(beginnings.size + tokens.size for beginnings, tokens in sizes)


def divisions(rows: int) -> Iterator[list[Family]]:
    """All ways to divide rows into neighbours."""
    if not rows:
        yield []
    for size in range(1, rows + 1):
        for before in divisions(rows - size):
            yield [*before, Family(rows - size, rows)]


def saved(rows: Rows, families: list[Any]) -> int:
    """Tokens that families save, if each computes after the trunk what all of its rows begin with once."""
    total = 0
    for first, end, *_ in families:
        paths = [rows.tokens(row).tolist() for row in range(first, end)]
        shared = 0
        while all(len(path) > shared and path[shared] == paths[0][shared] for path in paths):
            shared += 1
        if end - first > 1 and shared >= max(_LEAST_SHARED, rows.trunk):
            total += (end - first - 1) * (shared - rows.trunk)
    return total


@given(rows_of(most=7))
def test_families_save_the_most_tokens(rows: Rows) -> None:
    families = rows._families()
    assert [row for family in families for row in family.rows] == list(range(len(rows.leaves)))
    for family in families:
        assert not family.shared or (family.shared >= _LEAST_SHARED and len(family.rows) > 1)
    assert saved(rows, families) == max(saved(rows, division) for division in divisions(len(rows.leaves)))


@pytest.mark.parametrize("with_states", [False, True])
def test_sequences_of_one_token_need_no_pass(with_states: bool) -> None:
    rows = Rows(build_tree([np.array([5], np.int32)], [np.ones(1, np.bool_)]))
    assert rows.passes(100, UNLIMITED if with_states else None) == []


def test_two_families_are_shared_where_they_save_more_than_one() -> None:
    """The optimum that a brute force over few rows shows, in a tree of a known shape."""
    dice = np.random.default_rng(0)
    start, left, right = (dice.integers(0, 9, size).astype(np.int32) for size in (10, 40, 40))
    left[0], right[0] = 1, 2
    sequences = [
        np.concatenate((start, side, [number, 0])).astype(np.int32) for side in (left, right) for number in range(5)
    ]
    rows = Rows(build_tree(sequences, [np.ones(len(tokens), np.bool_) for tokens in sequences]))
    [part] = rows.passes(10**9, UNLIMITED)
    assert part == Pass(50, [Family(0, 5, 50), Family(5, 10, 50)])
    assert rows.computed([part]) == 2 * 50 + 10
    assert rows.computed(rows.passes(10**9, None)) == 10 * 51


def test_stored_states_of_a_pass_fit_into_memory() -> None:
    """Ten questions of four answers behind 40 tokens: a row of 41 tokens takes 100 bytes, and 10 for each token."""
    question = np.arange(40, dtype=np.int32)
    sequences = [np.concatenate((question + 40 * number, [answer, 0])) for number in range(10) for answer in range(4)]
    masks = [np.ones(len(tokens), np.bool_) for tokens in sequences]
    rows = Rows(build_tree([tokens.astype(np.int32) for tokens in sequences], masks))
    passes = rows.passes(10**9, StateLimit(most_bytes=8 * 510, row_bytes=100, token_bytes=10))
    assert [(part.start, len(part.rows)) for part in passes] == [(40, 8)] * 5


@pytest.mark.parametrize("most_rows", [0, 1, 3, 7, 100])
def test_a_pass_stores_no_more_states_than_its_limit_also_of_a_single_family(most_rows: int) -> None:
    beginning = list(range(40))
    sequences = [np.array([*beginning, 100 + last, 1, 2], np.int32) for last in range(20)]
    rows = Rows(build_tree(sequences, [np.ones(len(tokens), np.bool_) for tokens in sequences]))
    passes = rows.passes(10**9, StateLimit(40.0 * most_rows, 0, 1))
    assert all(len(part.rows) <= max(1, most_rows) for part in passes)
    nodes = np.concatenate([rows.places(part)[0] for part in passes])
    assert sorted(nodes.tolist()) == list(range(len(rows.tree.tokens)))
