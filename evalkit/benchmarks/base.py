"""What a benchmark is: the protocol that `session.py` runs and that a folder of this package implements.

    a plan        what was asked, found to be possible; made without torch
    a computer    the loaded model, and the facts about it that planning needs
    batches       made of a plan, these facts and a tokenizer: no weights are needed
    rows          of a batch, by the computer; what the journal keeps
    results       tables and results.json, of all rows

Batches, facts and rows can be pickled, and a batch's rows depend on plan, batch and model alone, not on what was
computed before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from evalkit.reporting.decimals import percent

if TYPE_CHECKING:
    from evalkit.benchmarks.outcomes import Comparable, Metric
    from evalkit.benchmarks.request import Request
    from evalkit.data import HubSplit
    from evalkit.models.load import LoadedModel
    from evalkit.models.locate import Checkpoint
    from evalkit.runs.folder import Run
    from evalkit.runs.place import Place
    from evalkit.runs.writing import RunWriter

Say = Callable[[str], None]
Row = tuple[Any, ...]
"""Of the journal: a `NamedTuple` of numbers, texts, truth values and None."""


@dataclass(frozen=True)
class Batch:
    """What goes through the model at once."""

    task: str
    number: int
    """With `journal`, what it is called in every session."""
    content: Any
    """What its benchmark's computer takes."""
    work: float
    """How long it takes, in the unit of `Planned`."""
    documents: int
    journal: str = ""
    """What the journal calls the task, where not by its name."""


Batches = Generator[Batch, None, None]


@dataclass(frozen=True)
class Planned:
    """The batches that are left of a run, in their order."""

    batches: Batches
    """May be made while they are computed."""
    total: float
    """Work of the run, or of what is left of it where more would have to be tokenised to know."""
    done: float
    """Of `total`, what the journal holds."""
    news: str = ""
    """What there is to do, in a line for the user."""


class Budget(NamedTuple):
    """Most tokens at a time; None: what fits."""

    scored: int | None = None
    """That go through the model."""
    kept: int | None = None
    """Whose keys and values are kept while text is generated."""


class Plan(Protocol):
    """A run, before it is computed."""

    @property
    def common(self) -> Request:
        """Model, device, folders: what every run is asked."""

    @property
    def checkpoint(self) -> Checkpoint:
        """What is measured."""

    @property
    def manifest(self) -> dict[str, Any]:
        """Of the run, before anything is known of the loaded model."""

    @property
    def folder(self) -> Path:
        """The run's, whether it exists yet or not."""


class Computer(Protocol):
    """A loaded model, ready for one benchmark's batches."""

    facts: Any
    """What planning needs to know of the model; a dataclass of plain data."""
    about: dict[str, Any]
    """What the manifest says of the loaded model."""

    def place(self, batch: Batch | None = None) -> Place:
        """Where a batch is computed; of none, where most are."""

    def compute(self, batch: Batch) -> Sequence[Row]:
        """The rows of a batch."""


@dataclass
class Held:
    """What the journal holds of a run.

    Args:
        key: (journal's task, row) → what the row is of.
    """

    key: Callable[[str, Any], Hashable]
    rows: dict[Hashable, list[Any]] = field(default_factory=dict)
    """Key → its rows. Where several batches have a key, those of the first."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Spent on each task of the journal."""

    def keep(self, task: str, seconds: float, rows: Sequence[Any]) -> None:
        """Take a finished batch in."""
        self.seconds[task] = self.seconds.get(task, 0.0) + seconds
        fresh: dict[Hashable, list[Any]] = {}
        for row in rows:
            if (key := self.key(task, row)) not in self.rows:
                fresh.setdefault(key, []).append(row)
        self.rows |= fresh

    def __contains__(self, key: Hashable) -> bool:
        return key in self.rows

    def __bool__(self) -> bool:
        return bool(self.rows)


class Benchmark(ABC):
    """One kind of run. It has no state: whatever it needs of a run is in the plan."""

    kind: ClassVar[str]
    """Its name in manifests and in the registry."""
    row: ClassVar[type[Row]]
    """Of the journal."""

    @abstractmethod
    def key(self, task: str, row: Any) -> Hashable:
        """What a row of the journal is of, such as a document."""

    @abstractmethod
    def is_missing(self, plan: Any, held: Held) -> bool:
        """Whether anything is still to be computed."""

    @abstractmethod
    def computer(self, plan: Any, loaded: LoadedModel, budget: Budget, say: Say) -> Computer:
        """Make a loaded model ready.

        Args:
            plan: of the run.
            loaded: its model.
            budget: most tokens at a time.
            say: called with what the user should know.

        Raises:
            EvalkitError: it cannot do what the plan asks.
        """

    @abstractmethod
    def batches(self, plan: Any, facts: Any, tokenizer: Any, held: Held, say: Say) -> Planned:
        """Plan what the journal does not hold; the same batches whatever it holds, less those that are done.

        Raises:
            EvalkitError: a document that cannot be computed; also while the batches are taken.
        """

    @abstractmethod
    def finish(self, plan: Any, held: Held, writer: RunWriter) -> None:
        """Write tables and results; `RunWriter.save_results` last."""

    def serves(self, plan: Any, run: Run) -> bool:
        """Whether a finished run has all that is asked for."""
        return run.complete

    @abstractmethod
    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        """A finished run's numbers; of a task that has several, the most important first.

        Args:
            run: of this benchmark.
            rule: by which answers are chosen; None: the run's own. Generated answers have none.

        Raises:
            UnknownNameError: the run was not scored for that rule.
        """

    @abstractmethod
    def comparable(self, run: Run) -> Comparable:
        """A finished run's documents and their scores.

        Raises:
            EvalkitError: it has none that could be paired, or a table is damaged.
        """

    def headline(self, run: Run) -> tuple[float | None, str]:
        """What a finished run is sorted by in lists, and what is printed of it: its last average."""
        if not run.stored["averages"]:
            return None, "finished"
        average = run.stored["averages"][-1]
        name = "" if average["name"] == "Average" else f"{average['name'].lower()} "
        error = "" if average["stderr"] is None else f" ± {percent(average['stderr'])}"
        rule = f" ({run.rule})" if run.rule else ""
        return average["accuracy"], f"{name}{percent(average['accuracy'])}{error}{rule}"

    def averages(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Suite → average → its tasks, for tables; the last average is "Average", over all of the suite's tasks."""
        return {}

    def fills(self, run: Run) -> tuple[str, dict[str, str]]:
        """The suite whose tables a run fills, and which of its tasks stand in another one's column."""
        return str(run.manifest["specification"]["suite"]), {}

    def dataset(self, run: Run, task: str) -> HubSplit | None:
        """Where the documents of a task are published; None where that is not known.

        Raises:
            UsageError: runs of this kind are exported in a form of their own; says which.
        """
        return None
