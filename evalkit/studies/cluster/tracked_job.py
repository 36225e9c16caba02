"""State of a job while workers compute it.

In: a job. Out: what the driver knows of it: whether its folder is open, which batches wait or are computed, how fast it
goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

from evalkit.benchmarks.base import Batch, BatchKey
from evalkit.benchmarks.session import OpenRun, loading_key
from evalkit.escape import counted
from evalkit.studies.cluster.shipping import ShippedCheckpoint
from evalkit.studies.cluster.worker import Recipe
from evalkit.studies.engines import Job, Outcome

_SAME_TIME = 10.0
"""Seconds within which workers of a machine are lost for one reason."""
_OVERDUE, _OVERDUE_SHARE = 30.0, 5.0
"""A batch is given to a second, idle worker after this many seconds, and this many times the usual seconds."""
_UNKNOWN = 120.0
"""Usual seconds of a batch before one of the job is delivered."""
MOST_DEATHS = 3
"""Number of workers that a batch, or the preparation of a run, may cost before the run fails."""


@dataclass
class Flight:
    """A batch in the hands of workers."""

    batch: Batch
    workers: set[int] = field(default_factory=set)
    """Numbers of the workers that have it."""
    sent: float = 0.0
    """When it was sent last; seconds of a monotonic clock."""
    deaths: int = 0
    """Workers that died of it."""
    short: set[int] = field(default_factory=set)
    """Workers without memory for it."""
    split: bool = False
    """Whether it may be split."""

    @property
    def is_suspect(self) -> bool:
        """Return whether a worker died of it, so that it is computed by itself."""
        return bool(self.deaths)


@dataclass
class TrackedJob:
    """A job with its state."""

    number: int
    job: Job
    size: float
    """Relative cost of the whole run, among runs of its benchmark."""
    begun: float = 0.0
    """Finished share, as an earlier session has recorded it; used until the run is planned."""
    cost: float | None = None
    """The benchmark's own estimate in seconds; None: not known, or not yet."""
    phase: Literal["waiting", "opening", "unprepared", "planning", "computing", "finishing", "ended"] = "waiting"
    outcome: Outcome | None = None
    stack: ExitStack = field(default_factory=ExitStack)
    """Closes the folder."""
    run: OpenRun | None = None
    recipe: Recipe | None = None
    batches: Iterator[Batch] | None = None
    """Batches that are not planned yet; None before planning and after the last one."""
    stop: Callable[[], None] = lambda: None
    """See `Planned.stop`."""
    filling: bool = False
    """Whether the planner is asked for batches."""
    ready: deque[Flight] = field(default_factory=deque)
    flights: dict[BatchKey, Flight] = field(default_factory=dict)
    writing: dict[BatchKey, int] = field(default_factory=dict)
    """Digests of rows that came and are not in the journal yet."""
    delivered: dict[BatchKey, int] = field(default_factory=dict)
    """Digests of rows in the journal, to compare those of a second delivery with."""
    refusals: dict[int, str] = field(default_factory=dict)
    """Worker → why it cannot prepare the job."""
    losses: int = 0
    """Times that workers were lost while they prepared it; those of one machine at one time count once."""
    lost_at: dict[str, float] = field(default_factory=dict)
    """Machine → when it last lost a worker that prepared the job; seconds of a monotonic clock."""
    shipped: ShippedCheckpoint | None = None
    """The checkpoint's files, until they are in the cluster."""
    kinds: set[tuple[str, str]] = field(default_factory=set)
    """Kinds of devices that have prepared it."""
    total: float = 0.0
    """Work of the whole run; the unit is the benchmark's."""
    done: float = 0.0
    measured_work: float = 0.0
    measured_seconds: float = 0.0
    """Work and seconds of the batches computed in this session."""
    model: str = field(init=False)
    """Name of its checkpoint as it is loaded."""
    kind: str = field(init=False)
    """Name of its benchmark."""
    weight: float = field(init=False)
    """Relative cost of the whole run, among all runs."""

    def __post_init__(self) -> None:
        plan, self.weight = self.job.plan, self.size
        self.kind = plan.manifest["kind"]
        self.model = " ".join(map(repr, loading_key(plan.request.model, plan.manifest["specification"])))

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
        """Return the unfinished share of its weight."""
        return self.weight * (1 - (self.done / self.total if self.total else self.begun))

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds of one worker for what is left; None before anything is measured."""
        if not self.measured_work:
            return None
        return self.measured_seconds / self.measured_work * (self.total - self.done)

    def may_take(self, worker: int, flight: Flight) -> bool:
        """Return whether a worker may compute a batch: it is not refused, and does not lack memory for it."""
        return worker not in self.refusals and (flight.split or worker not in flight.short)

    def has_work_for(self, worker: int) -> bool:
        """Return whether a worker can do something for it now."""
        if worker in self.refusals:
            return False
        if self.phase == "unprepared":
            return True
        return self.phase == "computing" and any(self.may_take(worker, flight) for flight in self.ready)

    @property
    def has_more(self) -> bool:
        """Return whether there will be work soon: its batches are being planned."""
        return self.phase == "planning" or (self.phase == "computing" and (self.batches is not None or self.filling))

    def is_overdue(self, flight: Flight, now: float) -> bool:
        """Return whether a batch takes much longer than the job's other ones; `now` is a monotonic clock's."""
        usual = self.measured_seconds / len(self.delivered) if self.delivered else _UNKNOWN
        return now - flight.sent > max(_OVERDUE, _OVERDUE_SHARE * usual)

    @property
    def is_computed(self) -> bool:
        """Return whether every batch is in the journal."""
        left = self.ready or self.flights or self.filling or self.writing
        return self.phase == "computing" and self.batches is None and not left

    def count_loss(self, machine: str, now: float) -> None:
        """Count a worker that was lost while it prepared the job."""
        if now - self.lost_at.get(machine, -_SAME_TIME) >= _SAME_TIME:
            self.losses += 1
        self.lost_at[machine] = now

    def put_back(self, flight: Flight) -> None:
        """Make a batch available again, unless another worker has it too or it is delivered."""
        if not flight.workers and self.flights.pop(flight.batch.key, None) is not None:
            self.ready.appendleft(flight)

    def digest_of(self, key: BatchKey) -> int | None:
        """Return the digest of a batch's rows; None before its first delivery."""
        return self.writing.get(key, self.delivered.get(key))

    def accept(self, flight: Flight, digest: int) -> None:
        """Take a batch from the workers, to be written; it counts as delivered once it is in the journal."""
        self.writing[flight.batch.key] = digest
        self.flights.pop(flight.batch.key, None)

    def deliver(self, flight: Flight, seconds: float) -> None:
        """Count a stored batch."""
        self.delivered[flight.batch.key] = self.writing.pop(flight.batch.key)
        # A batch that an earlier session planned differently may be finished in part
        self.done = min(self.done + flight.batch.work, self.total)
        self.measured_work += flight.batch.work
        self.measured_seconds += seconds


def label_of(batch: Batch) -> str:
    """Return the name of a batch in messages."""
    return f"batch {batch.number} of {batch.task} ({counted(batch.documents, 'document')})"
