"""Choice of the checkpoint that a free worker computes next.

In: the work that is left for each checkpoint, and how many workers hold it. Out: a checkpoint. Used by the driver, and
by the simulation in `benchmarks/schedule.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointLoad:
    """Work left for a checkpoint."""

    work: float
    """Estimated work that is left, in any unit, the same for all checkpoints; above 0."""
    workers: int
    """Number of workers that have it loaded or are loading it."""
    seconds: float | None = None
    """The same in seconds of one worker; None: not measured yet."""


def choose_checkpoint(
    current: str | None, loads: Mapping[str, CheckpointLoad], loading_seconds: float = 0.0
) -> str | None:
    """Return the checkpoint that a free worker goes on with; None if none is worth loading.

    A worker keeps its checkpoint as long as there is work for it. Else it takes the checkpoint with the most work for
    each of its workers, itself included: the longest first. It joins others only where that ends the checkpoint
    earlier: with n workers, s seconds of work and l seconds of loading, (s + l) / (n + 1) must be less than s / n.

    Args:
        current: the checkpoint that the worker has loaded, if any.
        loads: checkpoints with work that is in no worker's hands.
        loading_seconds: time to load a checkpoint.
    """
    if current in loads:
        return current
    worth = {
        name: load
        for name, load in loads.items()
        if not load.workers or load.seconds is None or load.workers * loading_seconds < load.seconds
    }
    return max(worth, key=lambda name: worth[name].work / (worth[name].workers + 1), default=None)
