"""The loop that keeps workers busy: which worker gets which batch, what came back, and what was lost.

In: jobs and options of a cluster. Out: their outcomes (`ClusterRunner`). The driver is the only writer of the run
folders. A batch is in the journal before it counts as delivered, so that whatever is lost is computed again: by another
worker, or by the next driver. A worker that is frozen, or exceeds the deadline of a batch, is replaced.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.request import remembering
from evalkit.benchmarks.session import finished
from evalkit.display import Progress
from evalkit.errors import EvalkitError, UsageError
from evalkit.escape import counted
from evalkit.runs.columns import from_bytes
from evalkit.studies.cluster.job_queue import JobQueue
from evalkit.studies.cluster.ray_cluster import IN_HANDS, ClusterOptions, RayCluster, WorkerLostError, connected
from evalkit.studies.cluster.scheduling import CheckpointLoad, choose_checkpoint
from evalkit.studies.cluster.tracked_job import MOST_DEATHS, Flight, TrackedJob
from evalkit.studies.cluster.worker import ComputedBatch, PreparedRun, WorkerFailure
from evalkit.studies.cluster.worker_pool import WorkerCall, WorkerHandle, WorkerPool
from evalkit.studies.planning import Job
from evalkit.studies.running import Outcome, why_failed

_TICK, _PLANNING_TICK = 0.5, 0.02
"""Seconds that the loop waits for an answer at most; the second while something is planned."""
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
        for place, job in enumerate(jobs):
            if (outcome := _finished(job, progress)) is not None:
                outcomes[place] = outcome
                done(outcome)
        left = [place for place in range(len(jobs)) if place not in outcomes]
        if left:
            outcomes |= zip(left, self._computed([jobs[place] for place in left], progress, done), strict=True)
        return [outcomes[place] for place in range(len(jobs))]

    def _computed(self, jobs: list[Job], progress: Progress, done: Callable[[Outcome], None]) -> list[Outcome]:
        options = self.options
        devices = {job.plan.request.model.device for job in jobs}
        if numbered := [device for device in devices if ":" in device]:
            raise UsageError(
                f"--device {numbered[0]}: workers are given their GPUs; name none of them, only auto, cpu or cuda"
            )
        with remembering(), connected(options, "cpu" if devices == {"cpu"} else "auto") as cluster:
            if options.address and options.address.startswith("ray://"):
                progress.say(
                    "connected by Ray Client: if this connection breaks, the run ends (finished batches are saved); "
                    "submit the command as a Ray job, or run it on the head node (docs/scale.md)"
                )
            room = cluster.capacity()
            short = f", which is all that there is room for: the cluster has {cluster.describe()}"
            lacks = options.workers is not None and room < options.workers
            progress.say(f"{counted(room, 'worker')} of {cluster.needs}{' each' * (room != 1)}{short * lacks}")
            return Driver(cluster, jobs, progress, done, options.ship).run()


def _finished(job: Job, progress: Progress) -> Outcome | None:
    """Return the outcome of a finished run, or of one that is damaged; None if it is to be computed."""
    try:
        return None if finished(job.plan, progress.say) is None else Outcome(job, "finished")
    except Exception as error:
        return Outcome(job, "failed", why_failed(error))


class Driver:
    """The loop.

    Args:
        cluster: the connected cluster.
        jobs: the runs.
        progress: receives messages and progress.
        done: called with each outcome.
        ship: whether checkpoints are sent to the workers.
    """

    def __init__(
        self,
        cluster: RayCluster,
        jobs: Sequence[Job],
        progress: Progress,
        done: Callable[[Outcome], None] = lambda _: None,
        ship: bool = False,
    ) -> None:
        self.pool = WorkerPool(cluster, progress.say)
        self.queue = JobQueue(jobs, progress, done, cluster.put if ship else None)
        self._progress = progress
        self._loading: list[float] = []
        """Seconds that checkpoints took to load."""
        self._said: set[str] = set()
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
                self.pool.keep()
                for worker, why in self.pool.overdue():
                    self._lose(worker, why)
                self._check_able()
                self._give_work()
                for call, answer in self.pool.answers(_PLANNING_TICK if self.queue.is_busy else _TICK):
                    self._take(call, answer)
                self._report_written()
                self.queue.advance(self.pool.holding)
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
            if job.phase not in ("unprepared", "planning", "computing"):
                continue
            able = [number for number in usable if number not in job.refusals]
            if not able:
                self.queue.end(job, "failed", list(job.refusals.values())[-1])
            for flight in job.ready:
                if flight.short and not flight.split and flight.short.issuperset(able):
                    flight.split = True
                    self._say_once(f"no worker has memory for {flight} of {job.label}; it is split")

    def _give_work(self) -> None:
        """Give every worker with a free hand its next batch, one each in turn."""
        given, self._is_nothing_left = True, False
        while given:
            free = [one for one in self.pool.usable if not one.preparing and len(one.flights) < IN_HANDS]
            # Every one of them, so that the work is spread
            given = sum(self._give(worker) for worker in free) > 0

    def _give(self, worker: WorkerHandle) -> bool:
        """Give a worker something to do; return whether there was something."""
        if any(flight.deaths for _, flight in worker.flights) or (job := self._choose(worker)) is None:
            return False
        if job.number not in worker.prepared:
            # Not before its last batch is back: the checkpoint of that batch may be unloaded
            if worker.flights:
                return False
            if worker.model != job.model:
                worker.prepared.clear()
                worker.model = job.model
            worker.preparing = job
            self.pool.call(WorkerCall(worker, job, None), "prepare", job.name, job.recipe, job.shipped)
            return True
        for flight in job.ready:
            if flight.fits(worker.number) and not (flight.deaths and worker.flights):
                job.ready.remove(flight)
                job.in_hands.add(flight.batch.key)
                worker.flights.append((job, flight))
                arguments = job.name, worker.sent, flight.batch, flight.split
                self.pool.call(WorkerCall(worker, job, flight), "compute", *arguments)
                worker.sent += 1
                return True
        return False

    def _choose(self, worker: WorkerHandle) -> TrackedJob | None:
        """Return the job that a worker goes on with."""
        number = worker.number
        loaded = self.queue.by_model.get(worker.model or "", [])
        members = [job for job in loaded if job.has_work_for(number)]
        # A worker keeps its checkpoint, so that the others are not looked at for every batch
        if not members:
            if any(job.has_more and number not in job.refusals for job in loaded):
                return None  # more of its checkpoint is being planned
            if self._is_nothing_left and number not in self._particular:
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
        """Return the work that is left for a checkpoint, and the other workers that can do some of it."""
        seconds = [job.seconds_left for job in jobs]
        known = [one for one in seconds if one is not None]
        others = sum(
            other is not worker and other.model == model and any(job.has_work_for(other.number) for job in jobs)
            for other in self.pool.workers
        )
        whole = sum(known) if len(known) == len(seconds) else None
        return CheckpointLoad(sum(job.left for job in jobs), others, whole)

    def _take(self, call: WorkerCall, answer: PreparedRun | ComputedBatch | WorkerFailure | WorkerLostError) -> None:
        worker, job, flight = call
        if isinstance(answer, WorkerLostError):
            self._lose(worker, str(answer))
            return
        for line in answer.said:
            self._say_once(line)
        if isinstance(answer, WorkerFailure):
            for line in answer.trace.rstrip().splitlines()[-_TRACE_LINES:]:
                self._progress.say(f"  {line}")
            if answer.reason == "crashed":
                self._lose(worker, answer.message)
                return
        assert job is not None
        if flight is None and not isinstance(answer, ComputedBatch):
            self._take_prepared(worker, job, answer)
        elif flight is not None and not isinstance(answer, PreparedRun):
            self._take_batch(worker, job, flight, answer)

    def _lose(self, worker: WorkerHandle, why: str) -> None:
        """Give up a worker, and give its work to others."""
        self.pool.remove(worker, why)
        if (job := worker.preparing) is not None:
            self._progress.say(f"{worker} was lost while it loaded {job.label} ({why})")
            job.count_loss(worker.host, time.monotonic())
            if job.losses >= MOST_DEATHS:
                message = f"workers were lost {MOST_DEATHS} times while they loaded it, the last one: {why}"
                self.queue.end(job, "failed", message)
        elif not worker.flights:
            self._progress.say(f"{worker} was lost ({why})")
        for place, (job, flight) in enumerate(worker.flights):
            if not place:  # a worker computes in order, so it was at the first one
                self._progress.say(f"{worker} was lost at {flight} of {job.label} ({why})")
                flight.deaths += 1
            if job.phase == "ended":
                continue
            if flight.deaths >= MOST_DEATHS:
                self.queue.end(job, "failed", f"{flight} ended {MOST_DEATHS} workers, the last one: {why}")
            else:
                job.put_back(flight)
        for line in self.pool.log_of(worker):
            self._progress.say(f"  its log: {line}")

    def _take_prepared(self, worker: WorkerHandle, job: TrackedJob, answer: PreparedRun | WorkerFailure) -> None:
        worker.preparing = None
        if isinstance(answer, WorkerFailure):
            job.refusals[worker.number] = answer.message
            self._particular.add(worker.number)
            # It may have unloaded what it had, and has nothing instead
            worker.model = None
            worker.prepared.clear()
            others = any(one.number not in job.refusals for one in self.pool.usable) or self.pool.may_grow
            if others and job.phase != "ended":
                self._progress.say(f"{worker} is refused for {job.label}: {answer.message}")
            return
        worker.prepared.add(job.number)
        job.losses = 0
        self._loading.append(answer.seconds)
        kind = answer.prepared.place.kind
        if job.kinds and kind not in job.kinds:
            known = " and ".join(" ".join(one) for one in sorted(job.kinds))
            self._progress.say(
                f"warning: {job.label} is computed on {known}, and by {worker} on {' '.join(kind)}, which round "
                "differently; manifest.json lists the batches of each"
            )
        job.kinds.add(kind)
        self.queue.prepared(job, answer)

    def _take_batch(
        self, worker: WorkerHandle, job: TrackedJob, flight: Flight, answer: ComputedBatch | WorkerFailure
    ) -> None:
        worker.flights = [one for one in worker.flights if one[1] is not flight]
        worker.busy = 0.0
        if job.phase == "ended":
            return
        if isinstance(answer, ComputedBatch) and zlib.crc32(answer.rows) == answer.checksum:
            self._deliver(job, flight, answer, worker)
        elif isinstance(answer, ComputedBatch):
            self._progress.say(f"{flight} of {job.label} was damaged on the way; it is computed again")
            job.put_back(flight)
        elif answer.reason == "refused":
            self.queue.end(job, "failed", answer.message)
        else:
            flight.short.add(worker.number)
            self._particular.add(worker.number)
            self._say_once(f"{worker}: {answer.message}; another worker computes it, if one has more memory")
            job.put_back(flight)

    def _deliver(self, job: TrackedJob, flight: Flight, answer: ComputedBatch, worker: WorkerHandle) -> None:
        """Have a batch stored, unless no worker is expected to return it any more."""
        batch, run = flight.batch, job.run
        if (answer.task, answer.number) != batch.key:
            raise AssertionError(f"an answer for batch {answer.number} of {answer.task} came for another batch")
        if batch.key not in job.in_hands or run is None:
            return
        try:
            rows = from_bytes(answer.rows, benchmark(job.kind).row)
        except ValueError as error:
            self.queue.end(job, "failed", f"{flight}: {worker} returned rows of another form: {error}")
            return
        store = partial(run.store, batch, rows, answer.seconds, answer.place, answer.rows)
        self.queue.write(job, flight, answer.seconds, store)
        busy = sum(bool(one.flights) or one is worker for one in self.pool.workers)
        self._progress.task(f"{counted(busy, 'worker')}: {job.label}, {batch.task}")

    def _report_written(self) -> None:
        """Report the batches that have reached the disk."""
        for job, flight in self.queue.written():
            holding = self.pool.holding
            self.queue.estimate(len(self.pool.usable))
            self._progress.advance(0.0, flight.batch.documents)
            left, hands = job.seconds_left, max(1, holding[job.model])
            if job.run is not None:
                job.run.report(job.done / job.total if job.total else 1.0, None if left is None else left / hands)

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._progress.say(line)
