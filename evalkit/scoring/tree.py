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
    first = max(trunk, 1)
    order = sorted(range(len(sequences)), key=lambda i: sort_key(sequences[i]))
    tokens: list[Ints] = []
    positions: list[Ints] = []
    pair_nodes: list[Ints] = []
    pair_targets: list[Ints] = []
    ends = np.zeros(sum(len(s) for s in sequences), dtype=np.int32)
    paths: list[Ints] = [np.empty(0, np.int32)] * len(sequences)
    nodes = pairs = 0
    previous = path = parents = np.empty(0, np.int32)
    for i in order:
        sequence = sequences[i]
        shared = common_prefix(previous, sequence)
        # Nodes: the inputs after the trunk; those shared with the previous sequence are reused from its path
        inputs = sequence[trunk : len(sequence) - 1]
        kept = min(max(shared - trunk, 0), len(inputs), len(parents))
        ends[parents[kept:]] = nodes
        fresh = np.arange(nodes, nodes + len(inputs) - kept, dtype=np.int32)
        parents = np.concatenate((parents[:kept], fresh))
        tokens.append(inputs[kept:])
        positions.append(np.arange(trunk + kept, trunk + len(inputs), dtype=np.int32))
        nodes += len(fresh)
        # Pairs: one for each scored token that no earlier sequence has scored from the same node
        scored = np.full(len(sequence) - first, -1, dtype=np.int32)
        old = min(max(shared - first, 0), len(path), len(scored))
        scored[:old] = path[:old]
        selected = is_scored[i][first:]
        new = np.flatnonzero(selected & (scored < 0))
        scored[new] = np.arange(pairs, pairs + len(new), dtype=np.int32)
        before = np.concatenate(([TRUNK], parents)).astype(np.int32) if trunk else parents
        pair_nodes.append(before[new])
        pair_targets.append(sequence[first:][new])
        pairs += len(new)
        paths[i] = np.where(selected, scored, -1).astype(np.int32)
        previous, path = sequence, scored
    ends[parents] = nodes
    return Tree(
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        ends=ends[:nodes],
        pair_nodes=np.concatenate(pair_nodes),
        pair_targets=np.concatenate(pair_targets),
        paths=tuple(paths),
    )
