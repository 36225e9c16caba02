"""Token sequences of items in flat arrays, and what planning asks of them: order, common prefixes, sizes of trees.

In: token ids, and which of them are to be scored. Out: `Sequences`, which hold those of a whole task; estimates of a
task's tokens from a sample of its documents. A sequence as an object of its own takes more memory and time than its
tokens, so what planning calls has no loop over sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from evalkit.scoring.tree import Ints, trunk_length

Places = NDArray[np.int64]
_AT_ONCE = 2**20
"""Tokens compared at a time."""


class SequenceSet(NamedTuple):
    """The sequences of one item, such as the choices of a question; they are scored in one batch."""

    label: str
    """The item's name in messages."""
    group: str
    """Items of one group are likely to share a prefix, such as those of an MMLU subject."""
    sequences: Sequence[Ints]
    """Token ids, each [length]."""
    is_scored: Sequence[NDArray[np.bool_]]
    """For each sequence, [length] whether each token is to be scored."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of items, such as the questions of a task."""

    tokens: Ints
    """[tokens] ids of all sequences, one after the other."""
    is_scored: NDArray[np.bool_]
    """[tokens] whether each is to be scored."""
    starts: Places
    """[sequences + 1] first token of each sequence, and the end of the last."""
    first: Places
    """[items + 1] first sequence of each item, and the end of the last; every item has a sequence."""
    labels: Sequence[str]
    """[items] see `SequenceSet.label`."""
    groups: Sequence[str]
    """[items] see `SequenceSet.group`."""

    @classmethod
    def of(cls, items: Iterable[SequenceSet]) -> Sequences:
        """Join the sequences of items."""
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
        """Return the number of items."""
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
        lengths = np.empty(len(left), np.int64)
        ends = np.cumsum(least)
        start = 0
        while start < len(left):
            done = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, done + _AT_ONCE, side="right")))
            part = slice(start, stop)
            lengths[part] = _common(self.tokens, self.starts[left[part]], self.starts[right[part]], least[part])
            start = stop
        return lengths


def offsets(counts: Iterable[int]) -> Places:
    """Return where each of several parts starts, and the end of the last, from their sizes."""
    return np.cumsum([0, *counts], dtype=np.int64)


def _common(tokens: Ints, left: Places, right: Places, lengths: Places) -> Places:
    """Return how many tokens from `left` and from `right` on are equal, at most `lengths`, [pairs]."""
    starts = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    differ = np.flatnonzero(tokens[np.repeat(left, lengths) + within] != tokens[np.repeat(right, lengths) + within])
    next_difference = np.append(differ, np.iinfo(np.int64).max)[np.searchsorted(differ, starts)]
    equal: Places = np.minimum(next_difference - starts, lengths)
    return equal


class SampledGroup(NamedTuple):
    """Documents that are likely to share a prefix, such as those of an MMLU subject."""

    sequences: Sequence[Ints]
    """Of the sampled documents; token ids, each [length]."""
    sampled: int
    """Documents."""
    documents: int
    """Of the whole group."""


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
    """Return the nodes of the prefix tree of sequences."""
    masks = [np.zeros(len(sequence), np.bool_) for sequence in sequences]
    return int(Sequences.of([SequenceSet("", "", sequences, masks)]).nodes[0]) if sequences else 0
