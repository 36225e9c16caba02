"""What a finished run of any kind says: its numbers, documents, report and figures.

In: a finished run (`registry.results_of`). Out: `FinishedResults`, which each kind of benchmark implements
(`Benchmark.read`). Everything that reads runs reads them so, without torch, and never asks of which kind a run is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from evalkit.benchmarks.base import lazy
from evalkit.benchmarks.outcomes import average_metric, metrics_report
from evalkit.errors import UnknownNameError
from evalkit.suites.suites import Label, dataset_of, label_of

if TYPE_CHECKING:
    from evalkit.benchmarks.document_views import TaskView
    from evalkit.benchmarks.outcomes import Comparable, Metric
    from evalkit.data import HubSplit
    from evalkit.display import Say
    from evalkit.reporting.figures import RunFigure
    from evalkit.reporting.report import Report
    from evalkit.runs.folder import Run


class of_run(lazy):
    """A member of `FinishedResults`: a function, or a type, whose first argument is the run."""

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else partial(super().__get__(instance, owner), instance.run)


class FinishedResults(ABC):
    """Results of a finished run, for lists, tables, comparison, pages and exports.

    What a kind must have comes first; any of it can be `of_run`. What follows has the default of those that lack it.
    Wherever a `rule` is an argument, None is the run's own; a run without scores for a rule raises `UnknownNameError`.
    Any member may raise an `EvalkitError` for a damaged run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    @abstractmethod
    def metrics(self, rule: str | None = None) -> list[Metric]:
        """Return the metrics; the most important metric of a task comes first."""

    @abstractmethod
    def comparable(self) -> Comparable:
        """Return the documents with their scores, if the run has scores of single documents."""

    has_default_measure: ClassVar[bool] = True
    """Whether documents are compared by a measure if none is named."""

    def averages(self, rule: str | None = None) -> list[dict[str, Any]]:
        """Return the averages, as in results.json."""
        return list(self.run.stored["averages"])

    def headline(self, rule: str | None = None) -> tuple[Metric | None, str]:
        """Return the number that stands for the run in lists, and its printed form: the last average."""
        if not (averages := self.averages(rule)):
            return None, "finished"
        average = average_metric(averages[-1])
        name = "" if average.task == "Average" else f"{average.task.lower()} "
        number = name + average.format.with_error(average.value, average.stderr)
        if average.whole is None:
            return average, f"{number} {average.name}"
        return average, f"{number} ({rule or self.run.rule})" if self.run.rule else number

    def report(self, rule: str | None = None, detail: bool = False) -> Report:
        """Return the printed report; `detail`: with all that a first look does not need."""
        return metrics_report(self.run, self.metrics(rule))

    def views(self, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        """Yield the documents as people read them, by task; no `tasks`: of all."""
        return iter(())

    @staticmethod
    def figures(runs: Sequence[Run], names: Sequence[str], models: Sequence[str]) -> list[RunFigure]:
        """Return the figures, with unique names, of runs of this kind; `models` are equal for seeds of one model."""
        return []

    def label(self, task: str) -> Label:
        return Label(task, task)

    def dataset(self, task: str) -> HubSplit | None:
        """Return the published dataset of a task's documents; None if it is unknown."""
        return None

    def refuse_rule(self, rule: str | None) -> None:
        """Raise `UnknownNameError` unless a rule is the benchmark's own measure, which has its name."""
        if rule not in (None, self.run.kind):
            raise UnknownNameError(f"rule of run {self.run.folder}", rule, (self.run.kind,))


class OfSuiteTasks(FinishedResults):
    """Results of a run on tasks of a suite."""

    def label(self, task: str) -> Label:
        return label_of(task, self.run.manifest)

    def dataset(self, task: str) -> HubSplit | None:
        return dataset_of(task)
