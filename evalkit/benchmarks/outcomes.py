"""What readers ask of a finished run, whatever its benchmark: its metrics, and a score of each document.

Tables, lists and exports read `Metric`s; `evalkit compare` pairs `Comparable`s. Neither torch nor transformers is
imported, and pandas only where documents are read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from evalkit.errors import UsageError
from evalkit.scores.table import CLUSTER

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.runs.folder import Run
    from evalkit.stats.estimates import Floats


@dataclass(frozen=True)
class Metric:
    """One number of one task."""

    task: str
    name: str
    """What is measured: "accuracy", "f1"."""
    n: int
    """Documents."""
    value: float | None
    """None where there is nothing to measure."""
    stderr: float | None
    """Standard error of the mean over documents, where it is known."""
    higher_is_better: bool | None = True
    """None where neither is."""
    bounds: tuple[float, float] | None = (0.0, 1.0)
    """Least and largest possible value; None where there are none."""
    layer: int | None = None
    """Of the model, counted from 0; None where the number is of the whole model."""
    chance: float | None = None
    """What a guess reaches."""
    truncated: int | None = None
    """Documents that were cut to fit the window, where that is known."""
    official: bool | None = None
    """Whether the documents are the published ones; None where none are published."""


class Label(NamedTuple):
    """How a task is printed."""

    full: str
    short: str
    """In narrow tables."""


@dataclass(frozen=True)
class Measure:
    """How documents are scored under a rule."""

    words: str
    """In a line, for a reader; with the unit where that is not a share."""
    graded: bool
    """Whether scores lie anywhere within the bounds; else an answer is right (1) or wrong (0)."""
    name: str = "score"
    """What is measured, as `Metric` has it: rules whose measures have one name are several ways to measure it."""
    bounds: tuple[float, float] | None = (0.0, 1.0)
    """Least and largest possible score; None where there are none. Shares, from 0 to 1, are printed in percent."""
    higher_is_better: bool | None = True
    """None where neither is."""
    layers: tuple[int, ...] = ()
    """The model's layers that have a score each of every document; empty where a document has one score."""

    @property
    def is_share(self) -> bool:
        """Whether scores lie between 0 and 1."""
        return self.bounds == (0.0, 1.0)

    @property
    def span(self) -> float:
        """How far two scores can lie apart."""
        return self.bounds[1] - self.bounds[0] if self.bounds else inf


class Comparable(ABC):
    """A run's documents and their scores.

    Args:
        run: finished.
    """

    checked: Sequence[str]
    """Columns of `documents` that are equal where documents are."""
    groups: Mapping[str, Sequence[str]]
    """Average → its tasks."""
    group_sizes: Mapping[str, int]
    """Average → how many tasks it has when none is left out."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    @abstractmethod
    def documents(self) -> pd.DataFrame:
        """One row a document: task, subtask, doc_id, cluster (`CLUSTER`) and what is `checked`."""

    @property
    @abstractmethod
    def rules(self) -> Sequence[str]:
        """The rules that the run can answer."""

    @abstractmethod
    def by_rule(self, rule: str) -> Floats:
        """[documents] scores, or [documents, layers]. Raises `UsageError` where the run cannot answer the rule."""

    @abstractmethod
    def measure(self, rule: str) -> Measure:
        """How documents are scored under a rule."""

    def must_agree(self, task: str) -> dict[str, Any]:
        """What must be equal for documents of a task to be the same, by what messages call it."""
        return {"content hash of the documents": self.run.manifest["specification"]["documents"].get(task)}


class GradedAnswers(Comparable):
    """Answers that their tasks score themselves.

    Args:
        run: finished.
        table: a row for each answer: task, id, score from 0 to 1, `source` (equal for documents of one source), and
            what is checked.
        checked: columns that are equal where documents are.
        groups: average → its tasks.
        words: how answers are scored, in a line.
    """

    def __init__(
        self, run: Run, table: pd.DataFrame, checked: Sequence[str], groups: Mapping[str, Sequence[str]], words: str
    ) -> None:
        super().__init__(run)
        self.checked = checked
        self.groups = groups
        self.group_sizes = {group: len(members) for group, members in groups.items()}
        self._words = words
        found = table[["task", "score", *checked]].assign(subtask=table["task"], doc_id=table["id"])
        found[CLUSTER] = found.groupby([table["task"], table["source"]], sort=False)["doc_id"].transform("first")
        self._documents = found

    @property
    def documents(self) -> pd.DataFrame:
        """See `Comparable`."""
        return self._documents

    @property
    def rules(self) -> Sequence[str]:
        """There is one: the tasks' own metrics, under the benchmark's name."""
        return (self.run.kind,)

    def by_rule(self, rule: str) -> Floats:
        """See `Comparable`."""
        if rule != self.run.kind:
            raise UsageError(
                f"run {self.run.folder.name} is of {self.run.kind}, whose tasks are scored by metrics of their own: "
                f"leave out --rule {rule}"
            )
        scores: Floats = self._documents["score"].to_numpy(float)
        return scores

    def measure(self, rule: str) -> Measure:
        """See `Comparable`."""
        return Measure(self._words, True)
