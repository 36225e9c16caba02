"""Batching of sequences under a token budget.

In: what is to be scored, as `SequenceSet`s. Out: `TreeBatch`es, in the order in which they are run. The plan depends
only on its arguments, so a resumed run plans the same batches and can skip the finished ones.

Sets are sorted lexicographically by their tokens, so that neighbours share the longest prefixes (a passage, a twin's
sentence, a subject's preamble). A batch is a contiguous part of that order, computed as one tree.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.errors import ScoringError
from evalkit.scoring.sequences import Places, SequenceArrays
from evalkit.scoring.tree import Ints, Tree, build_tree

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
class PlannedBatch:
    """A batch before its sequences are looked up."""

    trunk: Ints
    """As of `TreeBatch`."""
    items: tuple[int, ...]
    """Numbers of its items."""
    largest: tuple[int, int]
    """Most tokens of an item after the trunk, and its number."""


def plan(items: Sequence[SequenceSet], budget: int) -> list[TreeBatch]:
    """Plan the batches of one task; see `plan_arrays`."""
    arrays, groups = _arrays_of(items)
    found = plan_arrays(arrays, groups, budget)
    return [TreeBatch(one.trunk, tuple(items[number] for number in one.items)) for one in found]


def plan_arrays(arrays: SequenceArrays, groups: Sequence[str], budget: int) -> list[PlannedBatch]:
    """Plan the batches of one task.

    Args:
        arrays: what is to be scored.
        groups: [items] see `SequenceSet.group`.
        budget: maximum tokens of a batch without its trunk; an item with more is a batch by itself.
    """
    if not len(groups):
        return []
    lowest, highest = arrays.extremes
    leaves = _Leaves(arrays, arrays.nodes(), lowest, highest)
    order = np.argsort(arrays.ranks[lowest])
    found = [batch for group in _groups(leaves, order, groups, budget) for batch in _cut(leaves, group, budget)]
    return_freed_memory()
    return found


def return_freed_memory() -> None:
    """Give free memory inside the C library's heap back to the system, after a step that needed more than the next."""
    with suppress(OSError, AttributeError):  # AttributeError: another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def check_budget(items: Sequence[SequenceSet], budget: int) -> None:
    """Check that a token budget fits the largest item; see `check_arrays`."""
    arrays, groups = _arrays_of(items)
    check_arrays(plan_arrays(arrays, groups, budget), arrays, groups, [item.label for item in items], budget)


def check_arrays(
    planned: Sequence[PlannedBatch],
    arrays: SequenceArrays,
    groups: Sequence[str],
    labels: Sequence[str],
    budget: int,
) -> None:
    """Raise a `ScoringError` with a sufficient budget if a token budget does not fit the largest item.

    Args:
        planned: the batches under the budget.
        arrays, groups: as of `plan_arrays`.
        labels: [items] their names in messages.
        budget: the token budget.
    """
    needed, item = _largest(planned)
    if needed <= budget:
        return
    enough = needed
    # With fewer batches a trunk may no longer save tokens; its tokens then count in the batches
    while (more := _largest(plan_arrays(arrays, groups, enough))[0]) > enough:
        enough = more
    raise ScoringError(
        f"--token-budget {budget} is too small: {labels[item]} takes {needed} tokens in one batch; "
        f"give at least {enough}, or omit the option"
    )


def _largest(planned: Sequence[PlannedBatch]) -> tuple[int, int]:
    return max((batch.largest for batch in planned), default=(0, 0))


def _arrays_of(items: Sequence[SequenceSet]) -> tuple[SequenceArrays, list[str]]:
    return SequenceArrays.of(item.sequences for item in items), [item.group for item in items]


@dataclass(frozen=True)
class _Leaves:
    """Items with their sizes and extreme sequences, [items] each."""

    arrays: SequenceArrays
    nodes: Places
    """Size of its own tree, without a trunk."""
    lowest: Places
    highest: Places

    def trunk(self, items: Places) -> int:
        """Return the length of the trunk of items, which are in lexicographic order."""
        arrays = self.arrays
        last = self.highest[items[np.argmax(arrays.ranks[self.highest[items]])]]
        common = int(arrays.common(self.lowest[items[:1]], np.array([last]))[0])
        shortest = int(np.minimum.reduceat(arrays.lengths, arrays.first[:-1])[items].min())
        length = max(0, min(common, shortest - 2))
        return length if length >= MIN_TRUNK else 0


def _groups(leaves: _Leaves, order: Places, groups: Sequence[str], budget: int) -> list[Places]:
    """Group items, in order: one array for each group whose own trunk saves tokens, one for all others."""
    names = np.unique(np.asarray(groups, dtype=object).astype(str), return_inverse=True)[1][order]
    members = [order[names == name] for name in dict.fromkeys(names.tolist())]
    if len(members) == 1:
        return members
    common = leaves.trunk(order)
    own: list[Places] = []
    pooled: list[Places] = []
    for group in members:
        length = leaves.trunk(group)
        # Inside a batch the tree shares the prefix anyway
        batches = ceil(int((leaves.nodes[group] - length).sum()) / budget)
        (own if (batches - 1) * (length - common) >= MIN_SAVING else pooled).append(group)
    kept = np.isin(order, np.concatenate(pooled)) if pooled else np.zeros(len(order), bool)
    return [*own, *([order[kept]] if pooled else [])]


def _cut(leaves: _Leaves, items: Places, budget: int) -> Iterator[PlannedBatch]:
    """Split items, in order, into batches of about the same number of tokens."""
    # In a single batch the tree shares the prefix anyway
    length = leaves.trunk(items) if int(leaves.nodes[items].sum()) > budget else 0
    firsts = leaves.lowest[items]
    trunk = leaves.arrays.sequence(int(firsts[0]))[:length]
    fresh = (leaves.nodes[items] - length).tolist()
    shared = [0, *(leaves.arrays.common(firsts[:-1], firsts[1:]) - length).tolist()]
    numbers = items.tolist()
    total = sum(fresh) - sum(shared)

    def batch(start: int, stop: int) -> PlannedBatch:
        largest = max(range(start, stop), key=fresh.__getitem__)
        return PlannedBatch(trunk, tuple(numbers[start:stop]), (fresh[largest], numbers[largest]))

    # The least possible number of batches, none of them almost empty
    size = total / max(1, ceil(total / budget))
    start = tokens = 0
    for i in range(len(numbers)):
        added = fresh[i] - (shared[i] if i > start else 0)
        if i > start and (tokens + added > budget or tokens + added / 2 > size):
            yield batch(start, i)
            start, tokens, added = i, 0, fresh[i]
        tokens += added
    yield batch(start, len(numbers))
