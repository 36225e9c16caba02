"""lm-eval's tasks: lm-eval builds the requests and computes the metrics; evalkit answers the requests and keeps them.

scores.parquet   the score table of the multiple-choice tasks with one gold answer
results.json     every metric of every task and group
lm_eval/         the same in lm-eval's form
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import Benchmark, Budget, Planned, Say
from evalkit.benchmarks.lm_eval.requests import KEY, RequestRow, unanswered, work_of
from evalkit.benchmarks.multiple_choice.outcomes import ComparableChoices
from evalkit.benchmarks.multiple_choice.suites import label_of
from evalkit.benchmarks.outcomes import Label, Metric
from evalkit.errors import EvalkitError, RunError, UsageError, first_line
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import LM_EVAL, Run
from evalkit.runs.forms import StoredTask

if TYPE_CHECKING:
    from evalkit.benchmarks.lm_eval.answering import Answering
    from evalkit.benchmarks.lm_eval.batches import RequestFacts
    from evalkit.benchmarks.lm_eval.plan import TaskPlan
    from evalkit.benchmarks.suite_request import SuiteRequest
    from evalkit.data import HubSplit
    from evalkit.models.load import LoadedModel
    from evalkit.reporting.report import Report
    from evalkit.runs.finished_rows import FinishedRows
    from evalkit.runs.writing import RunWriter


class _LMEvalMetric(Stored):
    filter: str
    metric: str
    value: Any
    stderr: float | None
    higher_is_better: bool | None


class _LMEvalGroup(StoredTask):
    """A group in results.json."""

    n: int
    num_fewshot: int | None
    metrics: list[_LMEvalMetric]


class _LMEvalTask(_LMEvalGroup):
    """A task there."""

    seconds: float


class _LMEvalResults(Stored):
    tasks: list[_LMEvalTask]
    groups: list[_LMEvalGroup]
    samples: bool


class LMEval(Benchmark):
    """See the module."""

    kind = LM_EVAL
    row = RequestRow
    key = KEY
    results_form = _LMEvalResults

    def request(self) -> type[SuiteRequest]:
        """See `Benchmark`."""
        from evalkit.benchmarks.suite_request import SuiteRequest

        return SuiteRequest

    def plan(self, request: SuiteRequest, say: Say) -> TaskPlan:
        """See `Benchmark`."""
        from evalkit.benchmarks.lm_eval.plan import plan_tasks

        return plan_tasks(request, say)

    def is_missing(self, plan: TaskPlan, finished: FinishedRows) -> bool:
        """Whether a request has no answer."""
        return any(unanswered(finished, members) for members in plan.asked.values())

    def computer(self, plan: TaskPlan, loaded: LoadedModel, budget: Budget, say: Say) -> Answering:
        """See `Benchmark`."""
        from evalkit.benchmarks.lm_eval.answering import Answering

        return Answering(plan, loaded, budget, say)

    def batches(self, plan: TaskPlan, facts: RequestFacts, tokenizer: Any, finished: FinishedRows, say: Say) -> Planned:
        """See `Benchmark`."""
        from evalkit.benchmarks.lm_eval.batches import batches_of

        left = [one for members in plan.asked.values() for one in unanswered(finished, members)]
        total = sum(work_of(one.request) for members in plan.asked.values() for one in members)
        return Planned(
            batches_of(plan.asked, facts, tokenizer, finished, plan.request.token_budget, say),
            total,
            total - sum(work_of(one.request) for one in left),
        )

    def finish(self, plan: TaskPlan, finished: FinishedRows, writer: RunWriter) -> None:
        """Have lm-eval measure every task, and write what comes out."""
        import lm_eval.evaluator

        from evalkit.benchmarks.lm_eval.answers import Answers
        from evalkit.benchmarks.lm_eval.quiet import quiet_lm_eval
        from evalkit.benchmarks.lm_eval.results import write_results

        request, tasks, answers = plan.request, plan.tasks, Answers(finished)
        with quiet_lm_eval(writer.say):
            try:
                _ = plan.requests
                results = lm_eval.evaluator.evaluate(answers, tasks.as_lm_eval(), limit=request.limit, log_samples=True)
            except EvalkitError:
                raise
            except Exception as error:
                raise RunError(
                    f"lm-eval cannot evaluate {', '.join(tasks.names)} ({type(error).__name__}: {first_line(error)}); "
                    f"what was scored is kept in {writer.folder}"
                ) from error
        write_results(writer, tasks, answers, results, request.log_samples)

    def serves(self, plan: TaskPlan, run: Run) -> bool:
        """Whether a finished run has the sample files, if they are asked for."""
        return run.serves(plan.request.log_samples)

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        """Every metric that is a number, as lm-eval computed it.

        Raises:
            UsageError: a rule is asked for: lm-eval's tasks have metrics of their own.
        """
        if rule is not None:
            raise UsageError(
                f"run {run.folder} is of lm-eval's tasks, which are measured by their own metrics; leave out --rule"
            )
        documents = run.manifest["documents"]
        return [
            Metric(
                task=task["task"],
                name=metric["metric"],
                n=task["n"],
                value=float(metric["value"]),
                stderr=metric["stderr"],
                higher_is_better=metric["higher_is_better"] is not False,
                bounds=(0.0, 1.0) if metric["metric"].startswith("acc") else None,
                official=documents[task["task"]]["official"],
            )
            for task in run.stored["tasks"]
            for metric in task["metrics"]
            if isinstance(metric["value"], (int, float))
        ]

    def comparable(self, run: Run) -> TaskChoices:
        """See `Benchmark`: of the multiple-choice tasks with one gold answer."""
        return TaskChoices(run)

    def report(self, run: Run, rule: str | None = None, detail: bool = False) -> Report:
        """See `Benchmark`: every metric of every task and group, as lm-eval computed it."""
        from evalkit.benchmarks.lm_eval.results_report import metrics_report

        return metrics_report(run)

    def prompts(self, plan: TaskPlan, count: int, say: Say) -> Iterator[str]:
        """See `Benchmark`: each request, as lm-eval makes it."""
        from evalkit.benchmarks.lm_eval.plan import first_requests
        from evalkit.benchmarks.lm_eval.prompt_text import requests_text

        for task in plan.tasks.tasks.values():
            yield requests_text(first_requests(task, count))

    def suites(self) -> dict[str, str]:
        """One name for all of lm-eval's tasks."""
        return {LM_EVAL: "any of lm-eval's tasks, by their own prompts and metrics"}

    def headline(self, run: Run) -> tuple[float | None, str]:
        """Its first metric; lm-eval's groups say themselves how they aggregate."""
        from evalkit.benchmarks.lm_eval.results_report import state

        values = [m["value"] for entry in (run.stored["groups"] or run.stored["tasks"]) for m in entry["metrics"]]
        return next((value for value in values if isinstance(value, float)), None), state(run.stored)

    def label(self, run: Run, task: str) -> Label:
        """As evalkit's suites have it."""
        return label_of(task)

    def dataset(self, run: Run, task: str) -> HubSplit | None:
        """Raises a `UsageError`: evalkit does not know the data sets of lm-eval's tasks."""
        raise UsageError(f"run {run.folder} is of lm-eval's own tasks; export it with --to lm_eval, which has them all")


class TaskChoices(ComparableChoices):
    """See `ComparableChoices`."""

    lacking = "no multiple-choice scores"

    def must_agree(self, task: str) -> dict[str, str]:
        """See `Comparable`: lm-eval's hash is of the documents up to the limit, and its configuration has the shots."""
        specification = self.run.manifest["specification"]
        about = specification["tasks"][task]
        return {
            "limit": str(specification["limit"] or "none"),
            "number of examples": str(about["num_fewshot"]),
            "documents": str(about["documents"]),
            "task's definition": str(about["config"]),
        }
