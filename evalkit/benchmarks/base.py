"""What a benchmark is: the protocol that `session.py` runs and that a folder of this package implements.

    a plan        what was asked, found to be possible; made without torch
    a computer    the loaded model, and the facts about it that planning needs
    batches       made of a plan, these facts and a tokenizer: no weights are needed
    rows          of a batch, by the computer; what the journal keeps
    results       tables and results.json, of all rows, read back from the journal

Batches, facts and rows can be pickled, and a batch's rows depend on plan, batch and model alone, not on what was
computed before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from evalkit.benchmarks.outcomes import Label
from evalkit.errors import UsageError
from evalkit.inputs.validated import Stored
from evalkit.reporting.decimals import percent
from evalkit.runs.forms import StoredResults

if TYPE_CHECKING:
    from evalkit.benchmarks.outcomes import Comparable, Metric
    from evalkit.benchmarks.request import Request
    from evalkit.data import HubSplit
    from evalkit.models.load import LoadedModel
    from evalkit.models.locate import Checkpoint
    from evalkit.reporting.report import Report
    from evalkit.runs.batch_devices import BatchDevice
    from evalkit.runs.columns import Rows
    from evalkit.runs.finished_rows import FinishedRows
    from evalkit.runs.folder import Run
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
    def request(self) -> Request:
        """What was asked: the model, folders, and the benchmark's own settings."""

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

    def place(self, batch: Batch | None = None) -> BatchDevice:
        """Where a batch is computed; of none, where most are."""

    def compute(self, batch: Batch) -> Rows:
        """The rows of a batch: `Row`s or, where they are many, an Arrow table of their `runs.columns.schema_of`."""


class Benchmark(ABC):
    """One kind of run. It has no state: whatever it needs of a run is in the plan."""

    kind: ClassVar[str]
    """Its name in manifests and in the registry."""
    row: ClassVar[type[Row]]
    """Of the journal."""
    key: ClassVar[tuple[str, ...]]
    """Columns of `row` that say what it is of, such as a document. All rows of a key are in one batch."""
    results_form: ClassVar[type[Stored]] = StoredResults
    """What its results.json must hold to be read, beside what all have."""

    @abstractmethod
    def request(self) -> type[Request]:
        """What it can be asked: its settings are the fields, see `request.request_of`."""

    @abstractmethod
    def plan(self, request: Any, say: Say) -> Plan:
        """Find out what a run is, and refuse what cannot be.

        Raises:
            EvalkitError: whatever is wrong with the request, the checkpoint or the documents.
        """

    @abstractmethod
    def is_missing(self, plan: Any, finished: FinishedRows) -> bool:
        """Whether anything is still to be computed; `(task, *values of the key) in held` says what is there."""

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
    def batches(self, plan: Any, facts: Any, tokenizer: Any, finished: FinishedRows, say: Say) -> Planned:
        """Plan what the journal does not hold; the same batches whatever it holds, less those that are done.

        Raises:
            EvalkitError: a document that cannot be computed; also while the batches are taken.
        """

    @abstractmethod
    def finish(self, plan: Any, finished: FinishedRows, writer: RunWriter) -> None:
        """Write tables and results from `FinishedRows.rows`, `table` or `batches`; `RunWriter.save_results` last."""

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

    def report(self, run: Run, rule: str | None = None, detail: bool = False) -> Report:
        """A finished run as it is printed.

        Args:
            run: of this benchmark.
            rule: see `metrics`.
            detail: whether parts of tasks are shown too, where it has them.
        """
        from evalkit.benchmarks.results_report import metrics_report

        return metrics_report(run, self.metrics(run, rule))

    def prompts(self, plan: Any, count: int, say: Say) -> Iterator[str]:
        """The first prompts of each task as the model is fed them, for a terminal.

        Raises:
            UsageError: they cannot be shown.
        """
        raise UsageError(f"--show-prompts: prompts of {self.kind} are not shown; leave it out")

    def suites(self) -> Mapping[str, str]:
        """Names under which `evalkit run --suite` finds it → what is run, in a line."""
        return dict.fromkeys(self.averages() or (self.kind,), "")

    def averages(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Suite → average → its tasks, for tables; the last average is "Average", over all of the suite's tasks."""
        return {}

    def fills(self, run: Run) -> tuple[str, dict[str, str]]:
        """The suite whose tables a run fills, and which of its tasks stand in another one's column."""
        return run.suite, {}

    def label(self, run: Run, task: str) -> Label:
        """How a task, or an average, is printed."""
        return Label(task, task)

    def dataset(self, run: Run, task: str) -> HubSplit | None:
        """Where the documents of a task are published; None where that is not known.

        Raises:
            UsageError: runs of this kind are exported in a form of their own; says which.
        """
        return None
