"""Analysis of attention: measures of every layer and head on a sample of documents.

In: an `AttentionRequest`. Out: a run folder with the tables of `tables.py`, and results.json with the means of each
task and of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.groups import MEASURES
from evalkit.benchmarks.attention.rows import AttentionRow
from evalkit.benchmarks.base import Benchmark, Budget, Planned
from evalkit.benchmarks.multiple_choice.suites import dataset_of, label_of
from evalkit.benchmarks.outcomes import Label, Metric
from evalkit.display import Say
from evalkit.errors import RunError, UnknownNameError
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import Run
from evalkit.runs.forms import StoredTask

if TYPE_CHECKING:
    from evalkit.benchmarks.attention.computing import Analysis, AttentionFacts, AttentionSetup
    from evalkit.benchmarks.attention.plan import AttentionPlan, AttentionRequest
    from evalkit.benchmarks.attention.tables import AttentionDocuments
    from evalkit.benchmarks.request import TaskTokens
    from evalkit.data import HubSplit
    from evalkit.models.load import LoadedModel
    from evalkit.reporting.figures import RunFigure
    from evalkit.reporting.report import Report
    from evalkit.runs.finished_rows import FinishedRows
    from evalkit.runs.writing import RunWriter


class _Value(Stored):
    n: int
    value: float
    stderr: float | None


class _AttentionTask(StoredTask):
    n: int
    truncated: int
    tokens: int
    seconds: float
    measures: dict[str, _Value]


class _Layer(Stored):
    layer: int
    measures: dict[str, _Value]


class _AttentionResults(Stored):
    tasks: list[_AttentionTask]
    layers: list[_Layer]
    measures: dict[str, _Value]


class Attention(Benchmark):
    """Benchmark of analyses of attention."""

    kind = ATTENTION
    row = AttentionRow
    key = ("subtask", "doc_id")
    results_form = _AttentionResults

    def request(self) -> type[AttentionRequest]:
        """Return `AttentionRequest`."""
        from evalkit.benchmarks.attention.plan import AttentionRequest

        return AttentionRequest

    def plan(self, request: AttentionRequest, say: Say) -> AttentionPlan:
        """Make the plan of an analysis."""
        from evalkit.benchmarks.attention.plan import plan_attention

        return plan_attention(request, say)

    def is_missing(self, plan: AttentionPlan, finished: FinishedRows) -> bool:
        """Return whether a document has no rows. The windows of a text are known after planning only."""
        from evalkit.benchmarks.attention.documents import key_of

        if plan.choices is None:
            return True
        return any(key_of(one) not in finished for members in plan.questions.values() for one in members)

    def facts(self) -> type[AttentionFacts]:
        """Return `AttentionFacts`."""
        from evalkit.benchmarks.attention.computing import AttentionFacts

        return AttentionFacts

    def setup(self, plan: AttentionPlan) -> AttentionSetup:
        """Return the requested measures and layers."""
        from evalkit.benchmarks.attention.computing import AttentionSetup

        specification = plan.manifest["specification"]
        return AttentionSetup(plan.groups, tuple(specification["layers"]), specification.get("window"))

    def computer(self, setup: AttentionSetup, loaded: LoadedModel, budget: Budget, say: Say) -> Analysis:
        """Prepare a loaded model for the analysis."""
        from evalkit.benchmarks.attention.computing import Analysis

        return Analysis(setup, loaded, say)

    def batches(
        self, plan: AttentionPlan, facts: AttentionFacts, tokenizer: Any, finished: FinishedRows, say: Say
    ) -> Planned:
        """Plan the batches of the documents that have no rows."""
        from evalkit.benchmarks.attention.documents import batches_of, key_of, text_work, work_of

        if plan.choices is None:
            work = text_work(plan, facts.window, tokenizer)
        else:
            work = {key_of(one): work_of(one) for members in plan.questions.values() for one in members}
        done = sum(size for key, size in work.items() if key in finished)
        return Planned(batches_of(plan, facts.window, tokenizer, finished, say), sum(work.values()), done)

    def finish(self, plan: AttentionPlan, finished: FinishedRows, writer: RunWriter) -> None:
        """Write the tables and the results."""
        from evalkit.benchmarks.attention.plan import TEXT
        from evalkit.benchmarks.attention.results import results_of
        from evalkit.benchmarks.attention.tables import write_tables

        subtasks = {task: list(dict.fromkeys(one.subtask for one in found)) for task, found in plan.questions.items()}
        if plan.choices is not None and self.is_missing(plan, finished):
            # Happens only if lines of the journal were removed while it was read
            raise RunError(
                f"the journal of {writer.folder} lacks some documents; delete the folder and run the command again"
            )
        documents, sequences = write_tables(subtasks or {TEXT: [TEXT]}, finished, writer)
        writer.save_results(results_of(documents, sequences, finished.seconds))

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        """Return the measures of each task, means over layers."""
        if rule not in (None, ATTENTION):
            raise UnknownNameError(f"rule of run {run.folder}", rule, (ATTENTION,))
        return [
            Metric(
                task["task"],
                name,
                found["n"],
                found["value"],
                found["stderr"],
                higher_is_better=None,
                bounds=MEASURES[name].bounds,
                truncated=task["truncated"],
                official=run.manifest["documents"][task["task"]]["official"],
            )
            for task in run.stored["tasks"]
            for name, found in task["measures"].items()
        ]

    def comparable(self, run: Run) -> AttentionDocuments:
        """Return the documents with their measures."""
        from evalkit.benchmarks.attention.tables import AttentionDocuments

        return AttentionDocuments(run)

    def report(self, run: Run, rule: str | None = None, detail: bool = False) -> Report:
        """Return the measures by layer."""
        from evalkit.benchmarks.attention.results import attention_report

        return attention_report(run)

    def token_counts(self, plan: AttentionPlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
        """Count the tokens of a sample of each task's documents."""
        from evalkit.benchmarks.attention.documents import task_costs

        return task_costs(plan, tokenizer, sample, say)

    def suites(self) -> Mapping[str, str]:
        """Return the one suite."""
        return {ATTENTION: "measures of attention maps, by layer and head"}

    def label(self, run: Run, task: str) -> Label:
        """Return a task's labels: from the run's own suite, else from evalkit's suites."""
        return label_of(task, run.manifest.get("labels"), run.manifest.get("short"))

    def dataset(self, run: Run, task: str) -> HubSplit | None:
        """Return the hub dataset of a pinned task; None for other tasks, and for a text."""
        return dataset_of(task)

    def figures(self, runs: Sequence[Run], names: Sequence[str]) -> list[RunFigure]:
        """Return the figures that the runs have the measures of, with all runs in each."""
        from evalkit.benchmarks.attention.figures.making import run_figures

        return run_figures(runs, names)
