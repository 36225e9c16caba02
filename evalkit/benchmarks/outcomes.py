"""What readers ask of a finished run, whatever its benchmark: its metrics, and a score of each document.

Tables, lists and exports read `Metric`s; `evalkit compare` pairs `Comparable`s. Neither torch nor transformers is
imported, and pandas only where documents are read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """Between `bounds`; None where there is nothing to measure."""
    stderr: float | None
    """Standard error of the mean over documents, where it is known."""
    higher_is_better: bool = True
    bounds: tuple[float, float] | None = (0.0, 1.0)
    """Least and largest possible value; None where there are none."""
    chance: float | None = None
    """What a guess reaches."""
    truncated: int | None = None
    """Documents that were cut to fit the window, where that is known."""
    official: bool | None = None
    """Whether the documents are the published ones; None where none are published."""


@dataclass(frozen=True)
class Measure:
    """How documents are scored under a rule."""

    words: str
    """In a line, for a reader."""
    graded: bool
    """Whether scores lie anywhere from 0 to 1; else an answer is right or wrong."""


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
        """[documents] scores from 0 to 1. Raises `UsageError` where the run cannot answer the rule."""

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
