"""The loop that keeps workers busy: which worker gets which batch, what came back, and what was lost.

In: jobs and a cluster. Out: their outcomes. The driver is the only writer of the run folders. A batch is in the journal
before it counts as delivered, so that whatever is lost is computed again: by another worker, or by the next driver.
"""

from __future__ import annotations

import time
import zlib
from functools import partial
from statistics import fmean
from typing import Any

from evalkit.benchmarks.registry import benchmark
from evalkit.display import Progress
from evalkit.errors import EvalkitError
from evalkit.escape import counted
from evalkit.runs.columns import from_bytes, rows_digest
from evalkit.studies.cluster.job_queue import JobQueue
from evalkit.studies.cluster.ray_cluster import IN_HANDS
from evalkit.studies.cluster.scheduling import CheckpointLoad, choose_checkpoint
from evalkit.studies.cluster.tracked_job import MOST_DEATHS, Flight, TrackedJob, label_of
from evalkit.studies.cluster.worker import ComputedBatch, PreparedRun, WorkerFailure
from evalkit.studies.cluster.worker_pool import WorkerAnswer, WorkerHandle, WorkerPool
from evalkit.studies.engines import Outcome

_TICK, _PLANNING_TICK = 0.5, 0.02
"""Seconds that the loop waits for an answer at most; the second while something is planned."""
_TRACE_LINES = 6


class Driver:
    """The loop. It gives the workers of a pool the jobs of a queue."""

    def __init__(self, pool: WorkerPool, queue: JobQueue, progress: Progress) -> None:
        self._pool = pool
        self._queue = queue
        self._progress = progress
        self._shipped: dict[str, Any] = {}
        """Checkpoint → reference to its files in the cluster."""
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
            while not self._queue.is_empty:
                self._queue.open(len(self._pool.workers))
                self._pool.keep()
                self._check_able()
                self._give_work()
                self._report_overdue()
                for answer in self._pool.answers(_PLANNING_TICK if self._queue.is_busy else _TICK):
                    self._take(answer)
                self._take_written()
                self._queue.advance(self._pool.holding)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._pool.close()
            self._queue.close(error)
        return self._queue.outcomes()

    def _check_able(self) -> None:
        """End jobs that no worker can prepare; split batches that no worker has memory for."""
        usable = [worker.number for worker in self._pool.usable]
        if self._pool.may_grow or not usable:
            return
        for job in self._queue.jobs:
            if job.phase not in ("unprepared", "planning", "computing"):
                continue
            able = [number for number in usable if number not in job.refusals]
            if not able:
                self._queue.end(job, "failed", list(job.refusals.values())[-1])
            for flight in job.ready:
                if flight.short and not flight.split and flight.short.issuperset(able):
                    flight.split = True
                    self._say_once(f"no worker has memory for {label_of(flight.batch)} of {job.label}; it is split")

    def _give_work(self) -> None:
        """Give every worker with a free hand its next batch, one each in turn."""
        given, self._is_nothing_left = True, False
        while given:
            free = [one for one in self._pool.workers if one.is_ready and len(one.flights) < IN_HANDS]
            # Every one of them, so that the work is spread
            given = sum(self._give(worker) for worker in free) > 0

    def _give(self, worker: WorkerHandle) -> bool:
        """Give a worker something to do; return whether there was something."""
        if any(flight.is_suspect for _, flight in worker.flights):
            return False
        job = self._choose(worker)
        if job is None:
            return not worker.flights and self._give_overdue(worker)
        if job.number not in worker.prepared:
            # Not before its last batch is back: the checkpoint of that batch may be unloaded
            if not worker.flights:
                self._prepare(worker, job)
            return not worker.flights
        flight = _next_flight(worker, job)
        if flight is not None:
            self._send(worker, job, flight)
        return flight is not None

    def _choose(self, worker: WorkerHandle) -> TrackedJob | None:
        """Return the job that a worker goes on with."""
        number = worker.number
        own = self._queue.by_model.get(worker.model or "", [])
        members = [job for job in own if job.has_work_for(number)]
        # A worker keeps its checkpoint, so that the others are not looked at for every batch
        if not members:
            if any(job.has_more and number not in job.refusals for job in own):
                return None  # more of its checkpoint is being planned
            if self._is_nothing_left and number not in self._particular:
                return None
            works = {
                model: found
                for model, jobs in self._queue.by_model.items()
                if (found := [job for job in jobs if job.has_work_for(number)])
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
            for other in self._pool.workers
        )
        whole = sum(known) if len(known) == len(seconds) else None
        return CheckpointLoad(sum(job.left for job in jobs), others, whole)

    def _give_overdue(self, worker: WorkerHandle) -> bool:
        """Give an idle worker a batch that another one does not return."""
        now = time.monotonic()
        for job in self._queue.jobs:
            if job.phase != "computing" or worker.number in job.refusals:
                continue
            for flight in job.flights.values():
                taken = flight.is_suspect or worker.number in flight.workers | flight.short
                if taken or not job.is_overdue(flight, now):
                    continue
                if job.number in worker.prepared:
                    self._progress.say(f"{label_of(flight.batch)} of {job.label} is overdue; {worker} computes it too")
                    self._send(worker, job, flight)
                else:
                    # Only one worker loads the checkpoint for it
                    flight.sent = now
                    self._prepare(worker, job)
                return True
        return False

    def _report_overdue(self) -> None:
        """Say which batches take long, where no other worker computes them too."""
        now = time.monotonic()
        for worker in self._pool.workers:
            for job, flight in worker.flights[:1]:
                if len(flight.workers) == 1 and job.is_overdue(flight, now):
                    self._say_once(f"{label_of(flight.batch)} of {job.label} is overdue; {worker} computes it")

    def _prepare(self, worker: WorkerHandle, job: TrackedJob) -> None:
        if worker.model != job.model:
            worker.prepared.clear()
            worker.model = job.model
        worker.preparing = job
        self._pool.call(worker, job, None, "prepare", job.name, job.recipe, self._shipped_checkpoint(job))

    def _shipped_checkpoint(self, job: TrackedJob) -> Any:
        """Return a reference to a checkpoint's files in the cluster; None if workers find the checkpoint themselves."""
        if job.shipped is not None:
            needed = {one.model for one in self._queue.jobs if one.phase not in ("waiting", "ended")}
            self._shipped = {model: one for model, one in self._shipped.items() if model in needed}
            if job.model not in self._shipped:
                self._shipped[job.model] = self._pool.put(job.shipped)
            job.shipped = None
        return self._shipped.get(job.model)

    def _send(self, worker: WorkerHandle, job: TrackedJob, flight: Flight) -> None:
        flight.workers.add(worker.number)
        flight.sent = time.monotonic()
        job.flights[flight.batch.key] = flight
        worker.flights.append((job, flight))
        self._pool.call(worker, job, flight, "compute", job.name, worker.sent, flight.batch, flight.split)
        worker.sent += 1

    def _take(self, answer: WorkerAnswer) -> None:
        worker, job, content = answer.worker, answer.job, answer.content
        if answer.lost:
            self._take_loss(worker, answer.lost)
            return
        for line in content.said:
            self._say_once(line)
        if isinstance(content, WorkerFailure):
            for line in content.trace.rstrip().splitlines()[-_TRACE_LINES:]:
                self._progress.say(f"  {line}")
            if content.reason == "crashed":
                for _ in self._pool.remove(worker, content.message):
                    self._take_loss(worker, content.message)
                return
        if answer.flight is None:
            self._take_prepared(worker, job, content)
        else:
            self._take_batch(worker, job, answer.flight, content)

    def _take_loss(self, worker: WorkerHandle, why: str) -> None:
        """Give the work of a worker that is gone to others."""
        if worker.preparing is not None:
            job = worker.preparing
            self._progress.say(f"{worker} was lost while it loaded {job.label} ({why})")
            job.count_loss(worker.host, time.monotonic())
            if job.losses >= MOST_DEATHS:
                message = f"workers were lost {MOST_DEATHS} times while they loaded it, the last one: {why}"
                self._queue.end(job, "failed", message)
        for place, (job, flight) in enumerate(worker.flights):
            flight.workers.discard(worker.number)
            if not place:  # a worker computes in order, so it was at the first one
                self._progress.say(f"{worker} was lost at {label_of(flight.batch)} of {job.label} ({why})")
                flight.deaths += 1
            if job.phase == "ended":
                continue
            if flight.deaths >= MOST_DEATHS:
                message = f"{label_of(flight.batch)} ended {MOST_DEATHS} workers, the last one: {why}"
                self._queue.end(job, "failed", message)
            else:
                job.put_back(flight)
        self._pool.show_log(worker)

    def _take_prepared(self, worker: WorkerHandle, job: TrackedJob, answer: PreparedRun | WorkerFailure) -> None:
        worker.preparing = None
        if isinstance(answer, WorkerFailure):
            job.refusals[worker.number] = answer.message
            self._particular.add(worker.number)
            # It may have unloaded what it had, and has nothing instead
            worker.model = None
            worker.prepared.clear()
            others = any(one.number not in job.refusals for one in self._pool.usable) or self._pool.may_grow
            if others and job.phase != "ended":
                self._progress.say(f"{worker} is refused for {job.label}: {answer.message}")
            return
        worker.prepared.add(job.number)
        job.losses = 0
        self._loading.append(answer.seconds)
        self._check_kind(worker, job, answer)
        self._queue.prepared(job, answer)

    def _check_kind(self, worker: WorkerHandle, job: TrackedJob, answer: PreparedRun) -> None:
        """Warn if workers of a job round differently."""
        kind = answer.prepared.place.kind
        if job.kinds and kind not in job.kinds:
            known = " and ".join(" ".join(one) for one in sorted(job.kinds))
            self._progress.say(
                f"warning: {job.label} is computed on {known}, and by {worker} on {' '.join(kind)}, which round "
                "differently; manifest.json lists the batches of each"
            )
        job.kinds.add(kind)

    def _take_batch(
        self, worker: WorkerHandle, job: TrackedJob, flight: Flight, answer: ComputedBatch | WorkerFailure
    ) -> None:
        worker.flights = [one for one in worker.flights if one[1] is not flight]
        flight.workers.discard(worker.number)
        if job.phase == "ended":
            return
        if isinstance(answer, ComputedBatch) and (answer.task, answer.number) != flight.batch.key:
            raise AssertionError(f"an answer for batch {answer.number} of {answer.task} came for another batch")
        if isinstance(answer, ComputedBatch) and zlib.crc32(answer.rows) == answer.checksum:
            self._deliver(job, flight, answer, worker)
        elif isinstance(answer, ComputedBatch):
            self._progress.say(f"{label_of(flight.batch)} of {job.label} was damaged on the way; it is computed again")
            job.put_back(flight)
        elif answer.reason == "refused":
            self._queue.end(job, "failed", answer.message)
        else:
            flight.short.add(worker.number)
            self._particular.add(worker.number)
            self._say_once(f"{worker}: {answer.message}; another worker computes it, if one has more memory")
            job.put_back(flight)

    def _deliver(self, job: TrackedJob, flight: Flight, answer: ComputedBatch, worker: WorkerHandle) -> None:
        """Store a batch, unless it was delivered before."""
        key, batch = flight.batch.key, flight.batch
        try:
            rows = from_bytes(answer.rows, benchmark(job.job.plan.manifest["kind"]).row)
        except ValueError as error:
            self._queue.end(job, "failed", f"{label_of(batch)}: {worker} returned rows of another form: {error}")
            return
        digest, before = rows_digest(rows), job.digest_of(key)
        if before is not None:
            if before != digest:
                self._progress.say(
                    f"warning: {label_of(batch)} of {job.label} was computed twice, and the rows of {worker} differ; "
                    "the first ones are kept"
                )
            return
        assert job.run is not None
        job.accept(flight, digest)
        store = partial(job.run.store, batch, rows, answer.seconds, answer.place, answer.rows)
        self._queue.writer.write(job, flight, answer, store)
        busy = sum(bool(one.flights) or one is worker for one in self._pool.workers)
        self._progress.task(f"{counted(busy, 'worker')}: {job.label}, {batch.task}")

    def _take_written(self) -> None:
        """Count the batches that have reached the disk; a job whose journal cannot be written fails."""
        for one in self._queue.writer.written():
            job = one.job
            if job.phase == "ended":
                continue
            if isinstance(one.error, EvalkitError):
                self._queue.end(job, "failed", str(one.error), one.error)
                continue
            if one.error is not None:
                raise one.error
            assert job.run is not None
            job.deliver(one.flight, one.answer.seconds)
            holding = self._pool.holding
            self._queue.estimate(holding, len(self._pool.usable), self._loading)
            self._progress.advance(0.0, one.flight.batch.documents)
            left = job.seconds_left
            hands = max(1, holding[job.model])
            job.run.report(job.done / job.total if job.total else 1.0, None if left is None else left / hands)

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._progress.say(line)


def _next_flight(worker: WorkerHandle, job: TrackedJob) -> Flight | None:
    """Return the next batch for a worker; a suspect only if it has no other batch."""
    for flight in job.ready:
        if job.may_take(worker.number, flight) and not (flight.is_suspect and worker.flights):
            job.ready.remove(flight)
            return flight
    return None
