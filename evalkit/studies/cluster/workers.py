"""The workers of a driver: Ray actors, started while the cluster has room, given up when they cannot be used.

In: Ray, connected. Out: `WorkerHandle`s, and the answers to their calls.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from evalkit.errors import EvalkitError, first_line
from evalkit.studies.cluster.jobs import Flight, TrackedJob
from evalkit.studies.cluster.resources import ClusterOptions, Machine, described, needs_of
from evalkit.studies.cluster.worker import BatchWorker, WorkerDescription, versions
from evalkit.studies.running import once

IN_HANDS = 2
"""Batches that a worker has at a time: one is computed while the next one is made ready."""
MOST_LOSSES = 3
"""Number of workers that a batch, or the preparation of a run, may cost before the run fails; and number of workers in
succession that may be lost before they have started."""
_LOOK, _GROWTH = 1.0, 5.0
"""Seconds between two looks at the machines of a cluster, and between two attempts to start workers."""
_STARTING, _PATIENCE = 60.0, 600.0
"""Seconds for which a worker that was asked for is expected (it may wait for cores of another job for ever), and
seconds without any worker after which the driver gives up."""
_DEADLINE, _DEADLINE_SHARE = 600.0, 20.0
"""A worker is replaced if a batch takes more than this many seconds, and this many times what it should take."""
_LOADING_DEADLINE, _FIRST_DEADLINE = 3600.0, 14_400.0
"""The same in seconds for loading, and before a batch of the run is measured: a CPU can need an hour for a large
model's."""
_HEAD_SILENT, _HEAD_LOST = 15.0, 50.0
"""Seconds without an answer of the cluster's head until that is said, and until the run ends: after 60, Ray ends the
process."""
_LOG_LINES = 8
_CAUSE = re.compile(r"error|exception|fault|fatal|abort|assert|killed|SIG[A-Z]{3}|out of memory", re.IGNORECASE)
"""What a line of a worker's log has that names a cause."""


@dataclass(eq=False)
class WorkerHandle:
    """A worker as the driver knows it."""

    number: int
    actor: Any
    description: WorkerDescription | None = None
    is_refused: bool = False
    """It keeps its place in the cluster, so that no other worker starts there."""
    model: str | None = None
    prepared: set[int] = field(default_factory=set)
    preparing: TrackedJob | None = None
    flights: list[tuple[TrackedJob, Flight]] = field(default_factory=list)
    since: float = 0.0
    """When it began with what it does, by the clock of the pool."""

    def __str__(self) -> str:
        where = f" on {self.description.host} (process {self.description.process})" if self.description else ""
        return f"worker {self.number}{where}"


class WorkerPool:
    """The workers; `device` as in `needs_of`."""

    def __init__(self, ray: Any, options: ClusterOptions, device: str, say: Callable[[str], None]) -> None:
        self.workers: list[WorkerHandle] = []
        self.lost: Callable[[WorkerHandle, str], None] = self.remove
        """Called with a worker that is lost or takes too long, and the reason; calls `remove`."""
        self.now = 0.0
        """Seconds since the start, without the time in which this process itself was stopped."""
        self._ray, self._say, self._say_once = ray, say, once(say)
        self._is_local, self._most = options.address is None, options.workers
        self._look()
        self.needs = needs = needs_of(self._machines, options, device)
        settings = {"num_cpus": needs.cpus, "num_gpus": needs.gpus, "max_restarts": 0, "max_task_retries": 0}
        # Ray would set one thread, which is slower and has other last bits
        threads = {name: str(needs.cpus) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self._actor = ray.remote(BatchWorker).options(
            **settings, max_concurrency=IN_HANDS, runtime_env={"env_vars": threads}
        )
        most_cpus = max((machine.get("CPU", 1) for machine in self._machines), default=1)
        self._memory_share = min(1.0, needs.gpus or needs.cpus / max(most_cpus, 1))
        self._calls: dict[Any, tuple[WorkerHandle, Callable[[Any], None]]] = {}
        """Future of an answer → the worker, and what takes the answer."""
        self._count = 0
        self._time = time.monotonic()
        self._grown = -_GROWTH
        self._asked = self._alive = self._head_alive = 0.0
        """When a worker was asked for, when there was a usable one, and when the head had answered."""
        self._lost_at_start = 0
        """Workers in succession that were lost before they had started."""
        self._why, self._is_waiting = "", False
        threading.Thread(target=self._keep_looking, name="evalkit-ray-look", daemon=True).start()

    @property
    def usable(self) -> list[WorkerHandle]:
        """Return the workers that have started and are not refused."""
        return [worker for worker in self.workers if worker.description and not worker.is_refused]

    @property
    def holders(self) -> Counter[str | None]:
        """Return checkpoint → number of workers that have it loaded or are loading it."""
        return Counter(worker.model for worker in self.workers)

    @property
    def may_grow(self) -> bool:
        """Return whether a worker that was asked for lately may still start."""
        starting = any(worker.description is None for worker in self.workers)
        return starting and self.now - self._asked < _STARTING

    def capacity(self) -> int:
        """Return the number of workers that the machines of the cluster have room for, up to the largest number."""
        count = sum(map(self.needs.room, self._machines))
        return count if self._most is None else min(count, self._most)

    def describe(self) -> str:
        """Return the resources of the cluster, for messages."""
        return described(self._ray.cluster_resources())

    def tend(self) -> None:
        """Give up workers that take too long, and start workers while there is room for them.

        Raises `EvalkitError` if the head of the cluster is lost, or no worker can be had.
        """
        before, self._time = self._time, time.monotonic()
        self.now += min(self._time - before, 1.0)
        self._check_head()
        self._check_workers()
        # A machine on which no worker starts is tried less and less often
        if self.now - self._grown < _GROWTH * 2 ** min(self._lost_at_start, 6):
            return
        self._grown = self.now
        for _ in range(self.capacity() - len(self.workers)):
            self._count += 1
            self._asked = self.now
            # It starts as soon as there is room for it
            worker = WorkerHandle(self._count, self._actor.remote(self.needs.cpus, self._memory_share))
            self.workers.append(worker)
            self.call(worker, partial(self._welcome, worker), "describe")

    def call(self, worker: WorkerHandle, take: Callable[[Any], None], method: str, *arguments: Any) -> None:
        """Call a method of a worker; `serve` gives the answer to `take`."""
        self._calls[getattr(worker.actor, method).remote(*arguments)] = worker, take

    def serve(self, seconds: float) -> None:
        """Take the answers to calls; wait for the first one, up to some seconds."""
        if not (calls := [*self._calls]):
            time.sleep(seconds)
            return
        ready, others = self._ray.wait(calls, num_returns=1, timeout=seconds)
        if others:
            ready = [*ready, *self._ray.wait(others, num_returns=len(others), timeout=0)[0]]
        for call in ready:
            if call in self._calls:  # else of a worker that was given up meanwhile
                worker, take = self._calls.pop(call)
                try:
                    answer = self._ray.get(call)
                except self._ray.exceptions.RayError as error:
                    self.lost(worker, first_line(error)[:200])
                else:
                    take(answer)

    def remove(self, worker: WorkerHandle, why: str) -> None:
        """Give up a worker, whose late answers are dropped, and say the end of its log, if that names a cause."""
        self.workers.remove(worker)
        self._calls = {call: about for call, about in self._calls.items() if about[0] is not worker}
        self._kill(worker)
        self._why = f"; the last one was lost: {why}"
        if worker.description is None:
            self._lost_at_start += 1
            return
        self._grown = -_GROWTH  # so that another one starts at once
        for line in _log_of(worker.description):
            self._say(f"  its log: {line}")

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            self._kill(worker)

    def _kill(self, worker: WorkerHandle) -> None:
        # Without a head there is no answer
        if self.now - self._head_alive < _HEAD_SILENT:
            with suppress(Exception):
                self._ray.kill(worker.actor, no_restart=True)

    def _look(self) -> None:
        self._machines: list[Machine] = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self._has_answered = True

    def _keep_looking(self) -> None:
        """Ask for the machines again and again, in a thread: without a head, there is no answer."""
        while self._ray.is_initialized():
            with suppress(Exception):  # a request that fails counts as no answer
                self._look()
            time.sleep(_LOOK)

    def _check_head(self) -> None:
        """Say that the head of the cluster does not answer; end the run if that lasts."""
        if self._has_answered:
            self._has_answered, self._head_alive = False, self.now
        silent, lost = self.now - self._head_alive, "the head of the Ray cluster has not answered for"
        if silent > _HEAD_LOST:
            start = "" if self._is_local else "start the cluster, and "
            raise EvalkitError(f"{lost} {silent:.0f} s; finished batches are saved: {start}run the same command again")
        if silent > _HEAD_SILENT:
            self._say_once(f"{lost} {_HEAD_SILENT:.0f} s")

    def _check_workers(self) -> None:
        """Give up workers that take too long; without any worker, say so, and end the run if none can be expected."""
        for worker in self.usable:
            deadlines = [_LOADING_DEADLINE] if worker.preparing else [_deadline(*flight) for flight in worker.flights]
            if deadlines and self.now - worker.since > max(deadlines):
                what = "the checkpoint was not loaded" if worker.preparing else "the batch was not computed"
                self.lost(worker, f"{what} within {max(deadlines):.0f} s")
        if self.usable:
            self._alive, self._is_waiting = self.now, False
            return
        if self._is_local and not self.capacity():
            raise EvalkitError(
                f"no worker is left and none can start, since Ray's raylet has ended{self._why}; finished batches are "
                "saved: run the same command again"
            )
        waited = self.now - self._alive
        if waited > _PATIENCE or self._lost_at_start >= MOST_LOSSES:
            raise EvalkitError(f"no worker could be started: {self._resources()}{self._why}")
        if waited > _STARTING and not self._is_waiting:
            self._is_waiting = True
            minutes = f"waiting {_PATIENCE / 60:.0f} minutes for one"
            self._say(f"no worker has started yet: {self._resources()}; {minutes}")

    def _resources(self) -> str:
        free = described(self._ray.available_resources())
        return f"each needs {self.needs}, the cluster has {self.describe()}, and {free} of them are free"

    def _welcome(self, worker: WorkerHandle, description: WorkerDescription) -> None:
        """Accept a worker, or refuse it if its versions differ."""
        worker.description = description
        self._lost_at_start = 0
        here, there = versions(), description.versions
        if not (differing := [name for name in here if there.get(name) != here[name]]):
            return
        worker.is_refused = True
        what = ", ".join(f"{name} is {there.get(name)} there, {here[name]} here" for name in differing)
        self._say(f"{worker} is refused: {what}")
        if all(other.is_refused for other in self.workers) and len(self.workers) >= self.capacity():
            raise EvalkitError(f"every worker is refused; {worker}: {what}; install the same versions everywhere")


def _deadline(job: TrackedJob, flight: Flight) -> float:
    usual = job.seconds_of(flight.batch.work)
    return _FIRST_DEADLINE if usual is None else max(_DEADLINE, _DEADLINE_SHARE * usual)


def _log_of(worker: WorkerDescription) -> list[str]:
    """Return the end of a worker's standard error from the first line that names a cause, if this machine has it."""
    text = ""
    with suppress(OSError):
        text = Path(worker.log).read_text(encoding="utf-8", errors="replace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()][-_LOG_LINES:]
    first = next((number for number, line in enumerate(lines) if _CAUSE.search(line)), len(lines))
    return lines[first:]
