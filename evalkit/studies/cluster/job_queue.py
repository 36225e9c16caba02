"""The jobs of a driver: opened as workers need them, planned ahead of them, finished when the last batch is stored.

In: jobs, and how many workers hold each checkpoint. Out: `TrackedJob`s with batches that are ready, and outcomes. One
thread opens folders, plans and writes results, in order, since a folder's lock belongs to its thread and lm-eval's
state to one task at a time. Another thread writes the journals.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from itertools import islice
from typing import Any, Literal

from evalkit.benchmarks.base import Batch
from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.request import remembered
from evalkit.benchmarks.session import finished, opened
from evalkit.display import Progress
from evalkit.errors import EvalkitError, RunInUseError
from evalkit.studies.cluster.tracked_job import Estimator, Flight, TrackedJob
from evalkit.studies.cluster.worker import PreparedRun, Recipe, packed, portable
from evalkit.studies.planning import Job
from evalkit.studies.running import Outcome, why_failed

_AHEAD = 4
"""Planned batches for each worker of a job."""
_MOST_UNWRITTEN = 256
"""Batches that may wait for the disk; the loop waits before it takes more."""
_ESTIMATE_EVERY = 0.5
"""Seconds between two estimates of the time left."""


class JobQueue:
    """The jobs, with their state.

    Args:
        jobs: the runs.
        progress: receives messages and progress.
        done: called with each outcome.
        ship: stores a checkpoint's files in the cluster and returns a reference; None: the workers have the files.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        progress: Progress,
        done: Callable[[Outcome], None],
        ship: Callable[[Any], Any] | None = None,
    ) -> None:
        self.jobs = [TrackedJob(number, job) for number, job in enumerate(jobs)]
        self.by_model: dict[str, list[TrackedJob]] = {}
        """Checkpoint → its jobs."""
        for job in self.jobs:
            self.by_model.setdefault(job.model, []).append(job)
        self._progress, self._done, self._ship = progress, done, ship
        self._planner, self._writer = ThreadPoolExecutor(1, "evalkit-plan"), ThreadPoolExecutor(1, "evalkit-write")
        self._planning: dict[Future[Any], TrackedJob] = {}
        """What the planner does for a job; its phase says what that is."""
        self._writing: deque[tuple[TrackedJob, Flight, float, Future[None]]] = deque()
        self._estimator = Estimator()
        self._workers = 0
        """Number of workers at the last estimate."""
        self._estimated = 0.0
        """When the time left was estimated last; seconds of a monotonic clock."""
        progress.start(sum(job.size for job in self.jobs), 0.0)

    @property
    def is_empty(self) -> bool:
        """Return whether every job has its outcome."""
        return all(job.phase == "ended" for job in self.jobs)

    @property
    def is_busy(self) -> bool:
        """Return whether one of the threads has something to do."""
        return bool(self._planning or self._writing)

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes so far, in the order of the jobs."""
        return [job.outcome for job in self.jobs if job.outcome is not None]

    def open(self, workers: int) -> None:
        """Open the jobs of as many checkpoints as there are workers, and one more; the longest first."""
        active = {job.model for job in self.jobs if job.phase not in ("waiting", "ended")}
        waiting: dict[str, list[TrackedJob]] = {}
        for job in self.jobs:
            if job.phase == "waiting":
                waiting.setdefault(job.model, []).append(job)
        room = max(1, workers) + 1 - len(active - waiting.keys())
        ordered = sorted(waiting, key=lambda model: (model not in active, -sum(job.size for job in waiting[model])))
        for model in ordered[: max(room, 0)]:
            for job in sorted(waiting[model], key=lambda job: -job.size):
                job.phase = "opening"
                self._plan(job, self._open, job)

    def prepared(self, job: TrackedJob, answer: PreparedRun) -> None:
        """Plan the batches of a job, once: the first worker that has prepared it determines the facts."""
        if job.phase != "unprepared":
            return
        job.phase = "planning"
        self._plan(job, _start, job, answer)

    def write(self, job: TrackedJob, flight: Flight, seconds: float, store: Callable[[], None]) -> None:
        """Have a batch that took some seconds stored; `written` yields it when it is."""
        if len(self._writing) >= _MOST_UNWRITTEN:
            wait([self._writing[-_MOST_UNWRITTEN][-1]])
        job.in_hands.remove(flight.batch.key)
        job.unwritten += 1
        self._writing.append((job, flight, seconds, self._writer.submit(store)))

    def written(self) -> Iterator[tuple[TrackedJob, Flight]]:
        """Count the batches that have reached the disk, and yield them; a job that cannot be written fails."""
        while self._writing and self._writing[0][-1].done():
            job, flight, seconds, future = self._writing.popleft()
            error = future.exception()
            if job.phase == "ended":
                continue
            if isinstance(error, EvalkitError):
                self.end(job, "failed", str(error), error)
            elif error is not None:
                raise error
            else:
                job.count(flight, seconds)
                yield job, flight

    def estimate(self, workers: int) -> None:
        """Report the time left, now and then."""
        self._workers = workers
        if time.monotonic() - self._estimated >= _ESTIMATE_EVERY:
            self._report()

    def advance(self, workers: Mapping[str | None, int]) -> None:
        """Take what the planner has done, and ask it for more.

        Args:
            workers: checkpoint → number of workers that hold it.
        """
        for future in [future for future in self._planning if future.done()]:
            job = self._planning.pop(future)
            if job.phase == "ended":
                continue
            try:
                found = future.result()
            except RunInUseError as error:
                self.end(job, "in use", str(error), error)
            except Exception as error:  # of one job; the others go on
                self.end(job, "failed", why_failed(error), error)
            else:
                self._take(job, found)
        for job in self.jobs:
            if job.phase != "computing":
                continue
            enough = _AHEAD * max(1, workers.get(job.model, 0))
            if job.batches is not None and not job.filling and len(job.ready) < enough:
                job.filling = 2 * enough
                self._plan(job, _next_batches, job.batches, job.filling)
            elif job.is_computed:
                job.phase = "finishing"
                self._plan(job, _finish, job)

    def end(
        self,
        job: TrackedJob,
        state: Literal["finished", "failed", "in use"],
        message: str = "",
        error: BaseException | None = None,
    ) -> None:
        """Record a job's outcome; close its folder unless it is finished."""
        if job.phase == "ended":
            return
        job.phase = "ended"
        job.ready.clear()
        job.in_hands.clear()
        if state != "finished":
            wait([future for about, *_, future in self._writing if about is job])
            self._planner.submit(_abandon, job, error or EvalkitError(message))
        job.outcome = Outcome(job.job, state, message)
        self._report()
        job.recipe = job.shipped = job.run = job.batches = None
        self._done(job.outcome)

    def close(self, error: BaseException) -> None:
        """Write the batches that have come, and close the folders of all unfinished jobs."""
        self._writer.shutdown(wait=True)
        for future in self._planning:
            future.cancel()
        for job in self.jobs:
            if job.phase != "ended":
                job.stop()
                self._planner.submit(_abandon, job, error)
        self._planner.shutdown(wait=True)

    def _plan(self, job: TrackedJob, work: Callable[..., Any], *arguments: Any) -> None:
        self._planning[self._planner.submit(work, *arguments)] = job

    def _take(self, job: TrackedJob, found: Any) -> None:
        """Take what the planner has done for a job."""
        if job.phase == "finishing" or (job.phase == "opening" and found):
            self.end(job, "finished")
        elif job.phase == "opening":
            job.phase = "unprepared"
        elif job.phase == "planning":
            job.phase = "computing"
        else:
            job.ready.extend(map(Flight, found))
            if len(found) < job.filling:
                job.batches = None
            job.filling = 0

    def _report(self) -> None:
        self._estimated = time.monotonic()
        self._progress.expect(*self._estimator.estimate(self.jobs, self._workers))

    def _open(self, job: TrackedJob) -> bool:
        """Open a job's folder, and write its results if nothing is missing; return whether it is finished."""
        plan, say = job.job.plan, self._progress.say
        if finished(plan, say) is not None:
            return True
        run = job.run = job.stack.enter_context(opened(plan, say))
        if not run.is_missing:
            _finish(job)
            return True
        if (ship := self._ship) is not None and plan.checkpoint.kind != "hub":
            # Runs of one checkpoint follow each other
            job.shipped = remembered("shipped", job.model, lambda: ship(packed(plan.checkpoint)), most=1)
        kind = plan.manifest["kind"]
        model = portable(plan.request.model, plan.checkpoint)
        setup = benchmark(kind).setup(plan)
        job.recipe = Recipe(kind, job.model, model, plan.manifest["specification"], setup, run.budget())
        return False


def _start(job: TrackedJob, answer: PreparedRun) -> None:
    """Store the model's facts and plan the batches."""
    assert job.run is not None
    facts = job.run.start(answer.prepared)
    planned = job.run.batches(facts, answer.prepared.tokenizer)
    job.total, job.done, job.stop = planned.total, planned.done, planned.stop
    job.batches = job.stack.enter_context(closing(planned.batches))


def _next_batches(batches: Iterator[Batch], count: int) -> list[Batch]:
    """Return the next batches of a job; fewer than `count` at the end."""
    return list(islice(batches, count))


def _finish(job: TrackedJob) -> None:
    """Write a job's results and close its folder."""
    assert job.run is not None
    with job.stack:
        job.run.finish()


def _abandon(job: TrackedJob, error: BaseException) -> None:
    """Close a job's folder after an error; a new folder without a finished batch is removed."""
    with suppress(BaseException):
        job.stack.__exit__(type(error), error, error.__traceback__)
