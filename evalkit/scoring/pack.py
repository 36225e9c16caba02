"""Batches of sequences under a token budget.

In: the `Sequences` of a task. Out: `PlannedBatch`es, in the order in which they are run, and the `TreeBatch` of each.
The plan depends only on its arguments, so a resumed run plans the same batches and can skip the finished ones.

Items are sorted lexicographically by their tokens, so that neighbours share the longest prefixes (a passage, a twin's
sentence, a subject's preamble). A batch is a contiguous part of that order, computed as one tree.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from evalkit.errors import ScoringError
from evalkit.scoring.sequences import Places, Sequences, SequenceSet
from evalkit.scoring.tree import Ints, Tree, build_tree

MIN_TRUNK = 8
"""Minimum tokens of a trunk; a shorter one costs less inside the trees than in a separate forward pass."""
MIN_SAVING = 256
"""Minimum tokens that a group's own trunk must save: about the cost of the extra forward pass."""


@dataclass(frozen=True)
class TreeBatch:
    """The sequences of one forward pass."""

    trunk: Ints
    """[trunk length] tokens before every sequence; empty without a trunk."""
    items: tuple[int, ...]
    """The caller's numbers of the items."""
    sequences: Sequences
    """Of the items, in order."""

    @cached_property
    def sets(self) -> list[SequenceSet]:
        """Return the sequences of each item, in order."""
        return [self.sequences[place] for place in range(len(self.items))]

    @cached_property
    def tree(self) -> Tree:
        """Return the tree of all sequences after the trunk; its paths are in the order of items and their sequences."""
        sequences = [sequence for item in self.sets for sequence in item.sequences]
        return build_tree(sequences, [mask for item in self.sets for mask in item.is_scored], len(self.trunk))

    def part(self, places: Sequence[int]) -> TreeBatch:
        """Return the batch of some of its items, given by their places."""
        items = tuple(self.items[place] for place in places)
        return TreeBatch(self.trunk, items, Sequences.of(self.sets[place] for place in places))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the fields only."""
        return {name: vars(self)[name] for name in self.__dataclass_fields__}


class PlannedBatch(NamedTuple):
    """A batch before its sequences are looked up."""

    trunk: int
    """Length of its trunk."""
    items: tuple[int, ...]
    """Numbers of its items."""

    def of(self, sequences: Sequences) -> TreeBatch:
        """Return the batch with its sequences, which are those that were planned."""
        members = [sequences[item] for item in self.items]
        return TreeBatch(members[0].sequences[0][: self.trunk], self.items, Sequences.of(members))


def batches_of(sequences: Sequences, budget: int) -> list[TreeBatch]:
    """Return the planned batches with their sequences."""
    return [planned.of(sequences) for planned in plan(sequences, budget)]


def plan(sequences: Sequences, budget: int, must_fit: bool = False) -> list[PlannedBatch]:
    """Plan the batches of one task.

    Args:
        sequences: what is to be scored.
        budget: maximum tokens of a batch without its trunk; an item with more is a batch by itself.
        must_fit: whether such an item is an error.

    Raises:
        ScoringError: an item does not fit; names a sufficient budget.
    """
    if not len(sequences):
        return []
    order = np.argsort(sequences.ranks[sequences.extremes[0]])
    planned = [batch for items in _grouped(sequences, order, budget) for batch in _cut(sequences, items, budget)]
    if must_fit:
        needed, item = _largest(sequences, planned)
        if needed > budget:
            # With fewer batches a trunk may no longer save tokens; its tokens then count in the batches
            enough = needed
            while (more := _largest(sequences, plan(sequences, enough))[0]) > enough:
                enough = more
            raise ScoringError(
                f"--token-budget {budget} is too small: {sequences.labels[item]} takes {needed} tokens in one batch; "
                f"give at least {enough}, or omit the option"
            )
    return_freed_memory()
    return planned


def return_freed_memory() -> None:
    """Give free memory inside the C library's heap back to the system, after a step that needed more than the next."""
    with suppress(OSError, AttributeError):  # AttributeError: another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _largest(sequences: Sequences, planned: Sequence[PlannedBatch]) -> tuple[int, int]:
    """Return the most tokens that an item has after its batch's trunk, and its number."""
    sizes = [(int(sequences.nodes[item]) - batch.trunk, item) for batch in planned for item in batch.items]
    return max(sizes, key=lambda size: size[0])


def _trunk(sequences: Sequences, items: Places) -> int:
    """Return the length of the trunk of items, which are in lexicographic order."""
    lowest, highest = sequences.extremes
    last = highest[items[np.argmax(sequences.ranks[highest[items]])]]
    common = int(sequences.common(lowest[items[:1]], np.array([last]))[0])
    shortest = int(np.minimum.reduceat(sequences.lengths, sequences.first[:-1])[items].min())
    length = max(0, min(common, shortest - 2))
    return length if length >= MIN_TRUNK else 0


def _grouped(sequences: Sequences, order: Places, budget: int) -> list[Places]:
    """Group items, in order: one array for each group whose own trunk saves tokens, one for all others."""
    names = np.unique(np.asarray(sequences.groups, dtype=object).astype(str), return_inverse=True)[1][order]
    members = [order[names == name] for name in dict.fromkeys(names.tolist())]
    if len(members) == 1:
        return members
    common = _trunk(sequences, order)
    single: list[Places] = []
    pooled: list[Places] = []
    for group in members:
        length = _trunk(sequences, group)
        # Inside a batch the tree shares the prefix anyway
        batches = ceil(int((sequences.nodes[group] - length).sum()) / budget)
        (single if (batches - 1) * (length - common) >= MIN_SAVING else pooled).append(group)
    kept = np.isin(order, np.concatenate(pooled)) if pooled else np.zeros(len(order), bool)
    return [*single, *([order[kept]] if pooled else [])]


def _cut(sequences: Sequences, items: Places, budget: int) -> Iterator[PlannedBatch]:
    """Split items, in order, into batches of about the same number of tokens."""
    # In a single batch the tree shares the prefix anyway
    trunk = _trunk(sequences, items) if int(sequences.nodes[items].sum()) > budget else 0
    firsts = sequences.extremes[0][items]
    fresh = (sequences.nodes[items] - trunk).tolist()
    shared = [0, *(sequences.common(firsts[:-1], firsts[1:]) - trunk).tolist()]
    numbers = items.tolist()
    total = sum(fresh) - sum(shared)
    # The least possible number of batches, none of them almost empty
    size = total / max(1, ceil(total / budget))
    start = tokens = 0
    for i in range(len(numbers)):
        added = fresh[i] - (shared[i] if i > start else 0)
        if i > start and (tokens + added > budget or tokens + added / 2 > size):
            yield PlannedBatch(trunk, tuple(numbers[start:i]))
            start, tokens, added = i, 0, fresh[i]
        tokens += added
    yield PlannedBatch(trunk, tuple(numbers[start:]))
