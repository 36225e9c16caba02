"""The loop that keeps workers busy: which worker gets which batch, what came back, and what was lost.

In: jobs and a cluster. Out: their outcomes. The driver is the only writer of the run folders. A batch is in the journal
before it counts as delivered, so that whatever is lost is computed again: by another worker, or by the next driver.
"""

from __future__ import annotations

import time
import zlib
from statistics import fmean
from typing import Any

from evalkit.benchmarks.registry import benchmark
from evalkit.engines.base import Outcome
from evalkit.engines.cluster.job_queue import JobQueue
from evalkit.engines.cluster.ray_cluster import IN_HANDS
from evalkit.engines.cluster.scheduling import CheckpointLoad, choose_checkpoint
from evalkit.engines.cluster.shipping import packed
from evalkit.engines.cluster.tracked_job import MOST_DEATHS, Flight, TrackedJob, key_of, label_of
from evalkit.engines.cluster.worker import ComputedBatch, PreparedRun, WorkerFailure
from evalkit.engines.cluster.worker_pool import WorkerAnswer, WorkerHandle, WorkerPool
from evalkit.errors import EvalkitError
from evalkit.progress import Progress
from evalkit.runs.columns import from_bytes, rows_digest

_OVERDUE, _OVERDUE_SHARE = 30.0, 5.0
"""A batch is given to a second, idle worker after this many seconds, and this many times the usual seconds."""
_TICK, _PLANNING_TICK = 0.5, 0.02
"""Seconds that the loop waits for an answer at most; the second while something is planned."""
_TRACE_LINES = 6


class Driver:
    """The loop.

    Args:
        pool: the workers.
        queue: the jobs.
        progress: receives messages and progress.
        ship: whether checkpoints are sent to the workers.
    """

    def __init__(self, pool: WorkerPool, queue: JobQueue, progress: Progress, ship: bool = False) -> None:
        self._pool = pool
        self._queue = queue
        self._progress = progress
        self._ship = ship
        self._shipped: dict[str, Any] = {}
        """Checkpoint → reference to its files in the cluster."""
        self._loading: list[float] = []
        """Seconds that checkpoints took to load."""
        self._said: set[str] = set()

    def run(self) -> list[Outcome]:
        """Complete the jobs; see `JobRunner`."""
        error: BaseException = EvalkitError("the run was ended")
        try:
            while not self._queue.is_empty:
                self._queue.open(len(self._pool.workers))
                self._pool.keep()
                self._give_work()
                for answer in self._pool.answers(_PLANNING_TICK if self._queue.is_planning else _TICK):
                    self._take(answer)
                self._queue.advance(self._pool.holding)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._pool.close()
            self._queue.close(error)
        return self._queue.outcomes()

    def _give_work(self) -> None:
        """Give every worker with a free hand its next batch, one each in turn."""
        given = True
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
        members: dict[str, list[TrackedJob]] = {}
        for job in self._queue.jobs:
            if job.has_work and worker.number not in job.refusals:
                members.setdefault(job.model, []).append(job)
        loads = {model: self._load(worker, model, jobs) for model, jobs in members.items()}
        chosen = choose_checkpoint(worker.model, loads, fmean(self._loading) if self._loading else 0.0)
        if chosen is None:
            return None
        ready = [job for job in members[chosen] if job.number in worker.prepared and job.phase == "computing"]
        return max(ready or members[chosen], key=lambda job: job.left)

    def _load(self, worker: WorkerHandle, model: str, jobs: list[TrackedJob]) -> CheckpointLoad:
        seconds = [job.seconds_left for job in jobs]
        known = [one for one in seconds if one is not None]
        others = self._pool.holding(model) - (worker.model == model)
        whole = sum(known) if len(known) == len(seconds) else None
        return CheckpointLoad(sum(job.left for job in jobs), others, whole)

    def _give_overdue(self, worker: WorkerHandle) -> bool:
        """Give an idle worker a batch that another one does not return."""
        now = time.monotonic()
        for job in self._queue.jobs:
            usual = job.measured_seconds / len(job.delivered) if job.delivered else 0.0
            for flight in job.flights.values():
                late = now - flight.sent > max(_OVERDUE, _OVERDUE_SHARE * usual)
                taken = flight.is_suspect or worker.number in flight.workers or worker.number in job.refusals
                if not late or taken:
                    continue
                if job.number in worker.prepared:
                    self._progress.say(f"{label_of(flight.batch)} of {job.label} is overdue; {worker} computes it too")
                    self._send(worker, job, flight)
                else:
                    self._prepare(worker, job)
                return True
        return False

    def _prepare(self, worker: WorkerHandle, job: TrackedJob) -> None:
        try:
            shipped = self._shipped_checkpoint(job) if self._ship else None
        except EvalkitError as error:
            self._queue.end(job, "failed", str(error), error)
            return
        if worker.model != job.model:
            worker.prepared.clear()
            worker.model = job.model
        worker.preparing = job
        self._pool.call(worker, job, "prepare", job.name, job.recipe, shipped)

    def _shipped_checkpoint(self, job: TrackedJob) -> Any:
        """Return a reference to a checkpoint's files in the cluster; None for a hub model, which workers download."""
        checkpoint = job.job.plan.checkpoint
        if checkpoint.kind == "hub":
            return None
        if job.model not in self._shipped:
            needed = {one.model for one in self._queue.jobs if one.phase not in ("waiting", "ended")}
            self._shipped = {model: one for model, one in self._shipped.items() if model in needed}
            self._shipped[job.model] = self._pool.put(packed(checkpoint))
        return self._shipped[job.model]

    def _send(self, worker: WorkerHandle, job: TrackedJob, flight: Flight) -> None:
        flight.workers.add(worker.number)
        flight.sent = time.monotonic()
        job.flights[key_of(flight.batch)] = flight
        worker.flights.append((job, flight))
        self._pool.call(worker, job, "compute", job.name, flight.batch, flight.split)

    def _take(self, answer: WorkerAnswer) -> None:
        worker, job, content = answer.worker, answer.job, answer.content
        if answer.lost:
            self._take_loss(worker, answer.lost)
            return
        for line in content.said:
            self._say_once(line)
        if isinstance(content, WorkerFailure) and content.reason == "crashed":
            for line in content.trace.rstrip().splitlines()[-_TRACE_LINES:]:
                self._progress.say(f"  {line}")
            for _ in self._pool.remove(worker, content.message):
                self._take_loss(worker, content.message)
        elif worker.preparing is job:
            self._take_prepared(worker, job, content)
        else:
            self._take_batch(worker, job, content)

    def _take_loss(self, worker: WorkerHandle, why: str) -> None:
        """Give the work of a worker that is gone to others."""
        if worker.preparing is not None:
            job = worker.preparing
            self._progress.say(f"{worker} was lost while it loaded {job.label} ({why})")
            job.deaths += 1
            if job.deaths >= MOST_DEATHS:
                self._queue.end(job, "failed", f"loading it ended {MOST_DEATHS} workers, the last one: {why}")
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
        if isinstance(answer, PreparedRun):
            worker.prepared.add(job.number)
            self._loading.append(answer.seconds)
            self._queue.prepared(job, answer)
            return
        job.refusals[worker.number] = answer.message
        able = [one for one in self._pool.workers if not one.parked and one.number not in job.refusals]
        if not able or len(job.refusals) >= MOST_DEATHS:
            self._queue.end(job, "failed", answer.message)
        elif job.phase != "ended":
            self._progress.say(f"{worker} is refused for {job.label}: {answer.message}")

    def _take_batch(self, worker: WorkerHandle, job: TrackedJob, answer: ComputedBatch | WorkerFailure) -> None:
        _, flight = worker.flights.pop(0)
        flight.workers.discard(worker.number)
        if job.phase == "ended":
            return
        if isinstance(answer, ComputedBatch) and zlib.crc32(answer.rows) == answer.checksum:
            self._deliver(job, flight, answer, worker)
        elif isinstance(answer, ComputedBatch):
            self._progress.say(f"{label_of(flight.batch)} of {job.label} was damaged on the way; it is computed again")
            job.put_back(flight)
        elif answer.reason == "refused":
            self._queue.end(job, "failed", answer.message)
        else:
            flight.short.add(worker.number)
            able = [one for one in self._pool.workers if not one.parked and one.number not in flight.short]
            flight.split = not able or len(flight.short) >= MOST_DEATHS
            then = "it is split" if flight.split else "another worker computes it"
            self._say_once(f"{worker}: {answer.message}; {then}")
            job.put_back(flight)

    def _deliver(self, job: TrackedJob, flight: Flight, answer: ComputedBatch, worker: WorkerHandle) -> None:
        """Store a batch, unless it was delivered before."""
        key, batch = key_of(flight.batch), flight.batch
        try:
            rows = from_bytes(answer.rows, benchmark(job.job.plan.manifest["kind"]).row)
        except ValueError as error:
            self._queue.end(job, "failed", f"{label_of(batch)}: {worker} returned rows of another form: {error}")
            return
        digest = rows_digest(rows)
        if key in job.delivered:
            if job.delivered[key] != digest:
                self._progress.say(
                    f"warning: {label_of(batch)} of {job.label} was computed twice, and the rows of {worker} differ; "
                    "the first ones are kept"
                )
            return
        assert job.run is not None
        try:
            job.run.store(batch, rows, answer.seconds, answer.place)
        except EvalkitError as error:
            self._queue.end(job, "failed", str(error), error)
            return
        job.deliver(flight, digest, answer.seconds)
        busy = sum(bool(one.flights) for one in self._pool.workers)
        self._progress.task(f"{busy + 1} worker{'s' * (busy > 0)}: {job.label}, {batch.task}")
        self._progress.advance(job.weight * batch.work / job.total if job.total else 0.0, batch.documents)
        left = job.seconds_left
        hands = max(1, self._pool.holding(job.model))
        job.run.report(job.done / job.total if job.total else 1.0, None if left is None else left / hands)

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._progress.say(line)


def _next_flight(worker: WorkerHandle, job: TrackedJob) -> Flight | None:
    """Return the next batch for a worker: none that it lacks memory for, a suspect only by itself."""
    for flight in job.ready:
        alone = flight.is_suspect and worker.flights
        if not alone and (flight.split or worker.number not in flight.short):
            job.ready.remove(flight)
            return flight
    return None
