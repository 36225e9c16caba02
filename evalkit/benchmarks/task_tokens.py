"""Tokens that a task of a run takes, estimated before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskTokens:
    """Estimates for all documents of a task."""

    task: str
    documents: int
    sampled: int
    """Documents that were tokenised; if these are all, the numbers are counts."""
    rows: float
    """Rows of the journal."""
    alone: float
    """Input tokens of all sequences, one by one."""
    distinct: float
    """Input tokens without those that are shared."""
    generated: float = 0.0
    """Most tokens that are generated."""
    row_bytes: float = 0.0
    """Bytes of a row in journal and tables together; 0: those of a scored choice or of a generated answer."""
    seconds: float = 0.0
    """Time of what is no matrix product, on one CPU."""


def spread(count: int, most: int, block: int = 1) -> list[int]:
    """Return at most `most` places among `count`, in blocks of neighbours that are evenly spread from the first.

    Neighbours may share a prefix, and parts of a task may differ in length, so both are sampled.
    """
    if count <= most:
        return list(range(count))
    blocks = max(1, most // block)
    starts = (number * (count - block) // blocks for number in range(blocks))
    return sorted({start + place for start in starts for place in range(block)})
