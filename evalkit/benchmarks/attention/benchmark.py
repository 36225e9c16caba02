"""Analysis of attention: measures of every layer and head on a sample of documents.

In: an `AttentionRequest`. Out: a run folder with the tables of `results.py`, and results.json with the means of each
task and of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.groups import MEASURES, AttentionRow
from evalkit.benchmarks.base import Benchmark, lazy
from evalkit.benchmarks.multiple_choice.suites import dataset_of, label_of
from evalkit.benchmarks.outcomes import Label, Metric
from evalkit.runs.folder import Run

if TYPE_CHECKING:
    from evalkit.benchmarks.attention.documents import AttentionPlan
    from evalkit.data import HubSplit


class Attention(Benchmark):
    kind = ATTENTION
    row = AttentionRow
    key = ("subtask", "doc_id")

    request = lazy("evalkit.benchmarks.attention.documents:AttentionRequest")
    plan = lazy("evalkit.benchmarks.attention.documents:plan_attention")
    is_missing = lazy("evalkit.benchmarks.attention.documents:is_missing")
    facts = lazy("evalkit.benchmarks.attention.measures:AttentionFacts")
    computer = lazy("evalkit.benchmarks.attention.measures:Analysis")
    batches = lazy("evalkit.benchmarks.attention.documents:planned_batches")
    token_counts = lazy("evalkit.benchmarks.attention.documents:task_costs")
    finish = lazy("evalkit.benchmarks.attention.results:finish")
    report = lazy("evalkit.benchmarks.attention.results:attention_report")
    comparable = lazy("evalkit.benchmarks.attention.figure_runs:AttentionDocuments")
    figures = lazy("evalkit.benchmarks.attention.figures:run_figures")

    def setup(self, plan: AttentionPlan) -> dict[str, Any]:
        return dict(plan.manifest["specification"])

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        self.refuse_rule(run, rule)
        return [
            Metric(
                MEASURES[name].scale,
                task["task"],
                measured["n"],
                measured["value"],
                measured["stderr"],
                truncated=task["truncated"],
                official=run.manifest["documents"][task["task"]]["official"],
            )
            for task in run.stored["tasks"]
            for name, measured in task["measures"].items()
        ]

    def suites(self) -> Mapping[str, str]:
        return {ATTENTION: "measures of attention maps, by layer and head"}

    def label(self, run: Run, task: str) -> Label:
        return label_of(task, run.manifest)

    def dataset(self, run: Run, task: str) -> HubSplit | None:
        return dataset_of(task)
