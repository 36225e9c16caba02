"""Jobs and their outcomes. In: planned runs. Out: what became of each. Engines differ in who computes the batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from evalkit.benchmarks.base import Plan
from evalkit.errors import EvalkitError, first_line
from evalkit.progress import Progress


@dataclass(frozen=True)
class Job:
    """A run to be completed."""

    label: str
    """Its name in messages."""
    plan: Plan


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    job: Job
    state: Literal["finished", "failed", "in use"]
    """"in use": another process computes it."""
    message: str = ""
    """Why it failed, or who computes it; one line."""


FAILURES = (EvalkitError, MemoryError, OSError)
"""Errors of one job, after which the others go on."""


def why_failed(error: BaseException) -> str:
    """Return an error of a job as a line for the user."""
    if isinstance(error, MemoryError):
        return "out of memory; close other programs, or give a smaller --token-budget"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, FAILURES):
        return str(error)
    return f"unexpected {type(error).__name__}: {first_line(error)}"


class JobRunner(Protocol):
    """Completes jobs; the others go on where one fails."""

    def __call__(
        self, jobs: Sequence[Job], progress: Progress, done: Callable[[Outcome], None] = lambda _: None
    ) -> list[Outcome]:
        """Compute what is missing of each job and write its results.

        Args:
            jobs: the runs, in order of preference; one or more.
            progress: receives messages and progress.
            done: called with each outcome as soon as it is known.

        Returns:
            One outcome for each job, in their order.

        Raises:
            EvalkitError: nothing can be computed at all.
        """
