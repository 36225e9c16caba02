"""Analysis of attention: measures of every layer and head on a sample of documents.

In: an `AttentionRequest`. Out: a run folder with the tables of `results.py`, and results.json with the means of each
task and of each layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.groups import MEASURES, AttentionRow
from evalkit.benchmarks.base import Benchmark, ListedSuite, lazy
from evalkit.benchmarks.multiple_choice.suites import dataset_of, label_of
from evalkit.benchmarks.outcomes import Label, Metric
from evalkit.benchmarks.results import FinishedResults, of_run

if TYPE_CHECKING:
    from evalkit.benchmarks.attention.documents import AttentionPlan
    from evalkit.data import HubSplit


class FinishedAttention(FinishedResults):
    has_default_measure = False
    report = of_run("evalkit.benchmarks.attention.results:attention_report")
    comparable = of_run("evalkit.benchmarks.attention.figure_runs:AttentionDocuments")
    figures = lazy("evalkit.benchmarks.attention.figures:run_figures")

    def metrics(self, rule: str | None = None) -> list[Metric]:
        self.refuse_rule(rule)
        return [
            Metric(
                task["task"],
                name,
                measured["n"],
                measured["value"],
                measured["stderr"],
                higher_is_better=None,
                bounds=MEASURES[name].bounds,
                unit=MEASURES[name].stored_unit,
                truncated=task["truncated"],
                official=self.run.manifest["documents"][task["task"]]["official"],
            )
            for task in self.run.stored["tasks"]
            for name, measured in task["measures"].items()
        ]

    def label(self, task: str) -> Label:
        return label_of(task, self.run.manifest)

    def dataset(self, task: str) -> HubSplit | None:
        return dataset_of(task)


class Attention(Benchmark):
    kind = ATTENTION
    row = AttentionRow
    key = ("subtask", "doc_id")
    read = FinishedAttention

    request = lazy("evalkit.benchmarks.attention.documents:AttentionRequest")
    plan = lazy("evalkit.benchmarks.attention.documents:plan_attention")
    is_missing = lazy("evalkit.benchmarks.attention.documents:is_missing")
    facts = lazy("evalkit.benchmarks.attention.measures:AttentionFacts")
    computer = lazy("evalkit.benchmarks.attention.measures:Analysis")
    batches = lazy("evalkit.benchmarks.attention.documents:planned_batches")
    token_counts = lazy("evalkit.benchmarks.attention.documents:task_costs")
    finish = lazy("evalkit.benchmarks.attention.results:finish")

    def setup(self, plan: AttentionPlan) -> dict[str, Any]:
        return dict(plan.manifest["specification"])

    def suites(self) -> dict[str, ListedSuite]:
        return {ATTENTION: ListedSuite("measures of attention maps, by layer and head")}
