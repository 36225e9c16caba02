"""A job while workers compute it, and its batches.

In: a planned run. Out: whether its folder is open, which batches wait or are in the hands of workers, how fast it goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from evalkit.benchmarks.base import Batch, BatchKey
from evalkit.benchmarks.session import OpenRun, loading_key
from evalkit.escape import counted
from evalkit.studies.cluster.worker import Recipe
from evalkit.studies.running import Job, Outcome


@dataclass
class Flight:
    """A batch on its way through the workers."""

    batch: Batch
    losses: int = 0
    """Times that it was lost with its worker. After the first one it is computed by itself, so that the right batch is
    blamed."""
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
    is_filling: bool = False
    """Whether the planner makes batches."""
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
    """Machine → when it last lost a worker that prepared the job."""
    device_kinds: set[tuple[str, str]] = field(default_factory=set)
    """Kinds of devices that have prepared it."""
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
        """Name of its benchmark."""
        self.name = f"{self.number} {plan.manifest['id']}"
        """Its name in calls of workers."""
        self.model = " ".join(map(repr, loading_key(plan.request.model, specification)))
        """Name of its checkpoint as it is loaded."""
        weights = 1
        with suppress(OSError):  # gone since it was planned, which opening the run reports
            weights = sum(path.stat().st_size for path in plan.checkpoint.weights())
        limit = specification.get("sample", specification.get("limit"))
        counts = [documents["count"] for documents in plan.manifest["documents"].values()]
        documents = sum(count if limit is None else min(limit, count) for count in counts)
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
        return self.phase == "planning" or (self.phase == "computing" and (self.is_filling or self.batches is not None))

    def put_back(self, flight: Flight) -> None:
        """Make a batch that a worker had available again."""
        self.in_hands.remove(flight.batch.key)
        self.ready.appendleft(flight)
