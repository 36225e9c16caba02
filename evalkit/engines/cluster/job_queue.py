"""The jobs of a driver: opened as workers need them, planned ahead of them, finished when the last batch is stored.

In: jobs, and how many workers hold each checkpoint. Out: `TrackedJob`s with batches that are ready, and outcomes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from evalkit.benchmarks.base import Batch
from evalkit.engines.base import Job, Outcome, why_failed
from evalkit.engines.cluster.estimates import Estimator, cost_in_seconds, weigh
from evalkit.engines.cluster.journal_writer import JournalWriter
from evalkit.engines.cluster.planner import Planner
from evalkit.engines.cluster.tracked_job import Flight, TrackedJob
from evalkit.engines.cluster.worker import PreparedRun
from evalkit.errors import EvalkitError, RunInUseError
from evalkit.progress import Progress
from evalkit.studies.status import progress_of

_AHEAD = 4
"""Planned batches for each worker of a job."""
_ESTIMATE_EVERY = 0.5
"""Seconds between two estimates of the time left."""


class JobQueue:
    """The jobs, with their state.

    Args:
        jobs: the runs.
        weights: relative cost of each among those of its benchmark.
        progress: receives messages and progress.
        done: called with each outcome.
        ship: whether checkpoints are sent to the workers.
        gpus: whether workers have GPUs.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        weights: Sequence[float],
        progress: Progress,
        done: Callable[[Outcome], None],
        ship: bool = False,
        gpus: bool = False,
    ) -> None:
        self.jobs = [
            TrackedJob(number, job, max(weight, 1e-9), progress_of(job.plan).share)
            for number, (job, weight) in enumerate(zip(jobs, weights, strict=True))
        ]
        self.by_model: dict[str, list[TrackedJob]] = {}
        """Checkpoint → its jobs."""
        for job in self.jobs:
            self.by_model.setdefault(job.model, []).append(job)
        self.writer = JournalWriter()
        self._progress = progress
        self._done = done
        self._planner = Planner(progress.say, ship)
        self._planning: dict[Future[Any], tuple[str, TrackedJob]] = {}
        self._device: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
        self._uncosted = list(self.jobs)
        self._to_cost: deque[tuple[TrackedJob, Any]] = deque()
        """Jobs with their tokenizers, which a worker has returned for one of them."""
        self._estimator = Estimator()
        self._workers: tuple[Collection[str | None], int, Sequence[float]] = (), 0, ()
        """Arguments of the last estimate."""
        self._estimated = 0.0
        """When the time left was estimated last; seconds of a monotonic clock."""
        progress.start(sum(job.weight for job in self.jobs), 0.0)

    @property
    def is_empty(self) -> bool:
        """Return whether every job has its outcome."""
        return all(job.phase == "ended" for job in self.jobs)

    @property
    def is_busy(self) -> bool:
        """Return whether the planner or the writer has something to do."""
        return bool(self._planning) or self.writer.is_writing

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
        ordered = sorted(waiting, key=lambda model: (model not in active, -sum(job.weight for job in waiting[model])))
        for model in ordered[: max(room, 0)]:
            for job in sorted(waiting[model], key=lambda job: -job.weight):
                job.phase = "opening"
                self._submit("open", job, self._planner.open)

    def prepared(self, job: TrackedJob, answer: PreparedRun) -> None:
        """Plan the batches of a job, once: the first worker that has prepared it determines the facts."""
        if job.phase == "unprepared":
            tokenizer = answer.prepared.tokenizer
            self._to_cost += [(one, tokenizer) for one in self._uncosted if _digest_of(one) == _digest_of(job)]
            self._uncosted = [one for one in self._uncosted if _digest_of(one) != _digest_of(job)]
            job.phase = "planning"
            self._submit("plan", job, self._planner.plan, answer)

    def estimate(self, held: Collection[str | None], workers: int, loading: Sequence[float]) -> None:
        """Report the time left, now and then; arguments as those of `Estimator.estimate`."""
        self._workers = held, workers, loading
        if time.monotonic() - self._estimated >= _ESTIMATE_EVERY:
            self._report()

    def advance(self, workers: Mapping[str | None, int]) -> None:
        """Take what the planner has done, and ask it for more.

        Args:
            workers: checkpoint → number of workers that hold it.
        """
        for future in [future for future in self._planning if future.done()]:
            what, job = self._planning.pop(future)
            if job.phase == "ended":
                continue
            try:
                found = future.result()
            except RunInUseError as error:
                self.end(job, "in use", str(error), error)
            except Exception as error:  # of one job; the others go on
                self.end(job, "failed", why_failed(error), error)
            else:
                self._take(what, job, found)
        for job in self.jobs:
            if job.phase != "computing":
                continue
            enough = _AHEAD * max(1, workers.get(job.model, 0))
            if job.batches is not None and not job.filling and len(job.ready) < enough:
                job.filling = True
                self._submit("fill", job, self._fill, 2 * enough)
            elif job.is_computed:
                job.phase = "finishing"
                self._submit("finish", job, self._planner.finish)
        if self._to_cost and not self._planning:
            # Only then, so that no worker waits for it
            job, tokenizer = self._to_cost.popleft()
            self._submit("cost", job, self._cost, tokenizer)

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
        job.flights.clear()
        if state != "finished":
            self.writer.settle(job)
            self._planner.submit(self._planner.abandon, job, error or EvalkitError(message))
        job.writing.clear()
        job.outcome = Outcome(job.job, state, message)
        self._report()
        job.recipe = job.run = job.batches = None
        self._done(job.outcome)

    def close(self, error: BaseException) -> None:
        """Write the batches that have come, and close the folders of all unfinished jobs."""
        self.writer.close()
        for future in self._planning:
            future.cancel()
        self._planner.end([job for job in self.jobs if job.phase != "ended"], error)

    def _take(self, what: str, job: TrackedJob, found: Any) -> None:
        if what == "open" and found == "open":
            job.phase = "unprepared"
        elif what in ("open", "finish"):
            self.end(job, "finished")
        elif what == "plan":
            job.phase = "computing"
        elif what == "cost":
            job.cost = found
            if found:
                weigh(self.jobs)
        else:
            batches, asked = found
            job.filling = False
            job.ready.extend(Flight(batch) for batch in batches)
            if len(batches) < asked:
                job.batches = None

    def _fill(self, job: TrackedJob, count: int) -> tuple[list[Batch], int]:
        return self._planner.fill(job, count), count

    def _report(self) -> None:
        self._estimated = time.monotonic()
        held, workers, loading = self._workers
        found = self._estimator.estimate(self.jobs, workers, held, loading)
        self._progress.expect(found.done, found.total, found.seconds)

    def _cost(self, job: TrackedJob, tokenizer: Any) -> float | None:
        return cost_in_seconds(job.job.plan, self._device, tokenizer)

    def _submit(self, what: str, job: TrackedJob, work: Callable[..., Any], *arguments: Any) -> None:
        self._planning[self._planner.submit(work, job, *arguments)] = what, job


def _digest_of(job: TrackedJob) -> str:
    return str(job.job.plan.manifest["specification"]["checkpoint"]["tokenizer"])
