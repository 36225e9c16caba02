"""What readers ask of a finished run, whatever its benchmark: its metrics, and a score of each document.

Tables, lists and exports read `Metric`s; `evalkit compare` pairs `Comparable`s. Neither torch nor transformers is
imported, and pandas only where documents are read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from evalkit.errors import RunError, UnknownNameError, UsageError
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

    @property
    def whole(self) -> float | None:
        """What is 100 % of it: 1 of shares, 100 of percentages; None where the number is in a unit of its own."""
        return self.bounds[1] if self.bounds in ((0.0, 1.0), (0.0, 100.0)) else None


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
    """A run's documents and their scores. It is made of the manifest; tables are read when they are asked for.

    Args:
        run: finished.
    """

    checked: Sequence[str]
    """Columns of `documents` that are equal where documents are."""
    groups: Mapping[str, Sequence[str]]
    """Average → its tasks."""
    group_sizes: Mapping[str, int]
    """Average → how many tasks it has when none is left out."""
    lacking: ClassVar[str] = "no scores of its documents"
    """Why a task that was measured has no documents here."""

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

    def must_agree(self, task: str) -> dict[str, str]:
        """What must be equal for documents of a task to be the same: what it is → its value, empty where not known."""
        return {"documents": str(self.run.manifest["specification"]["documents"].get(task, ""))}


class GradedAnswers(Comparable):
    """Answers that their tasks score themselves, and whatever else is measured of them.

    Args:
        run: finished.
        load: reads the table, a row for each answer: task, id, `source` (equal for documents of one source), what is
            checked, and its scores: in column `score` by the benchmark's own measure, in columns of their rules' names
            by others ("RULE LAYER" where each layer has one).
        checked: columns that are equal where documents are.
        groups: average → its tasks.
        measures: by rule, the benchmark's own under its name first.
    """

    def __init__(
        self,
        run: Run,
        load: Callable[[], pd.DataFrame],
        checked: Sequence[str],
        groups: Mapping[str, Sequence[str]],
        measures: Mapping[str, Measure],
    ) -> None:
        super().__init__(run)
        self.checked = checked
        self.groups = groups
        self.group_sizes = {group: len(members) for group, members in groups.items()}
        self._load, self._measures = load, measures

    @cached_property
    def _table(self) -> pd.DataFrame:
        return self._load()

    @cached_property
    def documents(self) -> pd.DataFrame:
        """See `Comparable`."""
        table = self._table
        found = table[["task", *self.checked]].assign(subtask=table["task"], doc_id=table["id"])
        found[CLUSTER] = found.groupby([table["task"], table["source"]], sort=False)["doc_id"].transform("first")
        return found

    @property
    def rules(self) -> Sequence[str]:
        """The tasks' own metrics, under the benchmark's name, and other measures."""
        return tuple(self._measures)

    def by_rule(self, rule: str) -> Floats:
        """See `Comparable`."""
        name, layers = "score" if rule == self.run.kind else rule, self.measure(rule).layers
        columns = [f"{name} {layer}" for layer in layers] or [name]
        if absent := [column for column in columns if column not in self._table]:
            raise RunError(
                f"run {self.run.folder} has no '{absent[0]}' of its documents: it was made before these were measured; "
                "give its command again in a new --output"
            )
        scores: Floats = self._table[columns if layers else name].to_numpy(float)
        return scores

    def measure(self, rule: str) -> Measure:
        """See `Comparable`."""
        if rule in self._measures:
            return self._measures[rule]
        if len(self._measures) > 1:
            raise UnknownNameError(f"measure of run {self.run.folder.name}", rule, self._measures)
        raise UsageError(
            f"run {self.run.folder.name} is of {self.run.kind}, whose tasks are scored by metrics of their own: "
            f"leave out --rule {rule}"
        )
