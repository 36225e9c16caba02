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


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` places among `count`, evenly spread from the first."""
    return sorted({place * count // most for place in range(most)}) if count > most else list(range(count))
