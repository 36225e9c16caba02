"""The LongBench benchmark, scored as in its official code.

In: a `LongBenchRequest`. Out: a run folder with these files:

generations.parquet   a row for each (task, document): prompt hash, tokens, prediction, score,
                      seconds, and a hash of its context
results.json          scores of tasks, groups and means
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import calling, naming
from evalkit.benchmarks.generated import GeneratedBenchmark, GenerationRequest
from evalkit.benchmarks.longbench import GENERATIONS
from evalkit.benchmarks.longbench.protocol import GROUPS, LABELS, SUITES, find_task, suite_tasks
from evalkit.benchmarks.outcomes import Label, Metric
from evalkit.benchmarks.request import spread
from evalkit.display import Say
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import LONGBENCH, Run
from evalkit.runs.forms import StoredTask

if TYPE_CHECKING:
    from evalkit.benchmarks.document_views import TaskView
    from evalkit.benchmarks.longbench.plan import LongBenchPlan
    from evalkit.data import HubSplit
    from evalkit.generation.capacity import GeneratingFacts
    from evalkit.reporting.report import Report


class _Scored(Stored):
    n: int
    score: float | None


class _LongBenchTask(StoredTask):
    all: _Scored


class _LongBenchResults(Stored):
    tasks: list[_LongBenchTask]


class LongBench(GeneratedBenchmark):
    """The LongBench and LongBench-E benchmarks."""

    kind = LONGBENCH
    results_form = _LongBenchResults

    request = naming("evalkit.benchmarks.longbench.plan:LongBenchRequest")
    plan = calling("evalkit.benchmarks.longbench.plan:plan_longbench")
    save = calling("evalkit.benchmarks.longbench.scores:save_generations")
    comparable = calling("evalkit.benchmarks.longbench.scores:LongBenchAnswers")
    figures = calling("evalkit.benchmarks.longbench.results_report:run_figures")

    def documents(self, plan: LongBenchPlan) -> dict[str, list[str]]:
        return {task.name: [row.id for row in loaded.rows] for task, loaded in plan.rows.items()}

    def generation_requests(
        self, plan: LongBenchPlan, task: str, facts: GeneratingFacts, tokenizer: Any
    ) -> list[GenerationRequest]:
        from evalkit.benchmarks.longbench.prompts import generation_requests

        most, context = plan.manifest["specification"]["max_prompt_tokens"], plan.manifest["context"]
        protocol = find_task(task)
        rows = plan.rows[protocol].rows
        return generation_requests(protocol, rows, tokenizer, facts.ends, most, context, plan.request.chat)

    def sampled(self, plan: LongBenchPlan, count: int) -> LongBenchPlan:
        rows = {
            task: replace(loaded, rows=tuple(loaded.rows[place] for place in spread(len(loaded.rows), count)))
            for task, loaded in plan.rows.items()
        }
        return replace(plan, rows=rows)

    def serves(self, plan: LongBenchPlan, run: Run) -> bool:
        """Return whether the generations table exists."""
        return (run.folder / GENERATIONS).is_file()

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        """Return LongBench's scores in percent, rounded to two decimals as its official code prints them."""
        self.refuse_rule(run, rule)
        return [
            Metric(
                task=task["task"],
                name=find_task(task["task"]).metric,
                n=task["all"]["n"],
                value=task["all"]["score"],
                # The official code prints none
                stderr=None,
                bounds=(0.0, 100.0),
                truncated=task.get("truncated"),
                official=run.manifest["documents"][task["task"]]["official"],
            )
            for task in run.stored["tasks"]
        ]

    def report(self, run: Run, rule: str | None = None, detail: bool = False) -> Report:
        from evalkit.benchmarks.longbench.results_report import report_of

        self.refuse_rule(run, rule)
        return report_of(run)

    def views(self, run: Run, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        from evalkit.benchmarks.document_views import AnswerView, answered
        from evalkit.benchmarks.longbench.scores import load_generations

        table = load_generations(run, ("task", "id", "prediction", "answers", "score"))
        for task, rows in table.groupby("task", sort=False):
            if not tasks or task in tasks:
                documents = [
                    answered(row, str(task), row["prediction"], json.loads(row["answers"]), row["score"])
                    for row in rows.to_dict("records")
                ]
                yield AnswerView(str(task), find_task(str(task)).metric, documents)

    def label(self, run: Run, task: str) -> Label:
        return Label(*[LABELS.get(task, task)] * 2)

    def dataset(self, run: Run, task: str) -> HubSplit:
        from evalkit.data import HubSplit

        e = "_e" * (run.suite == "longbench-e")
        return HubSplit(path="THUDM/LongBench", config=f"{task}{e}", split="test")

    def suites(self) -> Mapping[str, str]:
        return {str(suite): what for suite, what in SUITES.items()}

    def averages(self) -> dict[str, dict[str, tuple[str, ...]]]:
        return {suite: _averages(suite) for suite in SUITES}


def _averages(suite: str) -> dict[str, tuple[str, ...]]:
    tasks = suite_tasks(suite)
    groups = {group: tuple(task.name for task in tasks if task.group == group) for group in GROUPS}
    return {**groups, "Average": tuple(task.name for task in tasks)}
