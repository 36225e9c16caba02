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
from evalkit.benchmarks.lm_eval_tables import logged_metrics
from evalkit.benchmarks.outcomes import Metric
from evalkit.benchmarks.results import OfSuiteTasks, of_run
from evalkit.errors import UsageError
from evalkit.runs.folder import LM_EVAL

if TYPE_CHECKING:
    from evalkit.data import HubSplit


class FinishedTasks(OfSuiteTasks):
    """Results of lm-eval's tasks; its report under a rule is that of the multiple-choice tasks' choices."""

    comparable = of_run("evalkit.benchmarks.lm_eval.views:task_outcomes")
    views = of_run("evalkit.benchmarks.lm_eval.views:task_views")
    report = of_run("evalkit.benchmarks.lm_eval.views:metrics_report")
    headline = of_run("evalkit.benchmarks.lm_eval.views:headline")

    def metrics(self, rule: str | None = None) -> list[Metric]:
        """Return every numeric metric, as lm-eval computed it; another rule is a `UsageError`."""
        if rule not in (None, LM_EVAL):
            raise UsageError(
                f"run {self.run.folder} is a run of lm-eval's tasks, which have their own metrics; leave out --rule"
            )
        metrics: list[Metric] = []
        for task in self.run.stored["tasks"]:
            metrics += logged_metrics(task, self.run.manifest["documents"][task["task"]]["official"])
        return metrics

    def dataset(self, task: str) -> HubSplit | None:
        """Raise a `UsageError`, since evalkit does not know the datasets of lm-eval's tasks."""
        raise UsageError(
            f"run {self.run.folder} is a run of lm-eval's own tasks; "
            "export it with --to lm_eval, which supports all of them"
        )


class LMEval(Benchmark):
    """The benchmark of lm-eval's tasks."""

    kind = LM_EVAL
    read = FinishedTasks

    request = lazy("evalkit.benchmarks.request:SuiteRequest")
    plan = lazy("evalkit.benchmarks.lm_eval.plan:plan_tasks")
    finish = lazy("evalkit.benchmarks.lm_eval.results:finish")

    def suites(self) -> dict[str, ListedSuite]:
        return {LM_EVAL: ListedSuite("any of lm-eval's tasks, with their own prompts and metrics")}

    def options_outside_id(self, options: Mapping[str, Any]) -> frozenset[str]:
        """See `Benchmark`; the device is in the id where tasks generate."""
        return super().options_outside_id(options) | {"log_samples"}
