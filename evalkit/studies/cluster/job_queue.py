"""The jobs of a driver: opened as workers need them, planned ahead of them, finished when the last batch is stored.

In: jobs, and how many workers hold each checkpoint. Out: `TrackedJob`s with batches that are ready, and outcomes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from evalkit.benchmarks.base import Batch, Plan
from evalkit.display import Progress
from evalkit.errors import EvalkitError, RunInUseError
from evalkit.models.locate import silent
from evalkit.studies.cluster.planner import JournalWriter, Planner
from evalkit.studies.cluster.tracked_job import Flight, TrackedJob
from evalkit.studies.cluster.worker import PreparedRun
from evalkit.studies.costs import Speed, cost_of
from evalkit.studies.engines import Job, Outcome, why_failed
from evalkit.studies.status import progress_of

_SPEED = {"cpu": Speed(1e11, 1e10), "cuda": Speed(5e14, 2e12)}
"""Typical speed of a worker's device. Only the ratios of jobs are used, until batches are measured."""


@dataclass(frozen=True)
class TimeEstimate:
    """Work of all jobs in seconds of one worker, or in the unit of weights before a batch is measured."""

    done: float
    total: float
    seconds: float | None
    """Time that is left; None before a batch is measured."""


def cost_in_seconds(plan: Plan, device: Literal["cpu", "cuda"], tokenizer: Any) -> float | None:
    """Return the benchmark's own estimate of a whole run, with a worker's tokenizer; None if it has none."""
    try:
        # Without a device, since the driver does not import torch
        return cost_of(plan, None, silent, tokenizer).seconds(_SPEED[device])
    except Exception:  # the run itself reports what is wrong
        return None


def weigh(jobs: Sequence[TrackedJob]) -> None:
    """Set the weights of jobs to their costs; without one, to what jobs of the same benchmark cost for their size."""
    costed = [job for job in jobs if job.cost]
    ratios = _ratios((job.kind, job.cost or 0.0, job.size) for job in costed)
    for job in jobs:
        job.weight = job.cost or job.size * ratios.get(job.kind, ratios.get("", 1.0))


class Estimator:
    """Estimates the time left, and measures which share of the workers' time their batches are."""

    def __init__(self) -> None:
        self._looked: float | None = None
        """When the workers were counted last; seconds of a monotonic clock."""
        self._available = self._before = 0.0
        """Seconds of all workers since the first delivery, and seconds of the batches delivered until then."""
        self._loaded = 0.0
        """Seconds of loading until the first delivery."""

    def estimate(
        self, jobs: Sequence[TrackedJob], workers: int, held: Collection[str | None], loading: Sequence[float]
    ) -> TimeEstimate:
        """Estimate what is left: of a job by its own batches, else by those of its benchmark, else by all.

        Args:
            jobs: all jobs.
            workers: number of workers, which share the work; 0 counts as 1, since another one starts.
            held: checkpoints that workers have loaded or are loading.
            loading: seconds of each time that a worker has loaded one.
        """
        workers = max(workers, 1)
        measured = [job for job in jobs if job.measured_work]
        rates = _ratios(
            (job.kind, job.measured_seconds, job.weight * job.measured_work / job.total) for job in measured
        )
        done = left = 0.0
        for job in jobs:
            rate = rates.get(job.kind, rates.get("", 1.0))
            if job.measured_work:
                rate = job.measured_seconds * job.total / (job.measured_work * job.weight)
            share = 0.0 if job.phase == "ended" else job.left
            left += rate * share
            done += rate * (job.weight - share)
        if not measured:
            return TimeEstimate(done, done + left, None)
        waiting = {job.model for job in jobs if job.phase != "ended"}.difference(held)
        spent = sum(job.measured_seconds for job in measured)
        batches = sum(len(job.delivered) for job in measured)
        left_each = left / self._busy(workers, spent, batches, sum(loading)) + fmean(loading or [0.0]) * len(waiting)
        return TimeEstimate(done, done + left, left_each / workers)

    def _busy(self, workers: int, spent: float, batches: int, loaded: float) -> float:
        """Return the share of the workers' time, without loading, in which they compute batches."""
        now = time.monotonic()
        if self._looked is None:
            self._before, self._loaded = spent, loaded
        else:
            self._available += workers * (now - self._looked)
        self._looked = now
        # The first few batches say little: as if each worker had been busy with two
        known = 2 * workers * spent / batches
        available = max(self._available - (loaded - self._loaded), 0.0)
        return min(1.0, (spent - self._before + known) / max(available + known, 1e-9))


def _ratios(parts: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return the sum of the second over that of the third values by the first, and of all by ""."""
    sums: dict[str, tuple[float, float]] = {}
    for kind, above, below in parts:
        for name in (kind, ""):
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + above, before[1] + below
    return {name: above / below for name, (above, below) in sums.items() if below}


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
