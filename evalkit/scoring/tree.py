"""Prefix tree of token sequences: each distinct prefix is computed once.

In: token sequences with a trunk (a prefix common to all, or empty). Out: a `Tree` of the distinct tokens after the
trunk, in depth-first order: a token's descendants follow it without a gap, so token q attends to token k exactly
when k <= q < ends[k], which is the whole tree mask. A sequence's last token is only predicted, and not in the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

TRUNK = -1
"""Node index of the trunk's last token."""


@dataclass(frozen=True)
class Tree:
    """Prefix tree of sequences in depth-first order.

    A *node* is an input token of the tree; a *pair* is a node and a token predicted from it.
    """

    tokens: Ints
    """[nodes] token ids."""
    positions: Ints
    """[nodes] position of each token in its own sequence."""
    ends: Ints
    """[nodes] one past the last descendant."""
    pair_nodes: Ints
    """[pairs] the predicting node; `TRUNK` for the trunk's last token."""
    pair_targets: Ints
    """[pairs] the predicted token's id."""
    paths: tuple[Ints, ...]
    """For each sequence, in input order: [length - first] the pair that scores each of its tokens from `first` on, -1
    where the token is not scored. `first` is the trunk's length, or 1 without a trunk."""


def common_prefix(a: Ints, b: Ints) -> int:
    """Return the length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def sort_key(tokens: Ints) -> bytes:
    """Return a key that sorts token arrays lexicographically, so that neighbours share the longest prefixes."""
    return tokens.astype(">u4").tobytes()


def trunk_length(sequences: Sequence[Ints]) -> int:
    """Return the length of the prefix that all sequences share, at most what leaves each an input token of its own."""
    first = min(sequences, key=sort_key)
    last = max(sequences, key=sort_key)
    return max(0, min(common_prefix(first, last), min(len(s) for s in sequences) - 2))


def build_tree(sequences: Sequence[Ints], is_scored: Sequence[NDArray[np.bool_]], trunk: int = 0) -> Tree:
    """Build the prefix tree of sequences; its paths are in their order.

    Args:
        sequences: token ids, each [length]; they agree on their first `trunk` tokens.
        is_scored: for each sequence, [length] whether each token is to be scored.
        trunk: length of the prefix that is not in the tree.
    """
    order = sorted(range(len(sequences)), key=lambda i: sort_key(sequences[i]))
    # All tokens, sequence after sequence, and their depths
    tokens = np.concatenate([sequences[i] for i in order])
    lengths = np.array([len(sequences[i]) for i in order])
    starts = np.cumsum(lengths) - lengths
    index = np.arange(len(tokens))
    depths = index - np.repeat(starts, lengths)
    # What each sequence shares with the one before: tokens, and nodes with the trunk's
    lengths_before = np.append(0, lengths[:-1])
    in_both = depths < np.repeat(lengths_before, lengths)
    differs = ~in_both | (tokens[np.where(in_both, index - np.repeat(lengths_before, lengths), 0)] != tokens)
    shared = np.minimum(np.minimum.reduceat(np.where(differs, depths, len(tokens)), starts), lengths)
    inputs = lengths - 1
    kept = np.minimum(np.maximum(shared, trunk), np.minimum(inputs, np.append(trunk, inputs[:-1])))
    is_node = (depths >= np.repeat(kept, lengths)) & (depths < np.repeat(inputs, lengths))
    by_depth = np.argsort(depths, kind="stable")

    def latest(is_new: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the place of the latest new token at each token's depth, [tokens]."""
        places = np.empty_like(index)
        places[by_depth] = by_depth[np.maximum.accumulate(np.where(is_new[by_depth], index, 0))]
        return places

    nodes = (np.cumsum(is_node) - 1)[latest(is_node)]
    # Pairs: one for each scored token after a distinct prefix
    first = max(trunk, 1)
    distinct = latest(depths >= np.repeat(shared, lengths))
    selected = np.concatenate([is_scored[i] for i in order]) & (depths >= first)
    is_pair = np.zeros(len(tokens), np.bool_)
    is_pair[distinct[selected]] = True
    pairs = np.flatnonzero(is_pair)
    scored = np.where(selected, (np.cumsum(is_pair) - 1)[distinct], -1).astype(np.int32)
    paths: list[Ints] = [np.empty(0, np.int32)] * len(sequences)
    for i, start, length in zip(order, starts.tolist(), lengths.tolist(), strict=True):
        paths[i] = scored[start + first : start + length]
    return Tree(
        tokens=tokens[is_node],
        positions=depths[is_node].astype(np.int32),
        ends=_ends(np.add.reduceat(is_node, starts, dtype=np.int64), kept),
        pair_nodes=np.where(depths[pairs] > trunk, nodes[pairs - 1], TRUNK).astype(np.int32),
        pair_targets=tokens[pairs],
        paths=tuple(paths),
    )


def _ends(counts: NDArray[np.int64], kept: NDArray[np.int64]) -> Ints:
    """Return one past each node's last descendant, [nodes]; each sequence adds `counts` nodes from depth `kept` on."""
    ends = np.full(int(counts.sum()), counts.sum(), dtype=np.int32)
    path = np.empty(int((counts + kept).max()), np.int32)
    node = size = 0
    for count, depth in zip(counts.tolist(), kept.tolist(), strict=True):
        ends[path[depth:size]] = node
        size = depth + count
        path[depth:size] = np.arange(node, node + count)
        node += count
    return ends
