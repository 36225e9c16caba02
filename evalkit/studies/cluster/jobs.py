"""The jobs of a driver, and their batches: planned ahead of the workers, finished when the last batch is stored.

In: jobs, and how many workers hold each checkpoint. Out: `TrackedJob`s with batches that are ready, outcomes, and the
time left. One thread opens folders, plans and writes results, in order, since a folder's lock belongs to its thread and
lm-eval's state to one task at a time. Another thread writes the journals.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal

from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.session import OpenRun, loading_key, opened
from evalkit.cache import remembered
from evalkit.display import Progress
from evalkit.errors import EvalkitError, RunInUseError
from evalkit.escape import counted
from evalkit.requests.batches import Batch, BatchKey
from evalkit.runs.columns import Rows
from evalkit.studies.cluster.worker import ComputedBatch, PreparedRun, Recipe, packed, portable
from evalkit.studies.running import Job, Outcome, why_failed

_AHEAD = 4
"""Planned batches for each worker of a job."""
_MOST_UNWRITTEN = 256
"""Batches that may wait for the disk; the loop waits before it takes more."""
_ESTIMATE_EVERY = 0.5
"""Seconds between two estimates of the time left."""


@dataclass
class Flight:
    """A batch on its way through the workers."""

    batch: Batch
    losses: int = 0
    """Times that it was lost with its worker. After the first one it is computed by itself, so that the right batch is
    blamed."""
    short: set[int] = field(default_factory=set)
    split: bool = False

    def fits(self, worker: int) -> bool:
        """Return whether a worker may compute it."""
        return self.split or worker not in self.short

    def __str__(self) -> str:
        batch = self.batch
        return f"batch {batch.number} of {batch.task} ({counted(batch.documents, 'document')})"


@dataclass(eq=False)
class TrackedJob:
    """A job with its state."""

    number: int
    job: Job
    phase: Literal["waiting", "opening", "unprepared", "computing", "ended"] = "waiting"
    outcome: Outcome | None = None
    steps: Generator[list[Batch], Any, None] | None = None
    is_planning: bool = False
    is_planned: bool = False
    stack: ExitStack = field(default_factory=ExitStack)
    """Closes the folder; only in the planning thread, when no batch is to be written any more."""
    run: OpenRun | None = None
    recipe: Recipe | None = None
    shipped: Any = None
    """Reference to the checkpoint's files in the cluster; None: the workers have them."""
    stop: Callable[[], None] = lambda: None
    ready: deque[Flight] = field(default_factory=deque)
    in_hands: set[BatchKey] = field(default_factory=set)
    """Batches that workers have; an answer for another one is late."""
    unwritten: int = 0
    refusals: dict[int, str] = field(default_factory=dict)
    """Worker → why it cannot prepare the job."""
    losses: int = 0
    """Times that workers were lost while they prepared it; those that did so at the same time count once."""
    lost_at: float = 0.0
    device_kinds: set[tuple[str, str]] = field(default_factory=set)
    total: float = 0.0
    """Work of the whole run; the unit is the benchmark's."""
    done: float = 0.0
    measured_work: float = 0.0
    measured_seconds: float = 0.0
    """Work and seconds of the batches computed in this session."""

    def __post_init__(self) -> None:
        plan, specification = self.job.plan, self.job.plan.manifest["specification"]
        self.label = self.job.label
        self.kind: str = plan.manifest["kind"]
        self.name = f"{self.number} {plan.manifest['id']}"
        self.model = " ".join(map(repr, loading_key(plan.request.model, specification)))
        """Name of its checkpoint as it is loaded."""
        weights = 1
        with suppress(OSError):  # gone since it was planned, which opening the run reports
            weights = sum(path.stat().st_size for path in plan.checkpoint.weights())
        documents = sum(about["count"] for about in plan.manifest["documents"].values())
        self.size = max(float(weights * documents), 1e-9)
        """Relative cost of the whole run: the bytes of its weights times its documents."""

    @property
    def left(self) -> float:
        """Return the unfinished share of its size."""
        return self.size * (1 - (self.done / self.total if self.total else 0.0))

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds of one worker for what is left; None before anything is measured."""
        return self.seconds_of(self.total - self.done)

    def seconds_of(self, work: float) -> float | None:
        """Return the seconds of one worker for some work; None before anything is measured."""
        return self.measured_seconds / self.measured_work * work if self.measured_work else None

    def has_work_for(self, worker: int) -> bool:
        """Return whether a worker can do something for it now."""
        is_ready = self.phase == "computing" and any(flight.fits(worker) for flight in self.ready)
        return worker not in self.refusals and (is_ready or self.phase == "unprepared")

    @property
    def has_more(self) -> bool:
        """Return whether there will be work soon: its batches are being planned."""
        return self.phase == "computing" and not self.is_planned

    @property
    def is_computed(self) -> bool:
        """Return whether no batch is left for workers; some may be unwritten."""
        return self.is_planned and not (self.ready or self.in_hands)

    def put_back(self, flight: Flight) -> None:
        """Make a batch that a worker had available again."""
        self.in_hands.remove(flight.batch.key)
        self.ready.appendleft(flight)


class JobQueue:
    """The jobs, with their state.

    `ship` stores a checkpoint's files in the cluster and returns a reference; None: the workers have the files.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        progress: Progress,
        done: Callable[[Outcome], None] = lambda _: None,
        ship: Callable[[Any], Any] | None = None,
    ) -> None:
        self.jobs = [TrackedJob(number, job) for number, job in enumerate(jobs)]
        sizes: dict[str, float] = {}
        for job in self.jobs:
            sizes[job.model] = sizes.get(job.model, 0.0) + job.size
        longest_first = sorted(self.jobs, key=lambda job: (-sizes[job.model], -job.size))
        self.by_model = {model: [job for job in longest_first if job.model == model] for model in sizes}
        """Checkpoint → its jobs, the longest first in both."""
        self.progress, self._done, self._ship = progress, done, ship
        self._planner, self._writer = ThreadPoolExecutor(1, "evalkit-plan"), ThreadPoolExecutor(1, "evalkit-write")
        self._tasks: list[tuple[TrackedJob, Future[Any], Callable[[Any], None]]] = []
        """What the threads do for a job, and what takes the result."""
        self._holders: Mapping[str | None, int] = {}
        self._estimated = 0.0
        """When the time left was estimated last; seconds of a monotonic clock."""
        progress.start(sum(job.size for job in self.jobs), 0.0)

    @property
    def is_empty(self) -> bool:
        """Return whether every job has its outcome."""
        return all(job.phase == "ended" for job in self.jobs)

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes so far, in the order of the jobs."""
        return [job.outcome for job in self.jobs if job.outcome is not None]

    def open(self, workers: int) -> None:
        """Open the jobs of as many checkpoints as there are workers, and one more; the longest first."""
        active = {job.model for job in self.jobs if job.phase not in ("waiting", "ended")}
        for model, jobs in self.by_model.items():
            waiting = [job for job in jobs if job.phase == "waiting"]
            if waiting and (model in active or len(active) <= max(1, workers)):
                active.add(model)
                for job in waiting:
                    job.phase, job.steps = "opening", self._steps(job)
                    self._step(job)

    def prepared(self, job: TrackedJob, answer: PreparedRun) -> None:
        """Plan the batches of a job, once: the first worker that has prepared it determines the facts."""
        if job.phase == "unprepared":
            job.phase = "computing"
            self._step(job, answer.prepared)

    def store(self, job: TrackedJob, flight: Flight, rows: Rows, answer: ComputedBatch) -> None:
        """Write a computed batch to the journal; it counts when it is on the disk."""
        assert job.run is not None
        if sum(other.unwritten for other in self.jobs) >= _MOST_UNWRITTEN:
            self._flush()
        job.in_hands.remove(flight.batch.key)
        job.unwritten += 1
        stored = self._writer.submit(job.run.store, flight.batch, rows, answer.seconds, answer.place, answer.rows)
        self._tasks.append((job, stored, partial(self._stored, job, flight, answer.seconds)))

    def advance(self, holders: Mapping[str | None, int]) -> None:
        """Take what the threads have done, and ask them for more; `holders`: checkpoint → its workers."""
        self._holders = holders
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            job, future, take = task
            if not future.done():
                self._tasks.append(task)
                continue
            if job.phase == "ended":
                continue
            try:
                result = future.result()
            except RunInUseError as error:
                self.end(job, "in use", str(error), error)
            except Exception as error:  # of one job; the others go on
                self.end(job, "failed", why_failed(error), error)
            else:
                take(result)
        for job in self.jobs:
            if job.phase == "computing" and not job.is_planning:
                enough = _AHEAD * max(1, holders.get(job.model, 0))
                is_complete = job.is_computed and not job.unwritten
                if is_complete or (not job.is_planned and len(job.ready) < enough):
                    self._step(job, 2 * enough)

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
            self._flush()
            self._planner.submit(_abandon, job, error or EvalkitError(message))
        job.outcome = Outcome(job.job, state, message)
        self._estimate()
        job.recipe = job.shipped = job.run = job.steps = None
        self._done(job.outcome)

    def close(self, error: BaseException) -> None:
        """Write the batches that have come, and close the folders of all unfinished jobs."""
        self._writer.shutdown(wait=True)
        for _, future, _ in self._tasks:
            future.cancel()
        for job in self.jobs:
            if job.phase != "ended":
                job.stop()
                self._planner.submit(_abandon, job, error)
        self._planner.shutdown(wait=True)

    def _flush(self) -> None:
        self._writer.submit(int).result()

    def _steps(self, job: TrackedJob) -> Generator[list[Batch], Any, None]:
        """Complete a job, in the planning thread: open its folder, plan its batches, and write its results.

        It waits (`yield`) for what a worker has `Prepared`, then with each of its planned batches for the number of
        batches to plan next, and with none for all to be stored.
        """
        plan, say = job.job.plan, self.progress.say
        run = job.run = job.stack.enter_context(opened(plan, say))
        if run.is_missing:
            if (ship := self._ship) is not None and plan.checkpoint.kind != "hub":
                # Runs of one checkpoint follow each other
                job.shipped = remembered("shipped", job.model, lambda: ship(packed(plan.checkpoint)), most=1)
            model = portable(plan.request.model, plan.checkpoint)
            candidates = benchmark(job.kind).computation.candidates(plan)
            job.recipe = Recipe(job.kind, job.model, model, plan.manifest["specification"], candidates, run.budget())
            prepared = yield []
            planned = run.batches(run.start(prepared), prepared.tokenizer)
            job.total, job.done, job.stop = planned.total, planned.done, planned.stop
            batches, count = job.stack.enter_context(closing(planned.batches)), _AHEAD
            while following := list(islice(batches, count)):
                count = yield following
            yield []
        with job.stack:
            run.finish()

    def _step(self, job: TrackedJob, value: Any = None) -> None:
        assert job.steps is not None
        job.is_planning = True
        self._tasks.append((job, self._planner.submit(_next_step, job.steps, value), partial(self._stepped, job)))

    def _stepped(self, job: TrackedJob, batches: list[Batch] | None) -> None:
        job.is_planning = False
        if batches is None:
            self.end(job, "finished")
        elif job.phase == "opening":
            job.phase = "unprepared"
        else:
            job.ready.extend(map(Flight, batches))
            job.is_planned = not batches

    def _stored(self, job: TrackedJob, flight: Flight, seconds: float, _: None) -> None:
        job.unwritten -= 1
        # A batch that an earlier session planned differently may be finished in part
        job.done = min(job.done + flight.batch.work, job.total)
        job.measured_work += flight.batch.work
        job.measured_seconds += seconds
        if time.monotonic() - self._estimated >= _ESTIMATE_EVERY:
            self._estimate()
        self.progress.advance(0.0, flight.batch.documents)
        if job.run is not None:
            left, holders = job.seconds_left, max(1, self._holders.get(job.model, 0))
            job.run.report(job.done / job.total if job.total else 1.0, None if left is None else left / holders)

    def _estimate(self) -> None:
        """Report the finished work, all work, and the seconds that are left.

        The work is in seconds of one worker, or in the unit of sizes before a batch is measured. That of a job is
        estimated by its own batches, else by those of its benchmark, else by all.
        """
        self._estimated = time.monotonic()
        by_kind: dict[str, list[TrackedJob]] = {}
        for job in self.jobs:
            by_kind.setdefault(job.kind, []).append(job)
        kinds, of_all = {kind: _rate(jobs) for kind, jobs in by_kind.items()}, _rate(self.jobs)
        done = left = 0.0
        for job in self.jobs:
            rate = _rate([job]) or kinds[job.kind] or of_all or 1.0
            share = 0.0 if job.phase == "ended" else job.left
            left += rate * share
            done += rate * (job.size - share)
        workers = max(1, sum(count for model, count in self._holders.items() if model))
        self.progress.expect(done, done + left, left / workers if of_all else None)


def _rate(jobs: Sequence[TrackedJob]) -> float | None:
    """Return the seconds for a unit of size, of the jobs that are measured; None: none is."""
    measured = [job for job in jobs if job.measured_work]
    size = sum(job.size * job.measured_work / job.total for job in measured)
    return sum(job.measured_seconds for job in measured) / size if measured else None


def _next_step(steps: Generator[list[Batch], Any, None], value: Any) -> list[Batch] | None:
    """Take the next step of a job; None: that was the last one."""
    try:
        return steps.send(value)
    except StopIteration:
        return None


def _abandon(job: TrackedJob, error: BaseException) -> None:
    """Close a job's folder after an error; a new folder without a finished batch is removed."""
    with suppress(BaseException):
        job.stack.__exit__(type(error), error, error.__traceback__)
