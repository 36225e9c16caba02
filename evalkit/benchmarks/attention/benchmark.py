"""Analysis of attention: measures of every layer and head on a sample of documents.

In: an `AttentionRequest`. Out: a run folder with the tables of `results.py`, and results.json with the means of each
task and of each layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.groups import AttentionRow
from evalkit.benchmarks.base import Benchmark, ListedSuite, lazy

if TYPE_CHECKING:
    from evalkit.benchmarks.attention.documents import AttentionPlan


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
    read = lazy("evalkit.benchmarks.attention.results:FinishedAttention")

    def setup(self, plan: AttentionPlan) -> dict[str, Any]:
        return dict(plan.manifest["specification"])

    def suites(self) -> dict[str, ListedSuite]:
        return {ATTENTION: ListedSuite("measures of attention maps, by layer and head")}
