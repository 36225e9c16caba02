"""The loop that keeps workers busy: which worker gets which batch, what came back, and what was lost.

In: jobs and options of a cluster. Out: their outcomes (`ClusterRunner`). The driver is the only writer of the run
folders. A batch is in the journal before it counts as delivered, so that whatever is lost is computed again: by another
worker, or by the next driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from evalkit.benchmarks.session import finished
from evalkit.cache import remembering
from evalkit.display import Progress
from evalkit.errors import EvalkitError, UsageError
from evalkit.escape import counted
from evalkit.runs.columns import from_bytes
from evalkit.studies.cluster.connection import connected
from evalkit.studies.cluster.jobs import Flight, JobQueue, TrackedJob
from evalkit.studies.cluster.resources import ClusterOptions
from evalkit.studies.cluster.scheduling import CheckpointLoad, choose_checkpoint
from evalkit.studies.cluster.worker import Answer, ComputedBatch, PreparedRun, WorkerFailure
from evalkit.studies.cluster.workers import IN_HANDS, MOST_LOSSES, WorkerHandle, WorkerPool
from evalkit.studies.running import Job, Outcome, once, why_failed

_TICK = 0.05
"""Seconds that the loop waits for an answer at most: something may be planned or written meanwhile."""
_TRACE_LINES = 6


@dataclass(frozen=True)
class ClusterRunner:
    """A `JobRunner` on the workers of a cluster."""

    options: ClusterOptions

    def __call__(
        self, jobs: Sequence[Job], progress: Progress, done: Callable[[Outcome], None] = lambda _: None
    ) -> list[Outcome]:
        """See `JobRunner`. Finished runs need no cluster."""
        outcomes: dict[int, Outcome] = {}
        for number, job in enumerate(jobs):
            try:
                if finished(job.plan, progress.say) is not None:
                    outcomes[number] = Outcome(job, "finished")
            except Exception as error:  # a damaged folder
                outcomes[number] = Outcome(job, "failed", why_failed(error))
        for outcome in outcomes.values():
            done(outcome)
        if left := [number for number in range(len(jobs)) if number not in outcomes]:
            outcomes |= zip(left, self._computed([jobs[number] for number in left], progress, done), strict=True)
        return [outcomes[number] for number in range(len(jobs))]

    def _computed(self, jobs: list[Job], progress: Progress, done: Callable[[Outcome], None]) -> list[Outcome]:
        options = self.options
        devices = {job.plan.request.model.device for job in jobs}
        if numbered := [device for device in devices if ":" in device]:
            raise UsageError(
                f"--device {numbered[0]}: workers are given their GPUs; name none of them, only auto, cpu or cuda"
            )
        with remembering(), connected(options.address) as ray:
            pool = WorkerPool(ray, options, "cpu" if devices == {"cpu"} else "auto", progress.say)
            room, has = pool.capacity(), f"has {pool.describe()}"
            if room < (1 if options.address else options.workers or 1):
                raise UsageError(
                    f"room for {room} workers, not for {options.workers or 1}: each needs {pool.needs}, and the "
                    f"cluster {has}; see --worker-cpus and --worker-gpus"
                )
            short = f", not {options.workers}: the cluster {has}" if room < (options.workers or 0) else ""
            progress.say(f"{counted(room, 'worker')} of {pool.needs}{' each' * (room != 1)}{short}")
            return Driver(pool, JobQueue(jobs, progress, done, ray.put if options.ship else None)).run()


class Driver:
    """The loop over workers and jobs."""

    def __init__(self, pool: WorkerPool, queue: JobQueue) -> None:
        self.pool, self.queue = pool, queue
        pool.lost = self._lose
        self._progress, self._say_once = queue.progress, once(queue.progress.say)
        self._loading: list[float] = []
        self._particular: set[int] = set()
        """Numbers of the workers that are refused for a job or lacked memory for a batch."""
        self._is_nothing_left = False
        """Whether a free worker found nothing worth loading; no other one would, but for the particular ones."""

    def run(self) -> list[Outcome]:
        """Complete the jobs; see `JobRunner`."""
        error: BaseException = EvalkitError("the run was ended")
        try:
            while not self.queue.is_empty:
                self.queue.open(len(self.pool.workers))
                self.pool.tend()
                self._check_able()
                self._give_work()
                self.pool.serve(_TICK)
                self.queue.advance(self.pool.holders)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.pool.close()
            self.queue.close(error)
        return self.queue.outcomes()

    def _check_able(self) -> None:
        """End jobs that no worker can prepare; split batches that no worker has memory for."""
        usable = [worker.number for worker in self.pool.usable]
        if self.pool.may_grow or not usable:
            return
        for job in self.queue.jobs:
            able = [number for number in usable if number not in job.refusals]
            if not able and not job.is_computed:
                self.queue.end(job, "failed", list(job.refusals.values())[-1])
            for flight in job.ready:
                if flight.short and not flight.split and flight.short.issuperset(able):
                    flight.split = True
                    self._say_once(f"no worker has memory for {flight} of {job.label}; it is split")

    def _give_work(self) -> None:
        given, self._is_nothing_left = True, False
        while given:
            free = [worker for worker in self.pool.usable if not worker.preparing and len(worker.flights) < IN_HANDS]
            # Every one of them, so that the work is spread
            given = sum(self._give(worker) for worker in free) > 0

    def _give(self, worker: WorkerHandle) -> bool:
        """Give a worker something to do; return whether there was something."""
        if any(flight.losses for _, flight in worker.flights) or (job := self._choose(worker)) is None:
            return False
        if job.number not in worker.prepared:
            # Not before its last batch is back: the checkpoint of that batch may be unloaded
            if worker.flights:
                return False
            if worker.model != job.model:
                worker.prepared.clear()
                worker.model = job.model
            worker.preparing, worker.since = job, self.pool.now
            self._call(worker, partial(self._prepared, worker, job), "prepare", job.name, job.recipe, job.shipped)
            return True
        for flight in job.ready:
            if flight.fits(worker.number) and not (flight.losses and worker.flights):
                job.ready.remove(flight)
                job.in_hands.add(flight.batch.key)
                worker.since = worker.since if worker.flights else self.pool.now
                worker.flights.append((job, flight))
                take = partial(self._computed, worker, job, flight)
                self._call(worker, take, "compute", job.name, flight.batch, flight.split)
                return True
        return False

    def _choose(self, worker: WorkerHandle) -> TrackedJob | None:
        """Return the job that a worker goes on with."""
        number, loaded = worker.number, self.queue.by_model.get(worker.model or "", [])
        # A worker keeps its checkpoint, so that the others are not looked at for every batch
        if not (members := [job for job in loaded if job.has_work_for(number)]):
            is_planned_for = any(job.has_more and number not in job.refusals for job in loaded)
            if is_planned_for or (self._is_nothing_left and number not in self._particular):
                return None
            works = {
                model: able
                for model, jobs in self.queue.by_model.items()
                if (able := [job for job in jobs if job.has_work_for(number)])
            }
            loads = {model: self._load(worker, model, jobs) for model, jobs in works.items()}
            chosen = choose_checkpoint(None, loads, fmean(self._loading) if self._loading else 0.0)
            if chosen is None:
                self._is_nothing_left |= number not in self._particular
                return None
            members = works[chosen]
        ready = [job for job in members if job.number in worker.prepared and job.phase == "computing"]
        return max(ready or members, key=lambda job: job.left)

    def _load(self, worker: WorkerHandle, model: str, jobs: list[TrackedJob]) -> CheckpointLoad:
        seconds = [job.seconds_left for job in jobs]
        known = [value for value in seconds if value is not None]
        others = sum(
            other is not worker and other.model == model and any(job.has_work_for(other.number) for job in jobs)
            for other in self.pool.workers
        )
        whole = sum(known) if len(known) == len(seconds) else None
        return CheckpointLoad(sum(job.left for job in jobs), others, whole)

    def _call(self, worker: WorkerHandle, take: Callable[..., None], method: str, *arguments: object) -> None:
        self.pool.call(worker, partial(self._take, worker, take), method, *arguments)

    def _take(self, worker: WorkerHandle, take: Callable[..., None], answer: Answer) -> None:
        """Report what an answer says, and pass on its content, unless the worker cannot be used any more."""
        content = answer.content
        for line in answer.said:
            self._say_once(line)
        if isinstance(content, WorkerFailure):
            for line in content.trace.rstrip().splitlines()[-_TRACE_LINES:]:
                self._progress.say(f"  {line}")
            if content.reason == "crashed":
                self._lose(worker, content.message)
                return
        take(content)

    def _lose(self, worker: WorkerHandle, why: str) -> None:
        if (job := worker.preparing) is not None:
            self._progress.say(f"{worker} was lost while it loaded {job.label} ({why})")
            # Of workers that loaded it at the same time, which a machine may have lost together, one counts
            if worker.since >= job.lost_at:
                job.losses, job.lost_at = job.losses + 1, self.pool.now
            if job.losses >= MOST_LOSSES:
                message = f"workers were lost {MOST_LOSSES} times while they loaded it, the last one: {why}"
                self.queue.end(job, "failed", message)
        else:
            batches = " and ".join(f"{flight} of {job.label}" for job, flight in worker.flights)
            self._progress.say(f"{worker} was lost{f' at {batches}' if batches else ''} ({why})")
        for job, flight in worker.flights:
            self._put_back(job, flight, f"{flight} ended {MOST_LOSSES} workers, the last one: {why}")
        self.pool.remove(worker, why)

    def _put_back(self, job: TrackedJob, flight: Flight, failure: str) -> None:
        """Have a lost batch computed again, by itself; if that is too often, its run fails."""
        flight.losses += 1
        if flight.losses >= MOST_LOSSES:
            self.queue.end(job, "failed", failure)
        elif job.phase != "ended":
            job.put_back(flight)

    def _prepared(self, worker: WorkerHandle, job: TrackedJob, content: PreparedRun | WorkerFailure) -> None:
        worker.preparing = None
        if isinstance(content, WorkerFailure):
            job.refusals[worker.number] = content.message
            self._particular.add(worker.number)
            # It may have unloaded what it had, and has nothing instead
            worker.model = None
            worker.prepared.clear()
            if job.phase != "ended":
                self._progress.say(f"{worker} is refused for {job.label}: {content.message}")
            return
        worker.prepared.add(job.number)
        job.losses = 0
        self._loading.append(content.seconds)
        kind = content.prepared.device.kind
        if job.device_kinds and kind not in job.device_kinds:
            self._progress.say(
                f"warning: {job.label} is also computed on {' '.join(kind)}, by {worker}, which rounds differently; "
                "manifest.json lists the batches of each"
            )
        job.device_kinds.add(kind)
        self.queue.prepared(job, content)

    def _computed(
        self, worker: WorkerHandle, job: TrackedJob, flight: Flight, content: ComputedBatch | WorkerFailure
    ) -> None:
        worker.flights = [hand for hand in worker.flights if hand[1] is not flight]
        worker.since = self.pool.now
        # Of a run that has ended, or a late one: another worker has the batch, or has returned it
        if flight.batch.key not in job.in_hands:
            return
        if isinstance(content, WorkerFailure) and content.reason == "refused":
            self.queue.end(job, "failed", content.message)
        elif isinstance(content, WorkerFailure):
            flight.short.add(worker.number)
            self._particular.add(worker.number)
            self._say_once(f"{worker}: {content.message}; another worker computes it, if one has more memory")
            job.put_back(flight)
        else:
            self._deliver(worker, job, flight, content)

    def _deliver(self, worker: WorkerHandle, job: TrackedJob, flight: Flight, content: ComputedBatch) -> None:
        if content.key != flight.batch.key:
            raise AssertionError(f"an answer for batch {content.key} came for {flight}")
        try:
            rows = from_bytes(content.rows, flight.batch.row)
        except ValueError as error:
            self._progress.say(f"{flight} of {job.label} was damaged on the way ({error}); it is computed again")
            self._put_back(job, flight, f"{flight}: {worker} returned damaged rows: {error}")
            return
        self.queue.store(job, flight, rows, content)
        busy = sum(bool(other.flights) or other is worker for other in self.pool.workers)
        self._progress.task(f"{counted(busy, 'worker')}: {job.label}, {flight.batch.task}")
