"""Synthetic tree for the start-up check, which compares shared with unshared hidden states in float32.

In: the lengths of the packed row and of its longest sequence. Out: a `Probe`, which does not depend on any document: a
prefix, then branches that branch again, of different lengths (one token among them), repeated until the row is as long
as the batches that will run, and one branch as long as the longest sequence. Every repetition of a branch must give the
states of its sequence alone, wherever it is in the row. A model that takes positions from the row, has a window over
the row or ignores the mask fails. Only a few distinct sequences have to be run alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from evalkit.scoring.tree import Ints, Tree

HALF = (torch.bfloat16, torch.float16)


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Make a model compute in float32 inside the context, whatever the dtype of its weights; widening is exact.

    At most one module's weights exist twice: its own, and those of its children without children, since some modules
    read these directly (`conv1d.weight` in Zamba 2, which rounds its input to their dtype). A module that reads the
    weights of others gets two dtypes and fails.
    """
    kept: dict[int, list[tuple[nn.Module, str, torch.Tensor]]] = {}
    # As large as many other modules together
    ends = (model.get_input_embeddings(), model.get_output_embeddings())

    def parts(module: nn.Module) -> list[nn.Module]:
        leaves = (child for child in module.children() if not any(child is end for end in ends))
        return [module, *(leaf for leaf in leaves if not any(True for _ in leaf.children()))]

    def widen(module: nn.Module, *_: Any) -> None:
        for part in parts(module):
            for name, value in list(_halves(part)):
                kept.setdefault(id(module), []).append((part, name, value))
                wide = value.detach().float()
                # A parameter can be replaced by a parameter only
                setattr(part, name, nn.Parameter(wide, False) if isinstance(value, nn.Parameter) else wide)

    def restore(module: nn.Module, *_: Any) -> None:
        for owner, name, value in kept.pop(id(module), []):
            setattr(owner, name, value)

    hooks: list[Any] = []
    for module in model.modules():
        if any(True for part in parts(module) for _ in _halves(part)):
            hooks.append(module.register_forward_pre_hook(widen, prepend=True))
            hooks.append(module.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for changes in kept.values():
            for owner, name, value in changes:
                setattr(owner, name, value)


def _halves(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return a module's own parameters and buffers of half precision, by name."""
    named = (module.named_parameters, module.named_buffers)
    own = (pair for each in named for pair in each(recurse=False, remove_duplicate=False))
    return ((name, value) for name, value in own if value.dtype in HALF)


SHORTEST = 8
"""Minimum tokens of a sequence that consists of a prefix, a stem and a leaf."""
_PREFIX = 24
"""Tokens that all sequences share; two thirds of them are the trunk where there is one."""
_STEMS, _LEAVES = (5, 31, 14), (1, 19, 7)
"""Lengths of the branches' stems, and of the leaves that each has."""


@dataclass(frozen=True)
class Probe:
    """A row of tokens, and the sequence that each of them belongs to."""

    sequences: tuple[Ints, ...]
    """The distinct sequences, each [length] token ids."""
    tree: Tree
    """[nodes] the whole row, without a trunk; it has no pairs, since hidden states are compared."""
    owner: NDArray[np.int64]
    """[nodes] index in `sequences` of the sequence that contains the node at its position."""
    trunk: int
    """Length of the prefix that may be run first, as the trunk."""

    def after(self, trunk: int) -> Tree:
        """Return the tree without its first tokens, which are the trunk."""
        tree = self.tree
        return replace(
            tree, tokens=tree.tokens[trunk:], positions=tree.positions[trunk:], ends=tree.ends[trunk:] - trunk
        )


def mask_first(tree: Tree) -> Tree:
    """Return the tree with its first token masked for all others, as by a window that is one token too short."""
    ends = tree.ends.copy()
    ends[0] = 1
    return replace(tree, ends=ends)


def make_probe(vocabulary: int, row: int, longest: int, seed: int = 0) -> Probe:
    """Build a probe.

    Args:
        vocabulary: number of token ids.
        row: nodes of the tree, at least `longest`.
        longest: tokens of the longest sequence, at least `SHORTEST`.
        seed: seed of the random token ids.
    """

    def drawn(length: int) -> Ints:
        return dice.integers(0, vocabulary, length, dtype=np.int32)

    dice = np.random.default_rng(seed)
    scale = min(1.0, longest / (_PREFIX + max(_STEMS) + max(_LEAVES)))
    prefix = drawn(max(3, int(scale * _PREFIX)))
    pieces: list[_Piece] = []
    sequences: list[Ints] = []
    for length in _STEMS:
        stem = drawn(max(1, int(scale * length)))
        leaves = [drawn(max(1, int(scale * n))) for n in _LEAVES]
        pieces.append(_Piece(stem, len(prefix), len(stem) + sum(map(len, leaves)), len(sequences)))
        for leaf in leaves:
            pieces.append(_Piece(leaf, len(prefix) + len(stem), len(leaf), len(sequences)))
            sequences.append(np.concatenate((prefix, stem, leaf)))
    branch = drawn(longest - len(prefix))
    start, long = _Piece(prefix, 0, row, 0), _Piece(branch, len(prefix), len(branch), len(sequences))
    sequences.append(np.concatenate((prefix, branch)))
    parts: list[tuple[Ints, ...]] = []
    nodes = 0
    for tokens, position, size, owner in chain((start, *pieces, long), cycle(pieces)):
        count = len(tokens)
        positions = np.arange(position, position + count, dtype=np.int32)
        end, sequence = (np.full(count, value, np.int32) for value in (min(nodes + size, row), owner))
        parts.append((tokens, positions, end, sequence))
        nodes += count
        if nodes >= row:
            break
    ids, places, ends, owners = (np.concatenate(arrays)[:row] for arrays in zip(*parts, strict=True))
    none = np.empty(0, np.int32)
    tree = Tree(ids, places, ends, none, none, ())
    return Probe(tuple(sequences), tree, owners.astype(np.int64), 2 * len(prefix) // 3)


class _Piece(NamedTuple):
    """Neighbouring tokens of one branch: the prefix, a stem or a leaf."""

    tokens: Ints
    position: int
    """Of the first token in its sequence."""
    size: int
    """Tokens of the piece and of all that branches from it."""
    owner: int
    """Index of its sequence; of a stem, that of its first leaf."""
