"""A made-up tree on which sharing is compared with running each sequence by itself.

In: how long the packed row and its longest sequence are to be. Out: a `Probe`, which does not depend on any document:
a prefix, then branches that part again, of unlike lengths (one token among them), repeated until the row is as long as
the batches that will run, and one branch as long as the longest sequence. Every repetition of a branch must come out
as its sequence does alone, wherever in the row it stands; a model that counts by rows, keeps a window of rows or
ignores a mask does not manage that. Only a few distinct sequences have to be run by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalkit.scoring.tree import Ints, Tree

SHORTEST = 8
"""Fewest tokens of a sequence in which a prefix, a stem and a leaf can be told apart."""
_PREFIX = 24
"""Tokens that all sequences share; two thirds of them are the trunk where there is one."""
_STEMS, _LEAVES = (5, 31, 14), (1, 19, 7)
"""Lengths of the branches' stems, and of the leaves that each has."""


@dataclass(frozen=True)
class Probe:
    """A row of tokens, and which sequence each of them belongs to."""

    sequences: tuple[Ints, ...]
    """The distinct sequences, each [length] token ids."""
    tree: Tree
    """[nodes] the whole row, without a trunk; it has no pairs, since hidden states are compared."""
    owner: NDArray[np.int64]
    """[nodes] the sequence, of `sequences`, in which the node stands at its position."""
    trunk: int
    """Length of the prefix that may go through the model first."""

    def after(self, trunk: int) -> Tree:
        """The row without its first tokens, which are the trunk."""
        tree = self.tree
        return replace(
            tree, tokens=tree.tokens[trunk:], positions=tree.positions[trunk:], ends=tree.ends[trunk:] - trunk
        )


def hide_first(tree: Tree) -> Tree:
    """The tree with its first token hidden from all others, as of a window that is one token too short."""
    ends = tree.ends.copy()
    ends[0] = 1
    return replace(tree, ends=ends)


def make_probe(vocabulary: int, row: int, longest: int, seed: int = 0) -> Probe:
    """Lay out a probe.

    Args:
        vocabulary: ids are below it.
        row: nodes of the tree, at least `longest`.
        longest: tokens of the longest sequence, at least `SHORTEST`.
        seed: of the token ids.
    """
    dice = np.random.default_rng(seed)
    scale = min(1.0, longest / (_PREFIX + max(_STEMS) + max(_LEAVES)))
    prefix = dice.integers(0, vocabulary, max(3, int(scale * _PREFIX)), dtype=np.int32)
    sequences: list[Ints] = []
    blocks: list[_Block] = []
    for stem in (*_STEMS, None):
        # The last block is the one long branch
        length = longest - len(prefix) if stem is None else max(1, int(scale * stem))
        stem_ids = dice.integers(0, vocabulary, length, dtype=np.int32)
        leaves = () if stem is None else _LEAVES
        leaf_ids = [dice.integers(0, vocabulary, max(1, int(scale * n)), dtype=np.int32) for n in leaves]
        blocks.append(_block(len(prefix), stem_ids, leaf_ids, len(sequences)))
        sequences += [np.concatenate((prefix, stem_ids, leaf)) for leaf in leaf_ids or [stem_ids[:0]]]
    start = _Block(prefix, np.arange(len(prefix), dtype=np.int32), np.full(len(prefix), row), np.zeros_like(prefix))
    parts, nodes = [start], len(prefix)
    for block in _in_turn(blocks):
        parts.append(block._replace(ends=np.minimum(block.ends + nodes, row)))
        nodes += len(block.tokens)
        if nodes >= row:
            break
    tokens, positions, ends, owner = (np.concatenate(arrays)[:row] for arrays in zip(*parts, strict=True))
    none = np.empty(0, np.int32)
    tree = Tree(tokens, positions, ends.astype(np.int32), none, none, ())
    return Probe(tuple(sequences), tree, owner.astype(np.int64), 2 * len(prefix) // 3)


class _Block(NamedTuple):
    """A branch after the prefix; arrays [nodes], `ends` counted from its own first node."""

    tokens: Ints
    positions: Ints
    ends: Ints
    owner: Ints


def _block(prefix: int, stem: Ints, leaves: list[Ints], first: int) -> _Block:
    """A stem with its leaves one after the other; `first` is the sequence of the first leaf."""
    total = len(stem) + sum(map(len, leaves))
    tokens, positions = [stem], [np.arange(prefix, prefix + len(stem))]
    ends, owner = [np.full(len(stem), total)], [np.full(len(stem), first)]
    at = len(stem)
    for number, leaf in enumerate(leaves):
        tokens.append(leaf)
        positions.append(np.arange(prefix + len(stem), prefix + len(stem) + len(leaf)))
        at += len(leaf)
        ends.append(np.full(len(leaf), at))
        owner.append(np.full(len(leaf), first + number))
    return _Block(*(np.concatenate(arrays).astype(np.int32) for arrays in (tokens, positions, ends, owner)))


def _in_turn(blocks: list[_Block]) -> Iterator[_Block]:
    """The short branches once, the long one, then the short ones again and again."""
    yield from blocks
    while True:
        yield from blocks[:-1]
