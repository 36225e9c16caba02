"""The tree of shared prefixes, compared with a trie written as a set of prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from evalkit.scoring.tree import TRUNK, Tree, build_tree, sort_key, trunk_length

Prefix = tuple[int, ...]
Case = tuple[list[NDArray[np.int32]], list[NDArray[np.bool_]], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Sequences over few tokens, so that they share, repeat and contain one another; what of them to score; a trunk."""
    trunk = draw(st.lists(st.integers(0, 2), max_size=4))
    # A prefix of another sequence, a duplicate and a sequence with but one token after the trunk are all legal
    tails = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=7))
    sequences = [np.array(trunk + tail, dtype=np.int32) for tail in tails]
    is_scored = [
        np.array(draw(st.lists(st.booleans(), min_size=len(s), max_size=len(s))), dtype=bool) for s in sequences
    ]
    return sequences, is_scored, len(trunk)


def prefixes(tree: Tree, trunk: NDArray[np.int32]) -> list[Prefix]:
    """For each node, the tokens that it sees, trunk first, itself last."""
    nodes = range(len(tree.tokens))
    seen = [[k for k in nodes if k <= q < tree.ends[k]] for q in nodes]
    return [(*trunk.tolist(), *(int(tree.tokens[k]) for k in ancestors)) for ancestors in seen]


def check_tree(tree: Tree, sequences: list[NDArray[np.int32]], is_scored: list[NDArray[np.bool_]], trunk: int) -> None:
    first = max(trunk, 1)
    whole = [tuple(s.tolist()) for s in sequences]
    stem = sequences[0][:trunk]
    found = prefixes(tree, stem)

    # Every distinct input prefix is one node, and attends to its ancestors and nothing else
    assert sorted(found) == sorted({s[:end] for s in whole for end in range(trunk + 1, len(s))})
    assert tree.positions.tolist() == [len(prefix) - 1 for prefix in found]

    # Every distinct (prefix, scored token) is one pair
    before = [tuple(stem.tolist()) if node == TRUNK else found[node] for node in tree.pair_nodes.tolist()]
    pairs = list(zip(before, tree.pair_targets.tolist(), strict=True))
    expected = {
        (s[:at], s[at]) for s, want in zip(whole, is_scored, strict=True) for at in range(first, len(s)) if want[at]
    }
    assert sorted(pairs) == sorted(expected)

    # A sequence's path leads to the pairs of its scored tokens, in order
    for s, want, path in zip(whole, is_scored, tree.paths, strict=True):
        assert [None if p < 0 else pairs[p] for p in path.tolist()] == [
            (s[:at], s[at]) if want[at] else None for at in range(first, len(s))
        ]


@given(cases())
def test_a_tree_is_the_trie_of_its_sequences(case: Case) -> None:
    sequences, is_scored, trunk = case
    check_tree(build_tree(sequences, is_scored, trunk), sequences, is_scored, trunk)


def test_a_tree_written_out() -> None:
    """Two choices "a b" and "a c d" after the context "x y", all but x scored."""
    sequences = [np.array(s, dtype=np.int32) for s in ([7, 8, 1, 2], [7, 8, 1, 3, 4])]
    tree = build_tree(sequences, [np.ones(len(s), dtype=bool) for s in sequences])
    assert tree.tokens.tolist() == [7, 8, 1, 3]
    assert tree.positions.tolist() == [0, 1, 2, 3]
    assert tree.ends.tolist() == [4, 4, 4, 4]
    assert list(zip(tree.pair_nodes.tolist(), tree.pair_targets.tolist(), strict=True)) == [
        (0, 8),
        (1, 1),
        (2, 2),
        (2, 3),
        (3, 4),
    ]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2], [0, 1, 3, 4]]


tokens = st.lists(st.integers(0, 3), min_size=2, max_size=8)


@given(st.lists(tokens, min_size=1, max_size=6))
def test_trunk_is_the_longest_prefix_that_leaves_each_sequence_an_input(sequences: list[list[int]]) -> None:
    shortest = min(map(len, sequences))
    common = max(n for n in range(shortest + 1) if len({tuple(s[:n]) for s in sequences}) == 1)
    found = trunk_length([np.array(s, dtype=np.int32) for s in sequences])
    assert found == min(common, shortest - 2)


@given(st.lists(st.integers(0, 2**31 - 1)), st.lists(st.integers(0, 2**31 - 1)))
def test_keys_sort_as_sequences_do(a: list[int], b: list[int]) -> None:
    left, right = (sort_key(np.array(s, dtype=np.int32)) for s in (a, b))
    assert (left < right) == (a < b)
