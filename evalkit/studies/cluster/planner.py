"""The thread that opens run folders, plans batches and writes results, while the driver serves the workers.

In: requests about a `TrackedJob`. Out: futures. One thread does all, in order, since a folder's lock belongs to its
thread and lm-eval's state to one task at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from evalkit.benchmarks.base import Batch
from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.remembered import remembered
from evalkit.benchmarks.session import finished, opened
from evalkit.display import Say
from evalkit.models.locate import Checkpoint
from evalkit.models.spec import ModelSpec
from evalkit.studies.cluster.shipping import packed
from evalkit.studies.cluster.tracked_job import Flight, TrackedJob
from evalkit.studies.cluster.worker import ComputedBatch, PreparedRun, Recipe

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


Found = Literal["finished", "open"]


class Planner:
    """The planning thread.

    Args:
        say: called with messages for the user.
        ship: whether checkpoints are sent to the workers.
    """

    def __init__(self, say: Say, ship: bool = False) -> None:
        self._say = say
        self._ship = ship
        self._thread = ThreadPoolExecutor(1, "evalkit-plan")

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a method of this class called in the thread."""
        return self._thread.submit(work, *arguments)

    def open(self, tracked: TrackedJob) -> Found:
        """Open a job's folder, and write its results if nothing is missing.

        Raises:
            RunInUseError: another process has it open.
            EvalkitError: the run cannot be opened or written.
        """
        plan = tracked.job.plan
        if finished(plan, self._say) is not None:
            return "finished"
        run = tracked.run = tracked.stack.enter_context(opened(plan, self._say))
        if not run.is_missing:
            self.finish(tracked)
            return "finished"
        kind = plan.manifest["kind"]
        if self._ship and plan.checkpoint.kind != "hub":
            # Runs of one checkpoint follow each other
            tracked.shipped = remembered("shipped", tracked.model, lambda: packed(plan.checkpoint), most=1)
        tracked.recipe = Recipe(
            kind,
            tracked.model,
            portable(plan.request.model, plan.checkpoint),
            plan.manifest["specification"],
            benchmark(kind).setup(plan),
            run.budget(),
        )
        return "open"

    def plan(self, tracked: TrackedJob, prepared: PreparedRun) -> None:
        """Store the model's facts and plan the batches.

        Raises:
            EvalkitError: a document cannot be computed, or the manifest cannot be written.
        """
        assert tracked.run is not None
        facts = tracked.run.start(prepared.prepared)
        planned = tracked.run.batches(facts, prepared.prepared.tokenizer)
        tracked.total, tracked.done, tracked.stop = planned.total, planned.done, planned.stop
        tracked.batches = tracked.stack.enter_context(closing(planned.batches))

    def fill(self, tracked: TrackedJob, count: int) -> list[Batch]:
        """Return the next batches of a job; fewer than `count` at the end.

        Raises:
            EvalkitError: a document cannot be computed.
        """
        assert tracked.batches is not None
        return list(islice(tracked.batches, count))

    def finish(self, tracked: TrackedJob) -> None:
        """Write a job's results and close its folder.

        Raises:
            EvalkitError: they cannot be computed or written; all batches are in the journal.
        """
        assert tracked.run is not None
        with tracked.stack:
            tracked.run.finish()

    def abandon(self, tracked: TrackedJob, error: BaseException) -> None:
        """Close a job's folder after an error; a new folder without a finished batch is removed."""
        with suppress(BaseException):
            tracked.stack.__exit__(type(error), error, error.__traceback__)

    def end(self, tracked: list[TrackedJob], error: BaseException) -> None:
        """Close all folders, and the thread."""
        for one in tracked:
            one.stop()
            self._thread.submit(self.abandon, one, error)
        self._thread.shutdown(wait=True, cancel_futures=False)


def portable(model: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """Return a specification that means the same on another machine: absolute paths, the commit of a hub model."""
    if checkpoint.kind in ("folder", "gguf"):
        model = replace(model, model=str((checkpoint.gguf or checkpoint.folder).resolve()))
    elif checkpoint.kind == "hub":
        model = replace(model, revision=checkpoint.revision or model.revision)
    if checkpoint.tokenizer is not None:
        model = replace(model, tokenizer=str(checkpoint.tokenizer.resolve()))
    if model.context_config and (path := Path(model.context_config).expanduser()).is_file():
        model = replace(model, context_config=str(path.resolve()))
    return model
