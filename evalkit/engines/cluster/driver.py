"""The loop that keeps workers busy: which worker gets which batch, what came back, and who is gone.

In: jobs and a cluster. Out: their outcomes. The driver is the only writer of the run folders. A batch is in the journal
before it counts as delivered, so that whatever is lost is computed again: by another worker, or by the next driver.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from evalkit.benchmarks.registry import benchmark
from evalkit.engines.base import Job, Outcome
from evalkit.engines.cluster.planner import Planner
from evalkit.engines.cluster.ray_cluster import ANSWER_SECONDS, Call, RayCluster, WorkerLostError
from evalkit.engines.cluster.scheduling import CheckpointLoad, choose_checkpoint
from evalkit.engines.cluster.shipping import packed
from evalkit.engines.cluster.tracked_job import MOST_DEATHS, Flight, TrackedJob, key_of, label_of
from evalkit.engines.cluster.worker import (
    ComputedBatch,
    PreparedRun,
    WorkerDescription,
    WorkerFailure,
    versions,
)
from evalkit.errors import EvalkitError, RunInUseError
from evalkit.progress import Progress
from evalkit.runs.columns import from_bytes, rows_digest

IN_HANDS = 2
"""Batches that a worker has at a time: one is computed while the next one waits."""
_AHEAD = 4
"""Planned batches for each worker of a job."""
_OVERDUE, _OVERDUE_SHARE = 30.0, 5.0
"""A batch is given to a second, idle worker after this many seconds, and this many times the usual seconds."""
_GROWTH = 5.0
"""Seconds between two looks at the cluster's size."""
_PATIENCE = 600.0
"""Seconds without any worker after which the driver gives up."""
_TICK = 0.5
"""Seconds that the loop waits for an answer at most."""


@dataclass
class WorkerHandle:
    """A worker as the driver knows it."""

    number: int
    actor: Any
    description: WorkerDescription | None = None
    parked: bool = False
    """Whether it is refused; it keeps its place in the cluster, so that no other worker starts there."""
    model: str | None = None
    """Checkpoint that it has loaded or is loading."""
    prepared: set[int] = field(default_factory=set)
    """Numbers of the jobs that it can compute."""
    preparing: int | None = None
    flights: list[tuple[TrackedJob, Flight]] = field(default_factory=list)
    """Batches in its hands, in order."""

    @property
    def is_ready(self) -> bool:
        """Return whether it can be given work."""
        return self.description is not None and not self.parked and self.preparing is None

    def __str__(self) -> str:
        where = f" on {self.description.host} (process {self.description.process})" if self.description else ""
        return f"worker {self.number}{where}"


class Driver:
    """The loop.

    Args:
        cluster: the connected cluster.
        jobs: the runs.
        weights: relative cost of each.
        progress: receives messages and progress.
        done: called with each outcome.
        ship: whether checkpoints are sent to the workers.
    """

    def __init__(
        self,
        cluster: RayCluster,
        jobs: Sequence[Job],
        weights: Sequence[float],
        progress: Progress,
        done: Callable[[Outcome], None],
        ship: bool = False,
    ) -> None:
        self._cluster = cluster
        self._jobs = [TrackedJob(n, job, max(w, 1e-9)) for n, (job, w) in enumerate(zip(jobs, weights, strict=True))]
        self._progress = progress
        self._done = done
        self._ship = ship
        self._planner = Planner(progress.say)
        self._planning: dict[Future[Any], tuple[str, TrackedJob]] = {}
        self._workers: list[WorkerHandle] = []
        self._started = 0
        self._calls: dict[Call, tuple[str, WorkerHandle, TrackedJob | None]] = {}
        self._shipped: dict[str, Any] = {}
        self._loading: list[float] = []
        """Seconds that checkpoints took to load."""
        self._said: set[str] = set()
        self._grown = self._last_worker = 0.0
        self._lost_at_start = 0

    def run(self) -> list[Outcome]:
        """Complete the jobs; see `JobRunner`."""
        self._progress.start(sum(job.weight for job in self._jobs), 0.0)
        self._last_worker = time.monotonic()
        error: BaseException = EvalkitError("the run was ended")
        try:
            while any(job.phase != "ended" for job in self._jobs):
                self._open_jobs()
                self._keep_workers()
                self._give_work()
                self._take_answers()
                self._take_plans()
        except BaseException as caught:
            error = caught
            raise
        finally:
            for worker in self._workers:
                self._cluster.stop_worker(worker.actor)
            self._planner.end([job for job in self._jobs if job.phase != "ended"], error)
        return [job.outcome for job in self._jobs if job.outcome is not None]

    # Jobs

    def _open_jobs(self) -> None:
        """Open as many jobs as the workers need, the longest checkpoints first."""
        active = {job.model for job in self._jobs if job.phase not in ("waiting", "ended")}
        waiting: dict[str, list[TrackedJob]] = {}
        for job in self._jobs:
            if job.phase == "waiting":
                waiting.setdefault(job.model, []).append(job)
        room = max(1, len(self._workers)) + 1 - len(active - waiting.keys())
        ordered = sorted(waiting, key=lambda model: (model not in active, -sum(job.weight for job in waiting[model])))
        for model in ordered[: max(room, 0)]:
            for job in sorted(waiting[model], key=lambda job: -job.weight):
                job.phase = "opening"
                self._plan("open", job, self._planner.open)

    def _plan(self, what: str, job: TrackedJob, work: Callable[..., Any], *arguments: Any) -> None:
        self._planning[self._planner.submit(work, job, *arguments)] = what, job

    def _take_plans(self) -> None:
        for future in [future for future in self._planning if future.done()]:
            what, job = self._planning.pop(future)
            if job.phase == "ended":
                continue
            try:
                found = future.result()
            except RunInUseError as error:
                self._end(job, "in use", str(error), error)
                continue
            except EvalkitError as error:
                self._end(job, "failed", str(error), error)
                continue
            if what == "open":
                if found == "finished":
                    self._end(job, "finished")
                else:
                    job.phase = "unprepared"
            elif what == "plan":
                job.phase = "computing"
                self._progress.advance(job.weight * job.done / job.total if job.total else 0.0, 0)
            elif what == "fill":
                batches, asked = found
                job.filling = False
                job.ready.extend(Flight(batch) for batch in batches)
                if len(batches) < asked:
                    job.batches = None
            else:
                self._end(job, "finished")
        for job in self._jobs:
            if job.phase != "computing":
                continue
            wanted = _AHEAD * max(1, sum(worker.model == job.model for worker in self._workers))
            if job.batches is not None and not job.filling and len(job.ready) < wanted:
                job.filling = True
                self._plan("fill", job, self._fill, 2 * wanted)
            elif job.is_computed:
                job.phase = "finishing"
                self._plan("finish", job, self._planner.finish)

    def _fill(self, job: TrackedJob, count: int) -> tuple[list[Any], int]:
        return self._planner.fill(job, count), count

    def _end(self, job: TrackedJob, state: Any, message: str = "", error: BaseException | None = None) -> None:
        """Record a job's outcome; close its folder if it failed."""
        if job.phase == "ended":
            return
        job.phase = "ended"
        job.ready.clear()
        job.flights.clear()
        if error is not None or state == "failed":
            self._planner.submit(self._planner.abandon, job, error or EvalkitError(message))
        job.outcome = Outcome(job.job, state, message)
        self._progress.advance(job.left, 0)
        job.recipe = job.run = job.batches = None
        self._done(job.outcome)

    # Workers

    def _keep_workers(self) -> None:
        """Start workers while there is room and work for them; give up if none can be had."""
        now = time.monotonic()
        if any(worker.is_ready or worker.preparing is not None for worker in self._workers):
            self._last_worker = now
        elif now - self._last_worker > _PATIENCE or self._lost_at_start >= MOST_DEATHS:
            raise EvalkitError(
                f"no worker could be started: each needs {self._cluster.needs}, the cluster has "
                f"{self._cluster.describe()}, of which {self._cluster.describe_free()} are free"
            )
        elif now - self._last_worker > ANSWER_SECONDS and self._workers:
            self._say_once(
                f"waiting for a worker: each needs {self._cluster.needs}, and of the cluster's "
                f"{self._cluster.describe()}, {self._cluster.describe_free()} are free"
            )
        if now - self._grown < _GROWTH:
            return
        self._grown = now
        for _ in range(self._cluster.capacity() - len(self._workers)):
            self._started += 1
            worker = WorkerHandle(self._started, self._cluster.start_worker())
            self._workers.append(worker)
            self._call("describe", worker, None)

    def _call(self, method: str, worker: WorkerHandle, job: TrackedJob | None, *arguments: Any) -> None:
        self._calls[self._cluster.call(worker.actor, method, *arguments)] = method, worker, job

    def _take_answers(self) -> None:
        for call in self._cluster.answered(list(self._calls), 0.02 if self._planning else _TICK):
            found = self._calls.pop(call, None)
            if found is None:
                continue
            method, worker, job = found
            try:
                answer = self._cluster.answer(call)
            except WorkerLostError as error:
                self._lose(worker, str(error))
                continue
            for line in getattr(answer, "said", ()):
                self._say_once(line)
            if method == "describe":
                self._welcome(worker, answer)
            elif job is not None and method == "prepare":
                self._take_prepared(worker, job, answer)
            elif job is not None:
                self._take_batch(worker, job, answer)

    def _welcome(self, worker: WorkerHandle, description: WorkerDescription) -> None:
        worker.description = description
        own = versions()
        theirs = description.versions
        if differing := [name for name in own if theirs.get(name) != own[name]]:
            worker.parked = True
            what = ", ".join(f"{name} is {theirs.get(name)} there, {own[name]} here" for name in differing)
            self._progress.say(f"{worker} is refused: {what}")
            if all(one.parked for one in self._workers) and len(self._workers) >= self._cluster.capacity():
                raise EvalkitError(f"every worker is refused; {worker}: {what}; install the same versions everywhere")

    def _lose(self, worker: WorkerHandle, why: str) -> None:
        """Give the work of a worker that is gone to others."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        self._calls = {call: found for call, found in self._calls.items() if found[1] is not worker}
        self._cluster.stop_worker(worker.actor)
        self._grown = 0.0
        if worker.description is None:
            self._lost_at_start += 1
        doing = "at its start"
        if worker.flights:
            doing = f"at {label_of(worker.flights[0][1].batch)} of {worker.flights[0][0].job.label}"
        elif worker.preparing is not None:
            doing = f"while it loaded {self._jobs[worker.preparing].job.label}"
        self._progress.say(f"{worker} was lost {doing} ({why})")
        log = self._cluster.log_of(worker.actor, worker.description.log if worker.description else "")
        for line in log:
            self._progress.say(f"  its log: {line}")
        if worker.preparing is not None:
            job = self._jobs[worker.preparing]
            job.deaths += 1
            if job.deaths >= MOST_DEATHS:
                self._end(job, "failed", f"loading it ended {MOST_DEATHS} workers, the last one: {why}")
        for place, (job, flight) in enumerate(worker.flights):
            flight.workers.discard(worker.number)
            if job.phase == "ended":
                continue
            if not place:  # workers compute in order, so the first is the one that was computed
                flight.deaths += 1
                if flight.deaths >= MOST_DEATHS:
                    what = f"{label_of(flight.batch)} ended {MOST_DEATHS} workers, the last one: {why}"
                    self._end(job, "failed", what)
                    continue
            self._put_back(job, flight)

    def _put_back(self, job: TrackedJob, flight: Flight) -> None:
        """Make a batch available again, unless another worker still has it."""
        if not flight.workers and job.flights.pop(key_of(flight.batch), None) is not None:
            job.ready.appendleft(flight)

    # Work

    def _give_work(self) -> None:
        """Give every worker with a free hand its next batch."""
        given = True
        while given:
            given = False
            for worker in self._workers:
                if worker.is_ready and len(worker.flights) < IN_HANDS and self._give(worker):
                    given = True

    def _give(self, worker: WorkerHandle) -> bool:
        """Give a worker something to do; return whether there was something."""
        if any(flight.is_suspect for _, flight in worker.flights):
            return False
        job = self._choose(worker)
        if job is None:
            return not worker.flights and self._give_overdue(worker)
        if job.number not in worker.prepared:
            self._prepare(worker, job)
            return True
        flight = self._next_flight(worker, job)
        if flight is None:
            return False
        self._send(worker, job, flight)
        return True

    def _choose(self, worker: WorkerHandle) -> TrackedJob | None:
        """Return the job that a worker goes on with."""
        loads: dict[str, CheckpointLoad] = {}
        members: dict[str, list[TrackedJob]] = {}
        for job in self._jobs:
            if job.has_work and worker.number not in job.refusals:
                members.setdefault(job.model, []).append(job)
        for model, jobs in members.items():
            seconds = [job.seconds_left for job in jobs]
            known = [one for one in seconds if one is not None]
            loads[model] = CheckpointLoad(
                sum(job.left for job in jobs),
                sum(other.model == model for other in self._workers if other is not worker),
                sum(known) if len(known) == len(seconds) else None,
            )
        loading = sum(self._loading) / len(self._loading) if self._loading else 0.0
        chosen = choose_checkpoint(worker.model, loads, loading)
        if chosen is None:
            return None
        ready = [job for job in members[chosen] if job.number in worker.prepared and job.phase == "computing"]
        return max(ready or members[chosen], key=lambda job: job.left)

    def _next_flight(self, worker: WorkerHandle, job: TrackedJob) -> Flight | None:
        """Return the next batch for a worker: not one that it lacks memory for, a suspect only by itself."""
        for flight in job.ready:
            alone = flight.is_suspect and worker.flights
            if not alone and (flight.split or worker.number not in flight.short):
                job.ready.remove(flight)
                return flight
        return None

    def _give_overdue(self, worker: WorkerHandle) -> bool:
        """Give an idle worker a batch that another one does not return."""
        now = time.monotonic()
        for job in self._jobs:
            usual = job.measured_seconds / len(job.delivered) if job.delivered else 0.0
            for flight in job.flights.values():
                late = now - flight.sent > max(_OVERDUE, _OVERDUE_SHARE * usual)
                if late and not flight.is_suspect and flight.workers and worker.number not in flight.workers:
                    if job.number in worker.prepared:
                        self._progress.say(
                            f"{label_of(flight.batch)} of {job.job.label} is overdue; {worker} computes it too"
                        )
                        self._send(worker, job, flight)
                    elif worker.number not in job.refusals:
                        self._prepare(worker, job)
                    else:
                        continue
                    return True
        return False

    def _prepare(self, worker: WorkerHandle, job: TrackedJob) -> None:
        if worker.model != job.model:
            worker.prepared.clear()
            worker.model = job.model
        worker.preparing = job.number
        try:
            shipped = self._shipped_checkpoint(job) if self._ship else None
        except EvalkitError as error:
            worker.preparing = None
            self._end(job, "failed", str(error), error)
            return
        self._call("prepare", worker, job, job.name, job.recipe, shipped)

    def _shipped_checkpoint(self, job: TrackedJob) -> Any:
        """Return a reference to a checkpoint's files in the cluster; None for a hub model, which workers download."""
        checkpoint = job.job.plan.checkpoint
        if checkpoint.kind == "hub":
            return None
        if job.model not in self._shipped:
            # One at a time: the cluster frees what nothing refers to
            self._shipped = {job.model: self._cluster.put(packed(checkpoint))}
        return self._shipped[job.model]

    def _send(self, worker: WorkerHandle, job: TrackedJob, flight: Flight) -> None:
        flight.workers.add(worker.number)
        flight.sent = time.monotonic()
        job.flights[key_of(flight.batch)] = flight
        worker.flights.append((job, flight))
        self._call("compute", worker, job, job.name, flight.batch, flight.split)

    # Answers

    def _take_prepared(self, worker: WorkerHandle, job: TrackedJob, answer: PreparedRun | WorkerFailure) -> None:
        worker.preparing = None
        if isinstance(answer, WorkerFailure):
            if answer.reason == "crashed":
                self._say_trace(answer)
                worker.preparing = job.number
                self._lose(worker, answer.message)
                return
            job.refusals[worker.number] = answer.message
            able = [one for one in self._workers if not one.parked and one.number not in job.refusals]
            if job.phase == "ended":
                return
            if not able or len(job.refusals) >= MOST_DEATHS:
                self._end(job, "failed", answer.message)
            else:
                self._progress.say(f"{worker} is refused for {job.job.label}: {answer.message}")
            return
        worker.prepared.add(job.number)
        self._loading.append(answer.seconds)
        if job.phase == "unprepared":
            job.phase = "planning"
            self._plan("plan", job, self._planner.plan, answer)

    def _take_batch(self, worker: WorkerHandle, job: TrackedJob, answer: ComputedBatch | WorkerFailure) -> None:
        _, flight = worker.flights[0]
        if isinstance(answer, WorkerFailure) and answer.reason == "crashed":
            self._say_trace(answer)
            self._lose(worker, answer.message)
            return
        worker.flights.pop(0)
        flight.workers.discard(worker.number)
        if job.phase == "ended":
            return
        if isinstance(answer, ComputedBatch):
            if zlib.crc32(answer.rows) == answer.checksum:
                self._deliver(job, flight, answer, worker)
                return
            answer = WorkerFailure("memory", "its rows were damaged on the way")
        if answer.reason == "refused":
            self._end(job, "failed", answer.message)
            return
        flight.short.add(worker.number)
        able = [one for one in self._workers if one.is_ready and one.number not in flight.short]
        flight.split = not able or len(flight.short) >= MOST_DEATHS
        self._say_once(f"{worker}: {answer.message}; {'it is split' if flight.split else 'another worker computes it'}")
        self._put_back(job, flight)

    def _deliver(self, job: TrackedJob, flight: Flight, answer: ComputedBatch, worker: WorkerHandle) -> None:
        """Store a batch, unless it was delivered before."""
        key, batch = key_of(flight.batch), flight.batch
        try:
            rows = from_bytes(answer.rows, benchmark(job.job.plan.manifest["kind"]).row)
        except ValueError as error:
            self._end(job, "failed", f"{label_of(batch)}: {worker} returned rows of another form: {error}")
            return
        digest = rows_digest(rows)
        if key in job.delivered:
            if job.delivered[key] != digest:
                self._progress.say(
                    f"warning: {label_of(batch)} of {job.job.label} was computed twice, and {worker} has other rows; "
                    "the first ones are kept"
                )
            return
        try:
            assert job.run is not None
            job.run.store(batch, rows, answer.seconds, answer.place)
        except EvalkitError as error:
            self._end(job, "failed", str(error), error)
            return
        job.delivered[key] = digest
        job.flights.pop(key, None)
        job.done += batch.work
        job.measured_work += batch.work
        job.measured_seconds += answer.seconds
        job.task = batch.task
        busy = sum(bool(one.flights) for one in self._workers)
        self._progress.task(f"{busy} worker{'s' * (busy != 1)}: {job.job.label}, {batch.task}")
        self._progress.advance(job.weight * batch.work / job.total if job.total else 0.0, batch.documents)
        hands = max(1, sum(one.model == job.model for one in self._workers))
        left = job.seconds_left
        job.run.report(job.done / job.total if job.total else 1.0, None if left is None else left / hands)

    def _say_trace(self, failure: WorkerFailure) -> None:
        for line in failure.trace.rstrip().splitlines()[-6:]:
            self._progress.say(f"  {line}")

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._progress.say(line)
