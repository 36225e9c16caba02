"""Sequences of many items in flat arrays, and what planning asks of them: their order, common prefixes, sizes.

The number of tokens that a task takes is estimated from a sample of its documents.

In: token sequences. Out: arrays. A sequence as an object of its own takes more memory and time than its tokens, so no
function here has a loop over sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from evalkit.scoring.tree import Ints, trunk_length

Places = NDArray[np.int64]
_AT_ONCE = 2**20
"""Tokens compared at a time."""


@dataclass(frozen=True)
class SequenceArrays:
    """Sequences of items, such as questions, which are scored in one batch each."""

    tokens: Ints
    """[tokens] ids of all sequences, one after the other."""
    starts: Places
    """[sequences + 1] first token of each sequence, and the end of the last."""
    first: Places
    """[items + 1] first sequence of each item, and the end of the last; every item has a sequence."""

    @classmethod
    def of(cls, items: Iterable[tuple[Ints, ...]]) -> SequenceArrays:
        """Join the sequences of items."""
        parts = list(items)
        sequences = [sequence for part in parts for sequence in part]
        tokens = np.concatenate(sequences) if sequences else np.empty(0, np.int32)
        return cls(tokens, offsets(map(len, sequences)), offsets(map(len, parts)))

    def sequence(self, number: int) -> Ints:
        """Return the tokens of a sequence."""
        return self.tokens[self.starts[number] : self.starts[number + 1]]

    @cached_property
    def lengths(self) -> Places:
        """[sequences] tokens of each sequence."""
        return np.diff(self.starts)

    @cached_property
    def ranks(self) -> Places:
        """[sequences] place of each sequence in lexicographic order; equal sequences keep their order."""
        # As bytes of big-endian numbers, sequences have the same order
        data = pa.py_buffer(self.tokens.astype(">u4"))
        ends = pa.py_buffer(self.starts * 4)
        count = len(self.lengths)
        keys = pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, [None, ends, data])
        # Unlike Arrow's default one, the system's pool gives memory back
        order = pc.sort_indices(keys, memory_pool=pa.system_memory_pool())
        ranks = np.empty(count, np.int64)
        ranks[order.to_numpy()] = np.arange(len(ranks))
        return ranks

    @cached_property
    def extremes(self) -> tuple[Places, Places]:
        """[items] the first and the last sequence of each item in lexicographic order."""
        order = np.argsort(self.ranks)
        first = self.first[:-1]
        return order[np.minimum.reduceat(self.ranks, first)], order[np.maximum.reduceat(self.ranks, first)]

    def nodes(self) -> Places:
        """Return the number of nodes of each item's own tree, [items]."""
        item = np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))
        order = np.lexsort((self.ranks, item))
        inputs = self.lengths - 1  # the last token is only predicted
        before, after = order[:-1], order[1:]
        shared = self.common(before, after)
        shared = np.minimum(shared, np.minimum(inputs[before], inputs[after]))
        shared[item[before] != item[after]] = 0
        fresh = inputs[order]
        fresh[1:] -= shared
        return np.add.reduceat(fresh, self.first[:-1])

    def common(self, one: Places, other: Places) -> Places:
        """Return the length of the longest common prefix of each pair of sequences, [pairs]."""
        least = np.minimum(self.lengths[one], self.lengths[other])
        found = np.empty(len(one), np.int64)
        ends = np.cumsum(least)
        start = 0
        while start < len(one):
            done = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, done + _AT_ONCE, side="right")))
            part = slice(start, stop)
            found[part] = _common(self.tokens, self.starts[one[part]], self.starts[other[part]], least[part])
            start = stop
        return found


def offsets(counts: Iterable[int]) -> Places:
    """Return where each of several parts starts, and the end of the last, from their sizes."""
    return np.cumsum([0, *counts], dtype=np.int64)


def _common(tokens: Ints, one: Places, other: Places, lengths: Places) -> Places:
    """Return how many tokens from `one` and from `other` on are equal, at most `lengths`, [pairs]."""
    starts = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    left, right = (tokens[np.repeat(begin, lengths) + within] for begin in (one, other))
    differ = np.flatnonzero(left != right)
    place = np.searchsorted(differ, starts)
    first = np.append(differ, np.iinfo(np.int64).max)[place]
    found: Places = np.minimum(first - starts, lengths)
    return found


@dataclass(frozen=True)
class SampledGroup:
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
    return int(SequenceArrays.of([tuple(sequences)]).nodes()[0]) if sequences else 0
