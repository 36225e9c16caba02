"""Batches, and the interface of what plans and computes them.

    requests    what a run asks of the model; made without torch
    computer    the loaded model, and the facts about it that planning needs
    batches     made from the requests, these facts and a tokenizer, without weights
    rows        computed from a batch; stored in the journal

Candidates, batches, facts and rows can be pickled, so that other processes can compute a run. The rows of a batch
depend only on the run, the batch and the model, not on earlier batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from evalkit.display import Say

if TYPE_CHECKING:
    from evalkit.models.loading.load import LoadedModel
    from evalkit.runs.columns import Rows
    from evalkit.runs.journal import FinishedRows, Key
    from evalkit.runs.traits import BatchDevice

Row = tuple[Any, ...]
"""A journal row: a `NamedTuple` of numbers, strings, booleans, None, and lists of these."""
BatchKey = tuple[str, int]
"""The journal's task, and the batch's number."""


@dataclass(frozen=True)
class Batch:
    """The documents that go through the model together."""

    task: str
    number: int
    content: Any
    """Input of the computer."""
    row: type[Row]
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


class Computer(Protocol):
    """A loaded model, ready for the batches of a run."""

    facts: Any
    """Properties of the model that planning needs; a dataclass of plain data."""
    about: dict[str, Any]
    """Manifest entries about the loaded model."""

    def place(self, batch: Batch | None = None) -> BatchDevice:
        """Return the device that computes a batch; without a batch, the device of most batches."""

    def compute(self, batch: Batch) -> Rows:
        """Compute a batch: `Row`s or, for many rows, an Arrow table with the schema of `runs.columns.schema_of`."""


@dataclass(frozen=True)
class TaskTokens:
    """Estimates for all documents of a task."""

    task: str
    documents: int
    sampled: int
    """Documents that were tokenised; if these are all, the numbers are counts."""
    rows: float
    alone: float
    """Input tokens of all sequences, one by one."""
    distinct: float
    """Input tokens without those that are shared."""
    generated: float = 0.0
    """Most tokens that are generated."""
    seconds: float = 0.0
    """Time of what is no matrix product, on one CPU."""


class Computation(ABC):
    """How the rows of a run are computed: by the request layer (`computation.py`), or by a kind's own computer.

    It has no state: everything about a run is in its plan. Every method may raise an `EvalkitError`.
    """

    rows: ClassVar[tuple[type[Row], ...]]
    """Types of the journal's rows."""
    key: ClassVar[tuple[str, ...]]
    """Columns of the rows that identify their subject. All rows with one key are in one batch."""
    facts: Any
    """The dataclass of `Computer.facts`, which is restored from the manifest."""

    @abstractmethod
    def is_missing(self, plan: Any, finished: FinishedRows) -> bool:
        """Whether rows are missing."""

    def needs_logits_only(self, plan: Any) -> bool:
        """Whether a model suffices that only returns logits: its parts are not called, and no text is generated."""
        return False

    @abstractmethod
    def candidates(self, plan: Any) -> Any:
        """Return what `computer` needs of a plan: plain data, with a few documents at most."""

    @abstractmethod
    def computer(self, candidates: Any, loaded: LoadedModel, budget: Budget, say: Say) -> Computer:
        """Prepare the run's model for its batches."""

    @abstractmethod
    def batches(self, plan: Any, facts: Any, tokenizer: Any, finished: FinishedRows, say: Say) -> Planned:
        """Plan all batches, independently of the journal, and leave out those that it already has.

        Errors of documents may also be raised while the batches are iterated.
        """

    def shared_rows(self, plan: Any) -> list[tuple[int, set[Key]]]:
        """Return the keys of rows that runs of other samples may have too, by what is planned together; else none.

        With each of these parts is its step, as of `DocumentSample.steps`. A row's key has the digest of its texts.
        """
        return []

    def token_counts(self, plan: Any, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
        """Estimate the tokens of each task of a whole run from `sample` documents of each, without a model.

        Raises the `EvalkitError` that the run would end with.
        """
        return []
