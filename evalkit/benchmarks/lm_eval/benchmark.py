"""lm-eval's tasks. lm-eval builds the requests and computes the metrics; evalkit computes and stores the answers.

In: a `SuiteRequest` with task names. Out: a run folder with these files:

scores.parquet      the score table of the multiple-choice tasks with one gold answer
documents.parquet   every metric of every document
results.json        every metric of every task and group
lm_eval/            the same in lm-eval's format
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import Benchmark, ListedSuite, lazy
from evalkit.benchmarks.lm_eval.requests import KEY, RequestRow, rows_of, stored_rows
from evalkit.runs.folder import LM_EVAL

if TYPE_CHECKING:
    from evalkit.benchmarks.lm_eval.plan import TaskPlan
    from evalkit.runs.journal import FinishedRows


class LMEval(Benchmark):
    """The benchmark of lm-eval's tasks."""

    kind = LM_EVAL
    row = RequestRow
    key = KEY

    request = lazy("evalkit.benchmarks.request:SuiteRequest")
    plan = lazy("evalkit.benchmarks.lm_eval.plan:plan_tasks")
    facts = lazy("evalkit.benchmarks.lm_eval.batches:RequestFacts")
    setup = lazy("evalkit.benchmarks.lm_eval.batches:candidates")
    batches = lazy("evalkit.benchmarks.lm_eval.batches:planned")
    computer = lazy("evalkit.benchmarks.lm_eval.harness:computer_of")
    token_counts = lazy("evalkit.benchmarks.lm_eval.plan:estimated")
    finish = lazy("evalkit.benchmarks.lm_eval.results:finish")
    read = lazy("evalkit.benchmarks.lm_eval.views:FinishedTasks")
    prompts = lazy("evalkit.benchmarks.lm_eval.views:shown_requests")

    def is_missing(self, plan: TaskPlan, finished: FinishedRows) -> bool:
        _ = plan.caveats  # a task that cannot be measured is refused before a model is loaded
        rows = stored_rows(finished, plan.requests)
        return any(not rows_of(request, rows) for members in plan.requests.values() for request in members)

    def suites(self) -> dict[str, ListedSuite]:
        return {LM_EVAL: ListedSuite("any of lm-eval's tasks, with their own prompts and metrics")}

    def options_outside_id(self, options: Mapping[str, Any]) -> frozenset[str]:
        """See `Benchmark`; the device is in the id where tasks generate."""
        return super().options_outside_id(options) | {"log_samples"}
