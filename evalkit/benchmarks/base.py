"""The benchmark protocol: `session.py` runs it, and each subpackage implements it.

    plan        the validated request; made without torch
    setup       the part of the plan that a computer needs
    computer    the loaded model, and the facts about it that planning needs
    batches     made from the plan, these facts and a tokenizer, without weights
    rows        computed from a batch; stored in the journal
    results     tables and results.json, computed from all rows of the journal

Setups, batches, facts and rows can be pickled, so that other processes can compute a run. The rows of a batch depend
only on the plan, the batch and the model, not on earlier batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from evalkit.display import Say
from evalkit.errors import UsageError
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import StoredResults

if TYPE_CHECKING:
    from evalkit.benchmarks.request import Request, TaskTokens
    from evalkit.benchmarks.results import FinishedResults
    from evalkit.models.loading.load import LoadedModel
    from evalkit.models.loading.locate import Checkpoint
    from evalkit.runs.columns import Rows
    from evalkit.runs.journal import FinishedRows, Key
    from evalkit.runs.traits import BatchDevice
    from evalkit.runs.writing import RunWriter

Row = tuple[Any, ...]
"""A journal row: a `NamedTuple` of numbers, strings, booleans and None."""
BatchKey = tuple[str, int]
"""The journal's task, and the batch's number."""


@dataclass(frozen=True)
class Batch:
    """The documents that go through the model together."""

    task: str
    number: int
    content: Any
    """Input of the benchmark's computer."""
    work: float
    """Expected cost, in the unit of `Planned`."""
    documents: int
    journal: str = ""
    """Name of the task in the journal; empty: `task`."""

    @property
    def key(self) -> BatchKey:
        return self.journal or self.task, self.number

    def warm(self) -> None:
        """Compute what needs no model and is not pickled, if its content has a method for it."""
        if warm := getattr(self.content, "warm", None):
            warm()


Batches = Generator[Batch, None, None]


@dataclass(frozen=True)
class Planned:
    """The remaining batches of a run, in order."""

    batches: Batches
    """May be generated while earlier ones are computed."""
    total: float
    """Work of the whole run, or of its remainder if the whole is unknown without tokenising more."""
    done: float
    """The part of `total` that is in the journal."""
    message: str = ""
    """Summary of the remaining work in one line, shown to the user."""
    stop: Callable[[], None] = lambda: None
    """Makes another thread that is generating a batch stop; what it generates is not needed any more."""


class Budget(NamedTuple):
    """Maximum number of tokens at a time; None: as many as fit into memory."""

    scored: int | None = None  # in one forward pass
    kept: int | None = None  # whose keys and values are cached during generation


class Plan(Protocol):
    """A validated run that is not computed yet."""

    @property
    def request(self) -> Request: ...

    @property
    def checkpoint(self) -> Checkpoint: ...

    @property
    def manifest(self) -> dict[str, Any]:
        """The run's manifest, without the keys that need the loaded model."""

    @property
    def folder(self) -> Path:
        """The run folder, which may not exist yet."""


class Computer(Protocol):
    """A loaded model, ready for one benchmark's batches."""

    facts: Any
    """Properties of the model that planning needs; a dataclass of plain data."""
    about: dict[str, Any]
    """Manifest entries about the loaded model."""

    def place(self, batch: Batch | None = None) -> BatchDevice:
        """Return the device that computes a batch; without a batch, the device of most batches."""

    def compute(self, batch: Batch) -> Rows:
        """Compute a batch: `Row`s or, for many rows, an Arrow table with the schema of `runs.columns.schema_of`."""


class ListedSuite(NamedTuple):
    """What is listed of a suite."""

    description: str = ""
    """In one line."""
    averages: Callable[[], dict[str, tuple[str, ...]]] | None = None
    """Returns average → its tasks, for tables; the last average is "Average", over all tasks. None: no averages."""


class lazy:
    """A member of a `Benchmark`, "package.module:name", imported on first use: a function, or a type."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        return self if instance is None else resolve_name(self._name)


class Benchmark(ABC):
    """One kind of run. It has no state: everything about a run is in its plan, and `read` reads a finished one.

    What a kind must have comes first; any of it can be `lazy`. What it may have follows, with the default of those
    that lack it. Every method may raise an `EvalkitError`: for an invalid request, checkpoint or document, or a damaged
    run.
    """

    kind: ClassVar[str]
    """Name in manifests and in the registry."""
    row: ClassVar[type[Row]]
    """Type of the journal's rows."""
    key: ClassVar[tuple[str, ...]]
    """Columns of `row` that identify its subject, such as a document. All rows with one key are in one batch."""
    request: Any
    """The request type, whose fields are the settings; see `request.request_of`."""
    read: ClassVar[type[FinishedResults]]
    """Results of a finished run."""
    facts: Any
    """The dataclass of `Computer.facts`, which is restored from the manifest."""

    @abstractmethod
    def plan(self, request: Any, say: Say) -> Plan:
        """Validate a request and make the plan of its run."""

    @abstractmethod
    def is_missing(self, plan: Any, finished: FinishedRows) -> bool:
        """Whether rows are missing; stored rows are those with `(task, *values of the key) in finished`."""

    @abstractmethod
    def setup(self, plan: Any) -> Any:
        """Return what `computer` needs of a plan: plain data, with a few documents at most."""

    @abstractmethod
    def computer(self, setup: Any, loaded: LoadedModel, budget: Budget, say: Say) -> Computer:
        """Prepare the run's model for its batches, with the plan's `setup`."""

    @abstractmethod
    def batches(self, plan: Any, facts: Any, tokenizer: Any, finished: FinishedRows, say: Say) -> Planned:
        """Plan all batches, independently of the journal, and leave out those that it already has.

        Errors of documents may also be raised while the batches are iterated.
        """

    @abstractmethod
    def finish(self, plan: Any, finished: FinishedRows, writer: RunWriter) -> None:
        """Write tables from `FinishedRows.rows`, `table` or `batches`; call `RunWriter.save_results` last."""

    def shared_rows(self, plan: Any) -> list[tuple[int, set[Key]]]:
        """Return the keys of rows that runs of other samples may have too, by what is planned together; else none.

        With each of these parts is its step, as of `DocumentSample.steps`. A row's key has the digest of its texts.
        """
        return []

    results_form: ClassVar[type[Stored]] = StoredResults
    """Schema of its results.json, beyond the keys that every benchmark has."""
    files: ClassVar[tuple[str, ...]] = ()
    """Files of a finished run, beside those that every run has; a run that lacks one is computed or written again."""
    only_logits: ClassVar[bool] = False
    """Whether a run needs nothing of a model but its logits, which a callback during training can compute."""

    def suites(self) -> Mapping[str, ListedSuite]:
        """Return the suites by their names, as in `evalkit run --suite`."""
        return {self.kind: ListedSuite()}

    def options_outside_id(self, options: Mapping[str, Any]) -> frozenset[str]:
        """Return the names of a run's options, which include its suite, that never change its id; others may."""
        return frozenset({"token_budget", "device_map", "name"})

    def prompts(self, plan: Any, count: int, say: Say) -> Iterator[str]:
        """Yield the first prompts of each task as the model reads them, formatted for a terminal."""
        raise UsageError(f"--show-prompts: benchmark {self.kind} does not support it; leave it out")

    def token_counts(self, plan: Any, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
        """Estimate the tokens of each task of a whole run from `sample` documents of each, without a model.

        Raises the `EvalkitError` that the run would end with.
        """
        return []
