"""The workers of a driver: started while the cluster has room, refused or replaced when they cannot be used.

In: a cluster. Out: `WorkerHandle`s, and the answers to their calls.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from evalkit.errors import EvalkitError
from evalkit.studies.cluster.ray_cluster import Call, RayCluster, WorkerLostError
from evalkit.studies.cluster.tracked_job import MOST_DEATHS, Flight, TrackedJob
from evalkit.studies.cluster.worker import WorkerDescription, versions

_GROWTH = 5.0
"""Seconds between two looks at the cluster's size."""
_PATIENCE = 600.0
"""Seconds without any worker after which the driver gives up."""
_STARTING = 60.0
"""Seconds for which a worker that was asked for is expected; it may wait for cores of another job for ever."""
_SIGN_OF_LIFE = 5.0
"""Seconds after which a worker with work is asked for a sign of life."""
_SILENT, _FROZEN = 30.0, 120.0
"""Seconds without a sign of life until that is said, and until the worker is replaced: loading a library can take all
of an interpreter's time."""
_HEAD_SILENT, _HEAD_LOST = 15.0, 50.0
"""Seconds without an answer of the cluster's head until that is said, and until the run ends: after 60, Ray ends the
process."""


@dataclass(eq=False)
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
    preparing: TrackedJob | None = None
    flights: list[tuple[TrackedJob, Flight]] = field(default_factory=list)
    """Batches in its hands, in the order in which it computes them."""
    sent: int = 0
    """Number of batches that it was sent."""
    sign: Call | None = None
    """Call for a sign of life that it has not answered."""
    silent: float = 0.0
    """Seconds since it had nothing to do or gave a sign of life."""
    busy: float = 0.0
    """Seconds that it has had its first batch."""

    @property
    def is_usable(self) -> bool:
        """Return whether it has started and is not refused."""
        return self.description is not None and not self.parked

    @property
    def host(self) -> str:
        """Return its machine; empty before it has started."""
        return self.description.host if self.description else ""

    def __str__(self) -> str:
        where = f" on {self.description.host} (process {self.description.process})" if self.description else ""
        return f"worker {self.number}{where}"


class WorkerCall(NamedTuple):
    """What a worker was asked."""

    worker: WorkerHandle
    job: TrackedJob | None
    """None: to describe itself."""
    flight: Flight | None
    """The batch to compute; None: the job is to be prepared."""


class WorkerPool:
    """The workers.

    Args:
        cluster: the connected cluster.
        say: called with messages for the user.
    """

    def __init__(self, cluster: RayCluster, say: Callable[[str], None]) -> None:
        self.workers: list[WorkerHandle] = []
        self._cluster = cluster
        self._say = say
        self._count = 0
        self._calls: dict[Call, WorkerCall] = {}
        self._head_silent = 0.0
        """Seconds without an answer of the cluster's head."""
        self._looked = 0.0
        self._watched = self._alive = self._asked = time.monotonic()
        self._lost_at_start = 0
        """Workers in succession that were lost before they had started."""
        self._why = ""
        """Why the last one was lost."""
        self._announced = self._head_announced = False

    @property
    def holding(self) -> Counter[str | None]:
        """Return checkpoint → number of workers that have it loaded or are loading it."""
        return Counter(worker.model for worker in self.workers)

    @property
    def usable(self) -> list[WorkerHandle]:
        """Return the workers that have started and are not refused."""
        return [worker for worker in self.workers if worker.is_usable]

    @property
    def may_grow(self) -> bool:
        """Return whether a worker that was asked for lately may still start."""
        starting = any(worker.description is None for worker in self.workers)
        return starting and time.monotonic() - self._asked < _STARTING

    def keep(self) -> None:
        """Start workers while there is room for them.

        Raises:
            EvalkitError: no worker can be had.
        """
        now = time.monotonic()
        # Not the time in which this process itself was stopped
        passed, self._watched = min(now - self._watched, 1.0), now
        self._check_head(passed)
        self._watch(passed)
        why = f"; the last one was lost: {self._why}" if self._why else ""
        if self.usable:
            self._alive, self._announced = now, False
        elif self._cluster.is_local and not self._cluster.capacity():
            raise EvalkitError(
                f"no worker is left and none can start, since Ray's raylet has ended{why}; finished batches are saved: "
                "run the same command again"
            )
        elif now - self._alive > _PATIENCE or self._lost_at_start >= MOST_DEATHS:
            raise EvalkitError(f"no worker could be started: {self._resources()}{why}")
        elif now - self._alive > _STARTING and not self._announced:
            self._announced = True
            self._say(f"no worker has started yet: {self._resources()}; waiting {_PATIENCE / 60:.0f} minutes for one")
        # A machine on which no worker starts is tried less and less often
        if now - self._looked < _GROWTH * 2 ** min(self._lost_at_start, 6):
            return
        self._looked = now
        for _ in range(self._cluster.capacity() - len(self.workers)):
            self._count += 1
            self._asked = now
            worker = WorkerHandle(self._count, self._cluster.start_worker())
            self.workers.append(worker)
            self.call(WorkerCall(worker, None, None), "describe")

    def _check_head(self, passed: float) -> None:
        """Say that the head of the cluster does not answer; end the run if that lasts."""
        silent = self._head_silent = min(self._cluster.silent_seconds(), self._head_silent + passed)
        if silent > _HEAD_LOST:
            start = "" if self._cluster.is_local else "start the cluster, and "
            raise EvalkitError(
                f"the head of the Ray cluster has not answered for {silent:.0f} s; finished batches are saved: "
                f"{start}run the same command again"
            )
        if silent > _HEAD_SILENT and not self._head_announced:
            self._say(f"the head of the Ray cluster has not answered for {silent:.0f} s")
        self._head_announced = silent > _HEAD_SILENT

    def _watch(self, passed: float) -> None:
        """Measure how long workers with work are silent and busy; ask them for signs of life."""
        for worker in self.usable:
            worker.busy = worker.busy + passed if worker.flights else 0.0
            if not (worker.preparing or worker.flights):
                worker.silent = 0.0
                continue
            before, worker.silent = worker.silent, worker.silent + passed
            if worker.sign is None and worker.silent > _SIGN_OF_LIFE:
                worker.sign = self._cluster.call(worker.actor, "sign_of_life")
            if before <= _SILENT < worker.silent:
                rest = _FROZEN - _SILENT
                self._say(f"{worker} has not answered for {_SILENT:.0f} s; it is replaced after {rest:.0f} s more")

    def overdue(self) -> Iterator[tuple[WorkerHandle, str]]:
        """Yield the workers that are to be replaced, with the reason: they are frozen, or a batch takes too long."""
        for worker in list(self.workers):
            if worker.silent > _FROZEN:
                yield worker, f"it has not answered for {worker.silent:.0f} s"
            elif worker.flights and worker.busy > (deadline := worker.flights[0][0].deadline(worker.flights[0][1])):
                yield worker, f"the batch was not computed within {deadline:.0f} s"

    def call(self, about: WorkerCall, method: str, *arguments: Any) -> None:
        """Call a method of a worker; the answer comes from `answers`."""
        self._calls[self._cluster.call(about.worker.actor, method, *arguments)] = about

    def answers(self, seconds: float) -> Iterator[tuple[WorkerCall, Any]]:
        """Yield the answers to calls, or `WorkerLostError`s; wait for the first one, up to some seconds."""
        signs = {worker.sign: worker for worker in self.workers if worker.sign is not None}
        for call in self._cluster.answered([*self._calls, *signs], seconds):
            if call in signs:  # a loss is the answer to its other calls too
                signs[call].sign, signs[call].silent = None, 0.0
                continue
            if call not in self._calls:
                continue  # of a worker that was lost meanwhile
            about = self._calls.pop(call)
            try:
                answer = self._cluster.answer(call)
            except WorkerLostError as error:
                answer = error
            if isinstance(answer, WorkerDescription):
                self._welcome(about.worker, answer)
            else:
                yield about, answer

    def remove(self, worker: WorkerHandle, why: str) -> None:
        """Give up a worker; its calls are forgotten, so that late answers are dropped."""
        self.workers.remove(worker)
        self._calls = {call: about for call, about in self._calls.items() if about.worker is not worker}
        self._cluster.stop_worker(worker.actor)
        self._why = why
        if worker.description is None:
            self._lost_at_start += 1
        else:
            self._looked = 0.0  # so that another one starts at once

    def log_of(self, worker: WorkerHandle) -> list[str]:
        """Return the end of a worker's log, if it names a cause."""
        about = worker.description
        return [] if about is None else self._cluster.log_of(about.actor, about.log)

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            self._cluster.stop_worker(worker.actor)

    def _welcome(self, worker: WorkerHandle, description: WorkerDescription) -> None:
        """Accept a worker, or refuse it if its versions differ."""
        worker.description = description
        self._lost_at_start = 0
        here, there = versions(), description.versions
        if not (differing := [name for name in here if there.get(name) != here[name]]):
            return
        worker.parked = True
        what = ", ".join(f"{name} is {there.get(name)} there, {here[name]} here" for name in differing)
        self._say(f"{worker} is refused: {what}")
        if all(other.parked for other in self.workers) and len(self.workers) >= self._cluster.capacity():
            raise EvalkitError(f"every worker is refused; {worker}: {what}; install the same versions everywhere")

    def _resources(self) -> str:
        return (
            f"each needs {self._cluster.needs}, the cluster has {self._cluster.describe()}, and "
            f"{self._cluster.describe_free()} of them are free"
        )
