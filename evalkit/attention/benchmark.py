"""Analysis of attention: measures of every layer and head on a sample of documents.

In: an `AttentionRequest`. Out: a run folder with the tables of `results.py`, and results.json with the means of each
task and of each layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evalkit.attention import ATTENTION
from evalkit.attention.groups import MEASURES, AttentionRow
from evalkit.benchmarks.base import Benchmark, ListedSuite, lazy
from evalkit.benchmarks.outcomes import Metric
from evalkit.benchmarks.results import OfSuiteTasks, of_run
from evalkit.requests.batches import Computation

if TYPE_CHECKING:
    from evalkit.attention.documents import AttentionPlan


class AttentionComputation(Computation):
    """Attention maps are read by a computer of their own."""

    rows = (AttentionRow,)
    key = ("subtask", "doc_id")
    facts = lazy("evalkit.attention.measures:AttentionFacts")
    is_missing = lazy("evalkit.attention.documents:is_missing")
    computer = lazy("evalkit.attention.measures:Analysis")
    batches = lazy("evalkit.attention.documents:planned_batches")
    token_counts = lazy("evalkit.attention.documents:task_costs")

    def candidates(self, plan: AttentionPlan) -> dict[str, Any]:
        return dict(plan.manifest["specification"])


class FinishedAttention(OfSuiteTasks):
    has_default_measure = False
    report = of_run("evalkit.attention.results:attention_report")
    comparable = of_run("evalkit.attention.figure_runs:AttentionDocuments")
    figures = lazy("evalkit.attention.figures:run_figures")

    def metrics(self, rule: str | None = None) -> list[Metric]:
        self.refuse_rule(rule)
        return [
            Metric(
                MEASURES[name].scale,
                task["task"],
                measured["n"],
                measured["value"],
                measured["stderr"],
                truncated=task["truncated"],
                official=self.run.manifest["documents"][task["task"]]["official"],
            )
            for task in self.run.stored["tasks"]
            for name, measured in task["measures"].items()
        ]


class Attention(Benchmark):
    kind = ATTENTION
    computation = AttentionComputation()
    read = FinishedAttention

    request = lazy("evalkit.attention.documents:AttentionRequest")
    plan = lazy("evalkit.attention.documents:plan_attention")
    finish = lazy("evalkit.attention.results:finish")

    def suites(self) -> dict[str, ListedSuite]:
        return {ATTENTION: ListedSuite("measures of attention maps, by layer and head")}
