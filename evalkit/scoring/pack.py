"""Token sequences of items in flat arrays, and their batches under a token budget.

In: token ids, and which are to be scored. Out: `Sequences` of a task; its `PlannedBatch`es in the order in which they
run; estimates from a sample. The plan depends only on its arguments, so a resumed run plans the same batches. Items are
sorted by their tokens, so that neighbours share the longest prefixes; a batch is part of that order, as one tree.
Planning has no loop over sequences: as objects they take more memory and time than their tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from evalkit.errors import ScoringError
from evalkit.scoring.tree import Ints, Tree, build_tree, trunk_length

Places = NDArray[np.int64]
_AT_ONCE = 2**20
MIN_TRUNK = 8
"""Minimum tokens of a trunk; a shorter trunk costs less inside the trees than in a separate forward pass."""
MIN_SAVING = 256
"""Minimum tokens that a group's own trunk must save: about the cost of the extra forward pass."""


class SequenceSet(NamedTuple):
    """The sequences of an item, such as the choices of a question; they are scored in the same batch."""

    label: str
    group: str
    """Items of one group are likely to share a prefix, such as those of an MMLU subject."""
    sequences: Sequence[Ints]
    is_scored: Sequence[NDArray[np.bool_]]
    """For each sequence, [length] whether each token is to be scored."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of items, such as the questions of a task."""

    tokens: Ints
    """[tokens] ids of all sequences, one after the other."""
    is_scored: NDArray[np.bool_]
    starts: Places
    """[sequences + 1] first token of each sequence, and the end of the last."""
    first: Places
    """[items + 1] first sequence of each item, and the end of the last; every item has a sequence."""
    labels: Sequence[str]
    groups: Sequence[str]

    @classmethod
    def of(cls, items: Iterable[SequenceSet]) -> Sequences:
        members = list(items)
        sequences = [sequence for item in members for sequence in item.sequences]
        masks = [mask for item in members for mask in item.is_scored]
        return cls(
            np.concatenate(sequences) if sequences else np.empty(0, np.int32),
            np.concatenate(masks) if masks else np.empty(0, np.bool_),
            offsets(map(len, sequences)),
            offsets(len(item.sequences) for item in members),
            [item.label for item in members],
            [item.group for item in members],
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, item: int) -> SequenceSet:
        """Return the sequences of an item, as views of the arrays."""
        bounds = self.starts[self.first[item] : self.first[item + 1] + 1].tolist()
        parts = [slice(start, end) for start, end in pairwise(bounds)]
        masks = [self.is_scored[part] for part in parts]
        return SequenceSet(self.labels[item], self.groups[item], [self.tokens[part] for part in parts], masks)

    @cached_property
    def lengths(self) -> Places:
        """[sequences] tokens of each sequence."""
        return np.diff(self.starts)

    @cached_property
    def ranks(self) -> Places:
        """[sequences] place of each sequence in lexicographic order; equal sequences keep their order."""
        # As bytes of big-endian numbers, sequences have the same order
        data, ends = pa.py_buffer(self.tokens.astype(">u4")), pa.py_buffer(self.starts * 4)
        count = len(self.lengths)
        keys = pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, [None, ends, data])
        # Unlike Arrow's default one, the system's pool gives memory back
        order = pc.sort_indices(keys, memory_pool=pa.system_memory_pool())
        ranks = np.empty(count, np.int64)
        ranks[order.to_numpy()] = np.arange(count)
        return ranks

    @cached_property
    def extremes(self) -> tuple[Places, Places]:
        """[items] the first and the last sequence of each item in lexicographic order."""
        order = np.argsort(self.ranks)
        first = self.first[:-1]
        return order[np.minimum.reduceat(self.ranks, first)], order[np.maximum.reduceat(self.ranks, first)]

    @cached_property
    def nodes(self) -> Places:
        """[items] number of nodes of each item's own tree."""
        item = np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))
        order = np.lexsort((self.ranks, item))
        inputs = self.lengths - 1  # the last token is only predicted
        before, after = order[:-1], order[1:]
        shared = np.minimum(self.common(before, after), np.minimum(inputs[before], inputs[after]))
        shared[item[before] != item[after]] = 0
        fresh = inputs[order]
        fresh[1:] -= shared
        return np.add.reduceat(fresh, self.first[:-1])

    def common(self, left: Places, right: Places) -> Places:
        """Return the length of the longest common prefix of each pair of sequences, [pairs]."""
        least = np.minimum(self.lengths[left], self.lengths[right])
        ends, common = np.cumsum(least), np.empty(len(left), np.int64)
        start = 0
        while start < len(left):
            done = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, done + _AT_ONCE, side="right")))
            part, lengths = slice(start, stop), least[start:stop]
            # The tokens of all pairs of this part, one pair after the other, and where each pair differs first
            starts = np.cumsum(lengths) - lengths
            within = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
            first, second = (np.repeat(self.starts[side[part]], lengths) + within for side in (left, right))
            differ = np.flatnonzero(self.tokens[first] != self.tokens[second])
            next_difference = np.append(differ, np.iinfo(np.int64).max)[np.searchsorted(differ, starts)]
            common[part] = np.minimum(next_difference - starts, lengths)
            start = stop
        return common


def offsets(counts: Iterable[int]) -> Places:
    """Return where each of several parts starts, and the end of the last, from their sizes."""
    return np.cumsum([0, *counts], dtype=np.int64)


class SampledGroup(NamedTuple):
    """Documents that are likely to share a prefix, such as those of an MMLU subject."""

    sequences: Sequence[Ints]
    """Of the sampled documents; token ids, each [length]."""
    sampled: int
    documents: int


def estimated_tokens(groups: Sequence[SampledGroup]) -> tuple[float, float]:
    """Return (tokens of all sequences one by one, distinct tokens in trees) for all documents of the groups.

    A prefix that a group shares is counted once, and what its sampled documents have beside it in proportion to its
    documents. A sequence's last token is only predicted, and not counted. Exact where all documents are sampled, except
    for prefixes that several batches repeat.
    """
    alone = distinct = 0.0
    common = [trunk_length(group.sequences) if len(group.sequences) > 1 else 0 for group in groups]
    for group, shared in zip(groups, common, strict=True):
        scale = group.documents / group.sampled
        alone += scale * sum(len(sequence) - 1 for sequence in group.sequences)
        distinct += shared + scale * (distinct_tokens(group.sequences) - shared)
    if len(groups) > 1:
        distinct -= (len(groups) - 1) * min(trunk_length([group.sequences[0] for group in groups]), *common)
    return alone, distinct


def distinct_tokens(sequences: Sequence[Ints]) -> int:
    masks = [np.zeros(len(sequence), np.bool_) for sequence in sequences]
    return int(Sequences.of([SequenceSet("", "", sequences, masks)]).nodes[0]) if sequences else 0


@dataclass(frozen=True)
class TreeBatch:
    trunk: Ints
    """[trunk length] tokens before every sequence; empty without a trunk."""
    items: tuple[int, ...]
    sequences: Sequences

    @cached_property
    def sets(self) -> list[SequenceSet]:
        return [self.sequences[item] for item in range(len(self.items))]

    @cached_property
    def tree(self) -> Tree:
        """Return the tree of all sequences after the trunk; its paths are in the order of items and their sequences."""
        return self._tree(len(self.trunk))

    @cached_property
    def whole_tree(self) -> Tree:
        """Return the tree of all sequences with the trunk; its paths are in the order of items and their sequences."""
        return self._tree(0)

    def part(self, members: slice) -> TreeBatch:
        return TreeBatch(self.trunk, self.items[members], Sequences.of(self.sets[members]))

    def _tree(self, trunk: int) -> Tree:
        sequences = [sequence for item in self.sets for sequence in item.sequences]
        return build_tree(sequences, [mask for item in self.sets for mask in item.is_scored], trunk)

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in self.__dataclass_fields__}


class PlannedBatch(NamedTuple):
    """A batch before its sequences are looked up: the length of its trunk, and the numbers of its items."""

    trunk: int
    items: tuple[int, ...]

    def of(self, sequences: Sequences) -> TreeBatch:
        """Return the batch with its sequences, which are those that were planned."""
        members = [sequences[item] for item in self.items]
        return TreeBatch(members[0].sequences[0][: self.trunk], self.items, Sequences.of(members))


def batches_of(sequences: Sequences, budget: int) -> list[TreeBatch]:
    return [planned.of(sequences) for planned in plan(sequences, budget)]


def plan(sequences: Sequences, budget: int, must_fit: bool = False) -> list[PlannedBatch]:
    """Plan the batches of a task.

    `budget` is the maximum tokens of a batch without its trunk. An item with more is a batch by itself, or if it
    `must_fit` a `ScoringError` that names a sufficient budget.
    """
    if not len(sequences):
        return []
    order = np.argsort(sequences.ranks[sequences.extremes[0]])
    planned = [batch for items in _grouped(sequences, order, budget) for batch in _cut(sequences, items, budget)]
    if must_fit:
        sizes = ((int(sequences.nodes[item]) - batch.trunk, item) for batch in planned for item in batch.items)
        needed, item = max(sizes, key=itemgetter(0))
        if needed > budget:
            # With fewer batches a trunk may no longer save tokens; its tokens then count in the batches
            raise ScoringError(
                f"--token-budget {budget} is too small: {sequences.labels[item]} takes {needed} tokens in one batch; "
                f"give at least {int(sequences.nodes.max())}, or omit the option"
            )
    return_freed_memory()
    return planned


def return_freed_memory() -> None:
    """Give free memory inside the C library's heap back to the system, after a step that needed more than the next."""
    with suppress(OSError, AttributeError):  # AttributeError: another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _trunk(sequences: Sequences, items: Places) -> int:
    lowest, highest = sequences.extremes
    last = highest[items[np.argmax(sequences.ranks[highest[items]])]]
    common = int(sequences.common(lowest[items[:1]], np.array([last]))[0])
    shortest = int(np.minimum.reduceat(sequences.lengths, sequences.first[:-1])[items].min())
    length = max(0, min(common, shortest - 2))
    return length if length >= MIN_TRUNK else 0


def _grouped(sequences: Sequences, order: Places, budget: int) -> list[Places]:
    """Group items, in order: one array for each part whose own trunk saves tokens, one for all others.

    A part is what a group has between neighbours that share no trunk: contexts that are truncated on the left lack the
    prefix of all others.
    """
    names = np.unique(np.asarray(sequences.groups, dtype=object).astype(str), return_inverse=True)[1][order]
    members = [order[names == name] for name in dict.fromkeys(names.tolist())]
    parts = [part for group in members for part in _large_parts(sequences, group, budget)]
    if not parts or len(parts[0]) == len(order):
        return [order]
    common = _trunk(sequences, order)
    single: list[Places] = []
    for part in parts:
        length = _trunk(sequences, part)
        # Each batch would compute the prefix again, and have less room for items
        room = max(1, budget - (length - common))
        batches = min(len(part), ceil(int((sequences.nodes[part] - length).sum()) / room))
        if (batches - 1) * (length - common) >= MIN_SAVING:
            single.append(part)
    pooled = order[~np.isin(order, np.concatenate(single))] if single else order
    return [*single, *([pooled] if len(pooled) else [])]


def _large_parts(sequences: Sequences, items: Places, budget: int) -> Iterator[Places]:
    """Yield the parts of a group that do not fit in a batch."""
    starts = np.flatnonzero(np.append(True, _shared(sequences, items)[1:] < MIN_TRUNK))
    stops = np.append(starts[1:], len(items))
    large = np.add.reduceat(sequences.nodes[items], starts) > budget
    for start, stop in zip(starts[large].tolist(), stops[large].tolist(), strict=True):
        yield items[start:stop]


def _shared(sequences: Sequences, items: Places) -> Places:
    """Return the number of tokens that each item shares with the item before, [items]; 0 for the first.

    Those that the first sequences share, or the last ones if more: with a sequence without the question, only one of
    the two has the context.
    """
    paths = []
    for of_item in sequences.extremes:
        before, after = of_item[items[:-1]], of_item[items[1:]]
        inputs = np.minimum(sequences.lengths[before], sequences.lengths[after]) - 1
        paths.append(np.minimum(sequences.common(before, after), inputs))
    return np.append(0, np.maximum(*paths))


def _cut(sequences: Sequences, items: Places, budget: int) -> Iterator[PlannedBatch]:
    """Cut items into the least possible number of batches of like sizes, where neighbours share few tokens."""
    # In a single batch the tree shares the prefix anyway
    trunk = _trunk(sequences, items) if int(sequences.nodes[items].sum()) > budget else 0
    shared = np.maximum(_shared(sequences, items) - trunk, 0)
    # Tokens of the items before each, if all were in one batch
    before = np.append(0, np.cumsum(sequences.nodes[items] - trunk - shared))
    numbers, start = items.tolist(), 0
    while start < len(numbers):
        # A batch computes again what it shares with the batch before
        offset = before[start] - shared[start]
        stop = max(start + 1, int(np.searchsorted(before, budget + offset, side="right")) - 1)
        if stop < len(numbers):
            total = before[-1] - offset
            size = total / ceil(total / budget)
            stops = slice(start + 1, stop + 1)
            cost = shared[stops] + MIN_SAVING * np.abs(before[stops] - offset - size) / size
            # The last of equal costs
            stop -= int(np.argmin(cost[::-1]))
        yield PlannedBatch(trunk, tuple(numbers[start:stop]))
        start = stop
