"""Results of a finished multiple-choice run, from its score table and results.json."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.multiple_choice.outcomes import (
    ComparableChoices,
    outcome_averages,
    stored_metrics,
    stored_results,
    table_metrics,
)
from evalkit.benchmarks.multiple_choice.suites import dataset_of, label_of
from evalkit.benchmarks.outcomes import Label, Metric
from evalkit.benchmarks.results import FinishedResults
from evalkit.display import Say
from evalkit.runs.score_table import outcome_of

if TYPE_CHECKING:
    from evalkit.benchmarks.document_views import TaskView
    from evalkit.data import HubSplit
    from evalkit.reporting.report import Report


class FinishedChoices(FinishedResults):
    def metrics(self, rule: str | None = None) -> list[Metric]:
        return stored_metrics(self.run, rule)

    @cached_property
    def comparable(self) -> ComparableChoices:
        return ComparableChoices(self.run)

    def averages(self, rule: str | None = None) -> list[dict[str, Any]]:
        if rule is None:
            return super().averages()
        if outcome_of(rule) is None:
            return list(stored_results(self.comparable, rule)["averages"])
        return outcome_averages(self.run.manifest, table_metrics(self.run.scores, self.run.manifest, rule))

    def report(self, rule: str | None = None, detail: bool = False) -> Report:
        from evalkit.benchmarks.multiple_choice.results_report import choices_report

        return choices_report(self.run, rule, detail)

    def views(self, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        from evalkit.benchmarks.multiple_choice.views import choice_views

        return choice_views(self.run, tasks, say)

    def label(self, task: str) -> Label:
        return label_of(task, self.run.manifest)

    def dataset(self, task: str) -> HubSplit | None:
        return dataset_of(task)
