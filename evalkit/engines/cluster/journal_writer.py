"""The thread that writes computed batches to the journals, so that the driver's loop does not wait for the disk.

In: batches, in the order in which workers return them. Out: the same, in the same order, once they are on the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from evalkit.engines.cluster.tracked_job import Flight, TrackedJob
from evalkit.engines.cluster.worker import ComputedBatch

_MOST = 256
"""Batches that may wait for the disk; the loop waits before it takes more."""


@dataclass(frozen=True)
class WrittenBatch:
    """A batch that has been written, or could not be."""

    job: TrackedJob
    flight: Flight
    answer: ComputedBatch
    error: BaseException | None


class JournalWriter:
    """The writing thread. One thread writes all journals, each in order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "evalkit-write")
        self._waiting: deque[tuple[TrackedJob, Flight, ComputedBatch, Future[Any]]] = deque()

    @property
    def is_writing(self) -> bool:
        """Return whether batches are not taken with `written` yet."""
        return bool(self._waiting)

    def write(self, job: TrackedJob, flight: Flight, answer: ComputedBatch, store: Callable[[], None]) -> None:
        """Have a batch stored in the thread."""
        if len(self._waiting) >= _MOST:
            wait([self._waiting[-_MOST][-1]])
        self._waiting.append((job, flight, answer, self._thread.submit(store)))

    def written(self) -> Iterator[WrittenBatch]:
        """Yield the batches that have been written since the last call."""
        while self._waiting and self._waiting[0][-1].done():
            job, flight, answer, future = self._waiting.popleft()
            yield WrittenBatch(job, flight, answer, future.exception())

    def settle(self, job: TrackedJob) -> None:
        """Wait for all batches of a job."""
        wait([future for about, _, _, future in self._waiting if about is job])

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._thread.shutdown(wait=True)
