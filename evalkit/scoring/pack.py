"""Batching of sequences under a token budget.

In: what is to be scored, as `SequenceSet`s. Out: `TreeBatch`es, in the order in which they are run. The plan depends
only on its arguments, so a resumed run plans the same batches and can skip the finished ones.

Sets are sorted lexicographically by their tokens, so that neighbours share the longest prefixes (a passage, a twin's
sentence, a subject's preamble). A batch is a contiguous part of that order, computed as one tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.errors import ScoringError
from evalkit.scoring.tree import Ints, Tree, build_tree, common_prefix, sort_key, trunk_length

MIN_TRUNK = 8
"""Minimum tokens of a trunk; a shorter one costs less inside the trees than in a separate forward pass."""
MIN_SAVING = 256
"""Minimum tokens that a group's own trunk must save: about the cost of the extra forward pass."""


@dataclass(frozen=True)
class SequenceSet:
    """Sequences that are scored in one batch, such as those of one question."""

    index: int
    """The caller's number for it."""
    label: str
    """Its name in messages."""
    group: str
    """Sets of one group are likely to share a prefix, such as those of an MMLU subject."""
    sequences: tuple[Ints, ...]
    """Token ids, each [length]."""
    is_scored: tuple[NDArray[np.bool_], ...]
    """For each sequence, [length] whether each token is to be scored."""


@dataclass(frozen=True)
class TreeBatch:
    """Sequence sets of one forward pass."""

    trunk: Ints
    """[trunk length] tokens before every sequence; empty without a trunk."""
    items: tuple[SequenceSet, ...]

    @cached_property
    def tree(self) -> Tree:
        """Return the tree of all sequences after the trunk; its paths are in the order of items and their sequences."""
        sequences = [sequence for item in self.items for sequence in item.sequences]
        return build_tree(sequences, [mask for item in self.items for mask in item.is_scored], len(self.trunk))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the tree, and with few arrays: each costs as much as a thousand tokens."""
        sequences = [sequence for item in self.items for sequence in item.sequences]
        masks = [mask for item in self.items for mask in item.is_scored]
        names = [(item.index, item.label, item.group, len(item.sequences)) for item in self.items]
        lengths = list(map(len, sequences))
        return _unpacked, (self.trunk, names, lengths, np.concatenate(sequences), np.packbits(np.concatenate(masks)))


def _unpacked(
    trunk: Ints, names: list[tuple[int, str, str, int]], lengths: list[int], tokens: Ints, masks: NDArray[np.uint8]
) -> TreeBatch:
    """Return a batch from its pickled form; see `TreeBatch.__reduce__`."""
    ends = np.cumsum(lengths)[:-1]
    sequences = iter(np.split(tokens, ends))
    scored = iter(np.split(np.unpackbits(masks, count=len(tokens)).astype(bool), ends))
    items = [
        SequenceSet(index, label, group, tuple(islice(sequences, count)), tuple(islice(scored, count)))
        for index, label, group, count in names
    ]
    return TreeBatch(trunk, tuple(items))


@dataclass(frozen=True)
class _Leaf:
    """An item with its sort key and size, for planning."""

    item: SequenceSet
    key: bytes
    first: Ints
    """Its lexicographically first sequence."""
    nodes: int
    """Size of its own tree, without a trunk."""


def plan(items: Sequence[SequenceSet], budget: int) -> list[TreeBatch]:
    """Plan the batches of one task.

    Args:
        items: what is to be scored.
        budget: maximum tokens of a batch without its trunk; an item with more is a batch by itself.
    """
    leaves = sorted(map(_leaf, items), key=lambda leaf: (leaf.key, leaf.item.index))
    return [batch for group in _groups(leaves, budget) for batch in _cut(group, budget)]


def smallest_budget(batches: Sequence[TreeBatch]) -> tuple[int, SequenceSet]:
    """Return the tokens of the largest item after its trunk, which is the smallest possible budget, and that item."""
    sizes = ((_leaf(item).nodes - len(batch.trunk), item) for batch in batches for item in batch.items)
    return max(sizes, key=lambda size: size[0])


def check_budget(items: Sequence[SequenceSet], budget: int) -> None:
    """Check that a token budget fits the largest item.

    Raises:
        ScoringError: it does not; names the document and a sufficient budget.
    """
    needed, item = smallest_budget(plan(items, budget))
    if needed <= budget:
        return
    enough = needed
    # With fewer batches a trunk may no longer save tokens; its tokens then count in the batches
    while (more := smallest_budget(plan(items, enough))[0]) > enough:
        enough = more
    raise ScoringError(
        f"--token-budget {budget} is too small: {item.label} takes {needed} tokens in one batch; "
        f"give at least {enough}, or omit the option"
    )


def _leaf(item: SequenceSet) -> _Leaf:
    keys = [sort_key(sequence) for sequence in item.sequences]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    nodes, before = 0, np.empty(0, np.int32)
    for i in order:
        inputs = item.sequences[i][:-1]
        nodes += len(inputs) - common_prefix(before, inputs)
        before = inputs
    return _Leaf(item, keys[order[0]], item.sequences[order[0]], nodes)


def _trunk_of(leaves: Sequence[_Leaf]) -> int:
    length = trunk_length([sequence for leaf in leaves for sequence in leaf.item.sequences]) if leaves else 0
    return length if length >= MIN_TRUNK else 0


def _groups(leaves: Sequence[_Leaf], budget: int) -> list[list[_Leaf]]:
    """Group leaves: one list for each group whose own trunk saves tokens, one list for all others."""
    by_group: dict[str, list[_Leaf]] = {}
    for leaf in leaves:
        by_group.setdefault(leaf.item.group, []).append(leaf)
    if len(by_group) == 1:
        return [list(leaves)]
    common = _trunk_of(leaves)
    own = {}
    for name, group in by_group.items():
        length = _trunk_of(group)
        # Inside a batch the tree shares the prefix anyway
        batches = ceil(sum(leaf.nodes - length for leaf in group) / budget)
        if (batches - 1) * (length - common) >= MIN_SAVING:
            own[name] = group
    pooled = [leaf for leaf in leaves if leaf.item.group not in own]
    return [*own.values(), *([pooled] if pooled else [])]


def _cut(leaves: Sequence[_Leaf], budget: int) -> Iterator[TreeBatch]:
    """Split sorted leaves into batches of about the same number of tokens."""
    # In a single batch the tree shares the prefix anyway
    length = _trunk_of(leaves) if sum(leaf.nodes for leaf in leaves) > budget else 0
    trunk = leaves[0].first[:length]
    fresh = [leaf.nodes - length for leaf in leaves]
    shared = [0, *(common_prefix(a.first, b.first) - length for a, b in pairwise(leaves))]
    total = sum(fresh) - sum(shared)
    # The least possible number of batches, none of them almost empty
    size = total / max(1, ceil(total / budget))
    batch: list[SequenceSet] = []
    tokens = 0
    for i, leaf in enumerate(leaves):
        added = fresh[i] - (shared[i] if batch else 0)
        if batch and (tokens + added > budget or tokens + added / 2 > size):
            yield TreeBatch(trunk, tuple(batch))
            batch, tokens, added = [], 0, fresh[i]
        batch.append(leaf.item)
        tokens += added
    yield TreeBatch(trunk, tuple(batch))
