"""The LongBench benchmark, scored as in its official code.

In: a `LongBenchRequest`. Out: a run folder with these files:

generations.parquet   a row for each (task, document): prompt hash, tokens, prediction, score,
                      seconds, and a hash of its context
results.json          scores of tasks, groups and means
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.generated import GeneratedAnswer, GeneratedBenchmark, GenerationRequest
from evalkit.benchmarks.longbench.protocol import GROUPS, LABELS, SUITES, Task, find_task, suite_tasks
from evalkit.benchmarks.outcomes import GradedAnswers, Label, Measure, Metric
from evalkit.benchmarks.request import spread
from evalkit.display import Say
from evalkit.errors import RunError
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import LONGBENCH, Run
from evalkit.runs.forms import StoredTask
from evalkit.runs.traits import max_prompt_tokens

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.document_views import TaskView
    from evalkit.benchmarks.longbench.documents import LongBenchDocument
    from evalkit.benchmarks.longbench.metrics import EditVariant
    from evalkit.benchmarks.longbench.plan import LongBenchPlan, LongBenchRequest
    from evalkit.benchmarks.longbench.scores import LongBenchResults
    from evalkit.data import HubSplit
    from evalkit.generation.capacity import GeneratingFacts
    from evalkit.reporting.figures import RunFigure
    from evalkit.reporting.report import Report
    from evalkit.runs.writing import RunWriter

GENERATIONS = "generations.parquet"
SOURCE = "source"
"""Column of the generations table with a hash of the context; equal for rows with the same document."""

_READ = ("task", "id", "prediction", "answers", "all_classes", "length", "truncated")
"""Columns of the generations table that scoring needs."""


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

    def request(self) -> type[LongBenchRequest]:
        """See `Benchmark`."""
        from evalkit.benchmarks.longbench.plan import LongBenchRequest

        return LongBenchRequest

    def plan(self, request: LongBenchRequest, say: Say) -> LongBenchPlan:
        """See `Benchmark`."""
        from evalkit.benchmarks.longbench.plan import plan_longbench

        return plan_longbench(request, say)

    def documents(self, plan: LongBenchPlan) -> dict[str, list[str]]:
        """See `GeneratedBenchmark`."""
        return {task.name: [row.id for row in found.rows] for task, found in plan.rows.items()}

    def generation_requests(
        self, plan: LongBenchPlan, task: str, facts: GeneratingFacts, tokenizer: Any
    ) -> list[GenerationRequest]:
        """See `GeneratedBenchmark`."""
        most, context = plan.manifest["specification"]["max_prompt_tokens"], plan.manifest["context"]
        [(protocol, documents)] = [one for one in plan.rows.items() if one[0].name == task]
        return generation_requests(protocol, documents.rows, tokenizer, facts.ends, most, context, plan.request.chat)

    def sampled(self, plan: LongBenchPlan, count: int) -> LongBenchPlan:
        """See `GeneratedBenchmark`."""
        rows = {
            task: replace(found, rows=tuple(found.rows[place] for place in spread(len(found.rows), count)))
            for task, found in plan.rows.items()
        }
        return replace(plan, rows=rows)

    def save(self, plan: LongBenchPlan, answers: Mapping[str, Sequence[GeneratedAnswer]], writer: RunWriter) -> None:
        """See `GeneratedBenchmark`."""
        from evalkit.benchmarks.longbench.scores import score_generations

        table = _table(plan, answers)
        writer.save_table(GENERATIONS, table)
        official = {task.name: found.official for task, found in plan.rows.items()}
        results = score_generations(table, plan.request.suite, "difflib", official)
        averages = [
            {"name": mean.name, "accuracy": (mean.all.score or 0.0) / 100, "stderr": None}
            for mean in (results.plain_mean, results.mean_of_groups)
        ]
        writer.save_results(results.to_json() | {"averages": averages})

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
        """See `Benchmark`."""
        self.refuse_rule(run, rule)
        return report_of(run)

    def figures(self, runs: Sequence[Run], names: Sequence[str]) -> list[RunFigure]:
        """Return the scores by length of each run whose documents have lengths."""
        from evalkit.benchmarks.longbench.plots import draw_by_length
        from evalkit.reporting.figures import RunFigure

        tables = ((run, name, load_generations(run)) for run, name in zip(runs, names, strict=True))
        return [
            RunFigure(
                f"lengths-{run.manifest['id']}",
                f"Scores of the tasks of {run.suite} by the length of their documents, with standard errors: {name}.",
                partial(draw_by_length, table),
            )
            for run, name, table in tables
            if "length" in table and table["length"].notna().all()
        ]

    def comparable(self, run: Run) -> LongBenchAnswers:
        """See `Benchmark`."""
        return LongBenchAnswers(run)

    def views(self, run: Run, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        """See `Benchmark`."""
        from evalkit.benchmarks.document_views import AnswerView, answered

        table = load_generations(run, ("task", "id", "prediction", "answers", "score"))
        for task, rows in table.groupby("task", sort=False):
            if not tasks or task in tasks:
                documents = [
                    answered(row, str(task), row["prediction"], json.loads(row["answers"]), row["score"])
                    for row in rows.to_dict("records")
                ]
                yield AnswerView(str(task), find_task(str(task)).metric, documents)

    def label(self, run: Run, task: str) -> Label:
        """See `Benchmark`."""
        return Label(*[LABELS.get(task, task)] * 2)

    def dataset(self, run: Run, task: str) -> HubSplit:
        """See `Benchmark`."""
        from evalkit.data import HubSplit

        e = "_e" * (run.suite == "longbench-e")
        return HubSplit(path="THUDM/LongBench", config=f"{task}{e}", split="test")

    def suites(self) -> dict[str, str]:
        """See `Benchmark`."""
        return {str(suite): what for suite, what in SUITES.items()}

    def averages(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """See `Benchmark`."""
        return {suite: _averages(suite) for suite in SUITES}


def _averages(suite: str) -> dict[str, tuple[str, ...]]:
    tasks = suite_tasks(suite)
    groups = {group: tuple(task.name for task in tasks if task.group == group) for group in GROUPS}
    return {**groups, "Average": tuple(task.name for task in tasks)}


class LongBenchAnswers(GradedAnswers):
    """The scores of a LongBench run by document, for comparison."""

    def __init__(self, run: Run) -> None:
        averages = _averages(run.manifest["specification"]["suite"])
        groups = {group: averages[group] for group in GROUPS}
        load = partial(load_generations, run, ("task", "id", "answers", "score", SOURCE))
        description = (
            "LongBench's own score of each task (F1, ROUGE-L, accuracy, edit similarity) in %, averaged over tasks"
        )
        super().__init__(run, load, ("answers",), groups, {LONGBENCH: Measure(description, True)})

    def must_agree(self, task: str) -> dict[str, str]:
        """See `Comparable`. Truncation at another length makes another prompt."""
        return {"prompt tokens": str(max_prompt_tokens(self.run.manifest["specification"]))} | super().must_agree(task)


def load_generations(run: Run, columns: Collection[str] = ("task", "id")) -> pd.DataFrame:
    """Return the generations table of a finished LongBench run; `columns` have to be in it.

    Raises:
        RunError: the run is no LongBench run or not finished, or its table is damaged.
    """
    if run.kind != LONGBENCH:
        raise RunError(f"{run.folder} is not a LongBench run")
    return run.table(GENERATIONS, columns)


def results_of(run: Run, variant: EditVariant = "difflib") -> LongBenchResults:
    """Return the scores of a finished LongBench run, from its stored predictions."""
    from evalkit.benchmarks.longbench.scores import score_generations

    official = {task: about["official"] for task, about in run.manifest["documents"].items()}
    return score_generations(load_generations(run, _READ), run.manifest["specification"]["suite"], variant, official)


def report_of(run: Run, variant: EditVariant = "difflib") -> Report:
    """Return the report of a finished LongBench run, from its stored predictions."""
    from evalkit.benchmarks.generated_plan import about_run
    from evalkit.benchmarks.longbench.results_report import longbench_report

    about = {"run": run.manifest["id"], "folder": str(run.folder)}
    return longbench_report(results_of(run, variant), about_run(run), about)


def generation_requests(
    task: Task,
    rows: Sequence[LongBenchDocument],
    tokenizer: Any,
    ends: Collection[int],
    max_prompt_tokens: int,
    context: int,
    chat: bool = False,
) -> list[GenerationRequest]:
    """Return the generation requests of a task's rows, in order.

    Args:
        task: the task.
        rows: its documents.
        tokenizer: the model's tokenizer.
        ends: the model's end tokens.
        max_prompt_tokens: longer prompts are truncated to this length.
        context: the model's context window in tokens, for prompt and answer.
        chat: whether to apply the chat template, for tasks that use it.
    """
    from evalkit.benchmarks.longbench.documents import prompt
    from evalkit.benchmarks.longbench.tokens import fit_prompt, stops_of
    from evalkit.generation.prompts import Prompt

    stops = stops_of(task, frozenset(ends), tokenizer)
    most, with_chat = context - task.max_new_tokens, chat and task.chat
    requests = []
    for row in rows:
        fitted = fit_prompt(
            tokenizer, prompt(task, row), max_prompt_tokens, most, chat=with_chat, label=f"{task.name} row {row.id}"
        )
        tokens = Prompt(row.index, fitted.tokens, task.max_new_tokens, stops)
        requests.append(GenerationRequest(row.id, tokens, fitted.text_sha256, fitted.before, fitted.truncated))
    return requests


def _table(plan: LongBenchPlan, answers: Mapping[str, Sequence[GeneratedAnswer]]) -> pd.DataFrame:
    """Return the generations table: a row for each document, in the order of tasks and files."""
    import pandas as pd

    from evalkit.benchmarks.longbench.scores import score_rows

    parts = []
    for task, found in plan.rows.items():
        pairs = zip(found.rows, answers[task.name], strict=True)
        part = pd.DataFrame([_table_row(task, row, answer) for row, answer in pairs])
        part["score"] = score_rows(task, part)
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def _table_row(task: Task, row: LongBenchDocument, answer: GeneratedAnswer) -> dict[str, Any]:
    return {
        "task": task.name,
        "index": row.index,
        **{"prediction" if name == "text" else name: value for name, value in answer._asdict().items()},
        "length": row.length,
        # Rows with several questions on one document are not independent
        SOURCE: hashlib.sha256(row.context.encode()).hexdigest()[:16],
        "answers": json.dumps(row.answers, ensure_ascii=False),
        "all_classes": json.dumps(row.all_classes, ensure_ascii=False),
    }
