"""Results of a finished run of any benchmark: its metrics, and the scores of single documents.

Tables, lists and exports read `Metric`s; `evalkit compare` pairs `Comparable`s. Neither torch nor transformers is
imported; pandas is imported only when documents are read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from evalkit.errors import check_known
from evalkit.reporting.numbers import METRICS, SHARES, NumberFormat
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.notes import direction_mark, notes_below
from evalkit.runs.scales import Scale, stored_scale
from evalkit.runs.score_table import CLUSTER
from evalkit.runs.traits import caveat_mark

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.runs.folder import Run
    from evalkit.stats.estimates import Floats

CONTENT = "content"
"""Column of documents with the hash of their content, where runs of other programs number them in their own way."""


class Scaled:
    """A number, or a measure of numbers, with its scale."""

    scale: Scale

    @property
    def name(self) -> str:
        return self.scale.name

    @property
    def unit(self) -> str | None:
        return self.scale.unit

    @property
    def higher_is_better(self) -> bool | None:
        return self.scale.higher_is_better

    @property
    def bounds(self) -> tuple[float, float] | None:
        return self.scale.bounds

    @property
    def whole(self) -> float | None:
        return self.scale.whole

    @property
    def is_share(self) -> bool:
        return self.scale.is_fraction

    @property
    def span(self) -> float:
        return self.scale.span


@dataclass(frozen=True)
class Metric(Scaled):
    """One number of one task."""

    scale: Scale
    task: str
    n: int
    """Documents; 0 of an average over tasks."""
    value: float | None
    """None if there is nothing to measure."""
    stderr: float | None
    """Standard error of the mean over documents, if known."""
    layer: int | None = None
    """Layer of the model, counted from 0; None for the whole model."""
    chance: float | None = None
    """Of random guessing."""
    truncated: int | None = None
    """Number of documents truncated to the context window, if known."""
    official: bool | None = None
    """Whether the documents are the published ones; None if none are published."""

    @property
    def stored(self) -> dict[str, Any]:
        """The entries of the number in results.json, JSON and CSV."""
        return self.scale.stored(self.value, self.stderr)

    @property
    def format(self) -> NumberFormat:
        """How the number is printed: shares in percent."""
        return NumberFormat(SHARES.places, self.whole) if self.whole else METRICS

    @property
    def record(self) -> dict[str, Any]:
        """All fields, for JSON and CSV."""
        return {
            "task": self.task,
            "metric": self.name,
            "n": self.n,
            "value": self.value,
            "stderr": self.stderr,
            "higher_is_better": self.higher_is_better,
            "bounds": self.bounds,
            "layer": self.layer,
            "chance": self.chance,
            "truncated": self.truncated,
            "official": self.official,
            "unit": self.unit,
        }


def headline_entries(metric: Metric | None) -> dict[str, Any]:
    """Return the entries of a run's headline in JSON and CSV, which are None if it has none."""
    if metric is None:
        return dict.fromkeys(("metric", "unit", "higher_is_better", "value", "stderr"))
    return metric.stored


def average_metric(average: Mapping[str, Any]) -> Metric:
    """Return an average of results.json as a metric, whose task is the average's name."""
    return Metric(stored_scale(average), average["name"], 0, average["value"], average["stderr"])


@dataclass(frozen=True)
class Measure(Scaled):
    """Score of single documents under a rule.

    Rules whose measures have scales of the same name are alternative ways to measure it.
    """

    scale: Scale
    words: str
    """Description in one line, with the unit if the score is not a fraction."""
    graded: bool
    """False: a score is 1 (right) or 0 (wrong), so that means are accuracies."""
    layers: tuple[int, ...] = ()
    """Layers that each score every document; empty if a document has one score."""
    alternatives: Literal["rule", "prompt"] = "rule"
    """In what rules differ that measure the same: in how an answer is chosen, or in the prompt."""
    averaged: str = ""
    """Layers that a document's score is the mean of, in words; must be the same in two runs."""
    resolution: float = 0.0
    """Share of the scores up to which a difference of means is rounding: one checkpoint, computed in two ways."""
    least_documents: int = 0
    """Documents below which a task alone has no verdict: the scores have rare outliers, which fewer do not show."""


def flat_fields(fields: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dataclass's fields for `asdict(…, dict_factory=flat_fields)`: those of a scale are its measure's."""
    record: dict[str, Any] = {}
    for name, value in fields:
        record |= value if name == "scale" else {name: value}
    return record


class Comparable(ABC):
    """Documents and scores of a finished run, for paired comparison. Tables are read on first use."""

    checked: Sequence[str]
    """Columns of `documents` that must be equal for two documents to be the same."""
    groups: Mapping[str, Sequence[str]]
    """Average → its tasks."""
    group_sizes: Mapping[str, int]
    """Average → number of its tasks in the full suite."""
    lacking: ClassVar[str] = "no scores of its documents"
    """Reason, for messages, why a measured task has no documents here."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    @abstractmethod
    def documents(self) -> pd.DataFrame:
        """One row for each document: task, subtask, doc_id, cluster (`CLUSTER`) and the `checked` columns."""

    def sample_of(self, task: str) -> str:
        """Return the common name of tasks that ask the same questions; empty if no other task does."""
        return ""

    @property
    @abstractmethod
    def rules(self) -> Sequence[str]:
        """The rules that the run has scores for."""

    @abstractmethod
    def by_rule(self, rule: str) -> Floats:
        """Return scores, [documents] or [documents, layers]. Raises `UsageError` if the run has none for the rule."""

    @abstractmethod
    def measure(self, rule: str) -> Measure:
        """Return how documents are scored under a rule."""

    def alternatives(self, rule: str) -> Sequence[str]:
        """Return the rules that measure the same in other ways, `rule` among them if it is one of `rules`."""
        name = self.measure(rule).name
        return [other for other in self.rules if self.measure(other).name == name]

    def of_letters(self, key: str) -> frozenset[str]:
        """Return the tasks whose answers are letters, of which a continuous outcome mostly measures the format.

        Of a rule, or of an outcome that compares the letters with each other, there is none.
        """
        return frozenset()

    def beside(self, rule: str) -> str | None:
        """Return the continuous outcome that is reported beside a rule's accuracy, a further key; None without one."""
        return None

    @property
    def has_contents(self) -> bool:
        """Whether `documents` have hashes of their content (`CONTENT`): other selections can then be paired."""
        return False

    def check_alike(self, other: Comparable) -> None:
        """Raise a `UsageError` if the scores of another run mean something else than these, whatever the documents."""
        return

    def must_agree(self, task: str) -> dict[str, str]:
        """Return what must be equal for a task's documents to be the same: name → value, empty if unknown."""
        return {"documents": str(self.run.manifest["specification"]["documents"].get(task, ""))}


class GradedAnswers(Comparable):
    """Answers scored by their benchmark's own metric, and by further measures.

    Args:
        run: a finished run.
        load: reads the table, one row for each answer: task, id, `source` (equal for documents of one source), the
            checked columns, and the scores. Column `score` has the benchmark's own measure; other measures have a
            column named after their rule ("RULE LAYER" for a score of each layer).
        checked: see `Comparable`.
        groups: average → its tasks.
        measures: rule → measure; the benchmark's own, under its name, comes first.
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
        self.checked, self.groups = checked, groups
        self.group_sizes = {group: len(members) for group, members in groups.items()}
        self._load, self._measures = load, measures

    @cached_property
    def _table(self) -> pd.DataFrame:
        return self._load()

    @cached_property
    def documents(self) -> pd.DataFrame:
        table = self._table
        documents = table[["task", *self.checked]].assign(subtask=table["task"], doc_id=table["id"])
        groups = documents.groupby([table["task"], table["source"]], sort=False)
        return documents.assign(**{CLUSTER: groups["doc_id"].transform("first")})

    @property
    def rules(self) -> Sequence[str]:
        return tuple(self._measures)

    def by_rule(self, rule: str) -> Floats:
        name, layers = "score" if rule == self.run.kind else rule, self.measure(rule).layers
        columns = [f"{name} {layer}" for layer in layers]
        scores: Floats = self._table[columns or name].to_numpy(float)
        return scores

    def measure(self, rule: str) -> Measure:
        check_known(f"measure of {self.run.kind} run {self.run.folder.name}", [rule], self._measures)
        return self._measures[rule]


def run_content(run: Run, **more: Any) -> dict[str, Any]:
    """Return the JSON content of a run: results.json with the run's id, its folder and further keys."""
    return {"run": run.manifest["id"], "folder": str(run.folder)} | more | dict(run.stored)


def metrics_report(run: Run, metrics: Sequence[Metric], lines: Sequence[str] = ()) -> Report:
    """Return a report with one line for each metric; `lines` are what the kind says of the numbers."""
    rows = []
    for metric in metrics:
        layer = "" if metric.layer is None else f", layer {metric.layer}"
        name = metric.name + layer + direction_mark(metric.higher_is_better)
        task = metric.task + caveat_mark(run.manifest, [metric.task])
        documents = f"{metric.n:,}" if metric.n else ""
        rows.append([task, name, documents, *METRICS.columns(metric.value, metric.stderr)])
    table = simple_table(run.suite, ["task", "metric", "n", "value", "± SE"], rows, texts=2)
    notes = notes_below(run.manifest, lines, (metric.higher_is_better for metric in metrics))
    return Report((table,), notes=notes, content=run_content(run), records=[metric.record for metric in metrics])
