"""Numbers of tokens that a task takes, estimated from a sample of its documents. No torch.

In: the token sequences of sampled documents, in groups that share a prefix. Out: the tokens of all documents as
scored one by one, and as distinct nodes of prefix trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evalkit.scoring.sequences import SequenceArrays
from evalkit.scoring.tree import Ints, trunk_length


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
    for group in groups:
        scale = group.documents / group.sampled
        shared = _shared(group.sequences)
        alone += scale * sum(len(sequence) - 1 for sequence in group.sequences)
        distinct += shared + scale * (distinct_tokens(group.sequences) - shared)
    if len(groups) > 1:
        firsts = [group.sequences[0] for group in groups]
        distinct -= (len(groups) - 1) * min(_shared(firsts), *(_shared(group.sequences) for group in groups))
    return alone, distinct


def distinct_tokens(sequences: Sequence[Ints]) -> int:
    """Return the nodes of the prefix tree of sequences."""
    return int(SequenceArrays.of([tuple(sequences)]).nodes()[0]) if sequences else 0


def _shared(sequences: Sequence[Ints]) -> int:
    return trunk_length(sequences) if len(sequences) > 1 else 0
