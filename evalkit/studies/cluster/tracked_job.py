"""A job while workers compute it, and the time that all jobs need.

In: a job, its batches and what they took. Out: whether its folder is open, which batches wait, how fast it goes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from evalkit.benchmarks.base import Batch, BatchKey
from evalkit.benchmarks.session import OpenRun, loading_key
from evalkit.escape import counted
from evalkit.studies.cluster.worker import Recipe
from evalkit.studies.planning import Job
from evalkit.studies.running import Outcome

_SAME_TIME = 10.0
"""Seconds within which workers of a machine are lost for one reason."""
_DEADLINE, _DEADLINE_SHARE = 600.0, 20.0
"""A worker is replaced if a batch takes more than this many seconds, and this many times what it should take."""
_FIRST_DEADLINE = 14_400.0
"""The same in seconds before a batch of the job is measured: a CPU can need an hour for a large model's."""
MOST_DEATHS = 3
"""Number of workers that a batch, or the preparation of a run, may cost before the run fails."""


@dataclass
class Flight:
    """A batch on its way through the workers."""

    batch: Batch
    deaths: int = 0
    """Workers that died of it. After the first one it is computed by itself, so that the right batch is blamed."""
    short: set[int] = field(default_factory=set)
    """Workers without memory for it."""
    split: bool = False
    """Whether it may be split."""

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
    phase: Literal["waiting", "opening", "unprepared", "planning", "computing", "finishing", "ended"] = "waiting"
    outcome: Outcome | None = None
    stack: ExitStack = field(default_factory=ExitStack)
    """Closes the folder."""
    run: OpenRun | None = None
    recipe: Recipe | None = None
    shipped: Any = None
    """Reference to the checkpoint's files in the cluster; None: the workers have them."""
    batches: Iterator[Batch] | None = None
    """Batches that are not planned yet; None before planning and after the last one."""
    stop: Callable[[], None] = lambda: None
    """See `Planned.stop`."""
    filling: int = 0
    """Number of batches that the planner is asked for."""
    ready: deque[Flight] = field(default_factory=deque)
    in_hands: set[BatchKey] = field(default_factory=set)
    """Batches that workers have; an answer for another one is late."""
    unwritten: int = 0
    """Number of batches that came and are not in the journal yet."""
    refusals: dict[int, str] = field(default_factory=dict)
    """Worker → why it cannot prepare the job."""
    losses: int = 0
    """Times that workers were lost while they prepared it; those of one machine at one time count once."""
    lost_at: dict[str, float] = field(default_factory=dict)
    """Machine → when it last lost a worker that prepared the job; seconds of a monotonic clock."""
    kinds: set[tuple[str, str]] = field(default_factory=set)
    """Kinds of devices that have prepared it."""
    total: float = 0.0
    """Work of the whole run; the unit is the benchmark's."""
    done: float = 0.0
    measured_batches: int = 0
    measured_work: float = 0.0
    measured_seconds: float = 0.0
    """Number, work and seconds of the batches computed in this session."""
    model: str = field(init=False)
    """Name of its checkpoint as it is loaded."""
    kind: str = field(init=False)
    """Name of its benchmark."""
    size: float = field(init=False)
    """Relative cost of the whole run: the bytes of its weights times its documents."""

    def __post_init__(self) -> None:
        plan = self.job.plan
        self.kind = plan.manifest["kind"]
        self.model = " ".join(map(repr, loading_key(plan.request.model, plan.manifest["specification"])))
        self.size = max(_size_of(self.job), 1e-9)

    @property
    def label(self) -> str:
        """Return its name in messages."""
        return self.job.label

    @property
    def name(self) -> str:
        """Return its name in calls of workers."""
        return f"{self.number} {self.job.plan.manifest['id']}"

    @property
    def left(self) -> float:
        """Return the unfinished share of its size."""
        return self.size * (1 - (self.done / self.total if self.total else 0.0))

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds of one worker for what is left; None before anything is measured."""
        return self._seconds_of(self.total - self.done)

    def deadline(self, flight: Flight) -> float:
        """Return the seconds in which a worker must compute a batch."""
        usual = self._seconds_of(flight.batch.work)
        return _FIRST_DEADLINE if usual is None else max(_DEADLINE, _DEADLINE_SHARE * usual)

    def has_work_for(self, worker: int) -> bool:
        """Return whether a worker can do something for it now."""
        if worker in self.refusals:
            return False
        return self.phase == "unprepared" or (
            self.phase == "computing" and any(flight.fits(worker) for flight in self.ready)
        )

    @property
    def has_more(self) -> bool:
        """Return whether there will be work soon: its batches are being planned."""
        has_batches = self.batches is not None or self.filling > 0
        return self.phase == "planning" or (self.phase == "computing" and has_batches)

    @property
    def is_computed(self) -> bool:
        """Return whether every batch is in the journal."""
        left = self.ready or self.in_hands or self.unwritten or self.has_more
        return self.phase == "computing" and not left

    def count_loss(self, machine: str, now: float) -> None:
        """Count a worker that was lost while it prepared the job."""
        if now - self.lost_at.get(machine, -_SAME_TIME) >= _SAME_TIME:
            self.losses += 1
        self.lost_at[machine] = now

    def put_back(self, flight: Flight) -> None:
        """Make a batch that a worker had available again."""
        self.in_hands.remove(flight.batch.key)
        self.ready.appendleft(flight)

    def count(self, flight: Flight, seconds: float) -> None:
        """Count a batch that is in the journal."""
        self.unwritten -= 1
        # A batch that an earlier session planned differently may be finished in part
        self.done = min(self.done + flight.batch.work, self.total)
        self.measured_batches += 1
        self.measured_work += flight.batch.work
        self.measured_seconds += seconds

    def _seconds_of(self, work: float) -> float | None:
        return self.measured_seconds / self.measured_work * work if self.measured_work else None


def _size_of(job: Job) -> float:
    plan = job.plan
    try:
        size = sum(path.stat().st_size for path in plan.checkpoint.weights())
    except OSError:  # gone since it was planned, which opening the run reports
        size = 1
    specification = plan.manifest["specification"]
    limit = specification.get("sample", specification.get("limit"))
    counts = [documents["count"] for documents in plan.manifest["documents"].values()]
    return float(size * sum(count if limit is None else min(limit, count) for count in counts))


class Estimator:
    """Estimates the time left, from the sizes of jobs and the speed of all workers together."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None
        """Seconds of a monotonic clock, and of the batches delivered until then, at the first estimate."""

    def estimate(self, jobs: Sequence[TrackedJob], workers: int) -> tuple[float, float, float | None]:
        """Return the finished work, all work and the seconds that are left; None before a batch is measured.

        The work is in seconds of one worker, or in the unit of sizes before a batch is measured. That of a job is
        estimated by its own batches, else by those of its benchmark, else by all.
        """
        measured = [job for job in jobs if job.measured_work]
        rates = _ratios((job.kind, job.measured_seconds, job.size * job.measured_work / job.total) for job in measured)
        done = left = 0.0
        for job in jobs:
            rate = rates.get(job.kind, rates.get("", 1.0))
            if job.measured_work:
                rate = job.measured_seconds * job.total / (job.measured_work * job.size)
            share = 0.0 if job.phase == "ended" else job.left
            left += rate * share
            done += rate * (job.size - share)
        return done, done + left, left / self._speed(measured, workers) if measured else None

    def _speed(self, measured: Sequence[TrackedJob], workers: int) -> float:
        """Return the seconds of batches that the workers compute in a second, loading included."""
        now, spent = time.monotonic(), sum(job.measured_seconds for job in measured)
        start, before = self._first = self._first or (now, spent)
        # The first few batches say little: as if each worker had been busy with two; 0 workers: another one starts
        known = 2 * spent / sum(job.measured_batches for job in measured)
        return max(spent - before + max(workers, 1) * known, 1e-9) / max(now - start + known, 1e-9)


def _ratios(parts: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return the sum of the second over that of the third values by the first, and of all by ""."""
    sums: dict[str, tuple[float, float]] = {}
    for kind, above, below in parts:
        for name in (kind, ""):
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + above, before[1] + below
    return {name: above / below for name, (above, below) in sums.items() if below}
