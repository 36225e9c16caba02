"""Suites of multiple-choice tasks: every choice of a document is scored, and a rule predicts one of them.

In: a `SuiteRequest`. Out: a run folder with

scores.parquet   the score table, which every rule reads
results.json     accuracies under every rule
lm_eval/         the same in lm-eval's format
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from evalkit.benchmarks.base import Benchmark, lazy
from evalkit.benchmarks.multiple_choice.outcomes import outcome_averages, outcome_entries, stored_results, table_metrics
from evalkit.benchmarks.multiple_choice.suites import dataset_of, label_of, load_suite, shipped_suites
from evalkit.benchmarks.outcomes import Label
from evalkit.display import Say
from evalkit.errors import EvalkitError, UsageError
from evalkit.inputs.validated import Stored
from evalkit.runs.continuous import outcome_of
from evalkit.runs.folder import SCORES, Run, StoredAverage, StoredTask, StoredValue
from evalkit.runs.score_table import ScoreRow

if TYPE_CHECKING:
    from evalkit.benchmarks.lm_eval.plan import TaskPlan
    from evalkit.benchmarks.multiple_choice.plan import ChoicePlan
    from evalkit.benchmarks.request import SuiteRequest
    from evalkit.data import HubSplit
    from evalkit.runs.journal import FinishedRows, Key
    from evalkit.runs.writing import RunWriter


class _OwnTask(StoredTask, StoredValue):
    n: int


class _ChoiceTask(_OwnTask):
    chance: float


class _RuleResults(Stored):
    tasks: list[_ChoiceTask]
    averages: list[StoredAverage]


class _ChoiceResults(Stored):
    tasks: list[_OwnTask]
    """Of the run's own rule or outcome."""
    averages: list[StoredAverage]
    rules: dict[str, _RuleResults]
    samples: bool


class MultipleChoice(Benchmark):
    """Benchmark of suites of multiple-choice tasks."""

    kind = "multiple_choice"
    row = ScoreRow
    key = ("subtask", "doc_id", "texts")
    results_form: ClassVar[type[Stored]] = _ChoiceResults

    request = lazy("evalkit.benchmarks.request:SuiteRequest")
    facts = lazy("evalkit.benchmarks.multiple_choice.scoring:ScoringFacts")
    setup = lazy("evalkit.benchmarks.multiple_choice.scoring:setup_of")
    computer = lazy("evalkit.benchmarks.multiple_choice.scoring:Scoring")
    batches = lazy("evalkit.benchmarks.multiple_choice.scoring:batches_of")
    metrics = lazy("evalkit.benchmarks.multiple_choice.outcomes:stored_metrics")
    comparable = lazy("evalkit.benchmarks.multiple_choice.outcomes:ComparableChoices")
    views = lazy("evalkit.benchmarks.multiple_choice.views:choice_views")
    report = lazy("evalkit.benchmarks.multiple_choice.results_report:choices_report")
    prompts = lazy("evalkit.benchmarks.multiple_choice.views:shown_prompts")
    token_counts = lazy("evalkit.benchmarks.multiple_choice.scoring:estimated")

    def plan(self, request: SuiteRequest, say: Say) -> ChoicePlan | TaskPlan:
        """Make the plan of a suite (with `vary`, of `prompt_variants`), or of lm-eval's tasks; see `resolve_suite`."""
        from evalkit.benchmarks.lm_eval.plan import plan_tasks
        from evalkit.benchmarks.lm_eval.tasks import with_task_names
        from evalkit.benchmarks.multiple_choice.plan import plan_suite, resolve_suite

        if request.vary and request.log_samples:
            raise UsageError("--log-samples writes lm-eval's files, which have one prompt; leave it out, or --vary")
        request = with_task_names(request, say)
        suite = resolve_suite(request, say)
        return plan_tasks(request, say) if suite is None else plan_suite(request, suite, say)

    def shared_rows(self, plan: ChoicePlan) -> list[tuple[int, set[Key]]]:
        return [(part.step, set(map(part.key_of, part.questions))) for part in plan.steps]

    def is_missing(self, plan: ChoicePlan, finished: FinishedRows) -> bool:
        return any(part.is_missing(finished) for part in plan.parts)

    def finish(self, plan: ChoicePlan, finished: FinishedRows, writer: RunWriter) -> None:
        import pandas as pd

        from evalkit.benchmarks.lm_eval.log_format import write_lm_eval
        from evalkit.benchmarks.multiple_choice.lm_eval_form import evaluated
        from evalkit.runs.accuracies import summarise_all

        scores = pd.concat([part.scores(finished) for part in plan.parts], ignore_index=True)
        writer.save_table(SCORES, scores)
        if plan.caveats:
            writer.save_manifest(caveats=plan.caveats)
        manifest = writer.manifest
        seconds = dict.fromkeys(plan.suite.tasks, 0.0) | finished.seconds
        by_rule = summarise_all(scores, manifest)
        total, samples = sum(seconds.values()), plan.request.log_samples
        write_lm_eval(writer, evaluated(scores, by_rule, plan.questions, manifest, total, samples))
        if (own := by_rule.get(manifest["rule"])) is not None:
            content = own.to_json()
        else:
            metrics = table_metrics(scores, manifest, manifest["rule"])
            tasks = list(map(outcome_entries, metrics))
            content = {"tasks": tasks, "averages": outcome_averages(manifest, metrics)}
        for task in content["tasks"]:
            task["seconds"] = round(seconds[task["task"]], 3)
        content["rules"] = {rule: results.to_json() for rule, results in by_rule.items()}
        content["samples"] = samples
        writer.save_results(content)

    def options_outside_id(self, options: Mapping[str, Any]) -> frozenset[str]:
        """See `Benchmark`. Every rule reads the same scores, except those of unconditional continuations."""
        from evalkit.runs.rules import find_rule

        names = super().options_outside_id(options) | {"device", "log_samples"}
        used = {options.get("rule"), load_suite(str(options["suite"])).rule} - {None}
        try:
            rules = [find_rule(str(rule)) for rule in used]
            alone = any("unconditional" in rule.segments or rule.by_task for rule in rules)
            return names if alone else names | {"rule"}
        except EvalkitError:  # an unknown rule
            return names

    def stored_averages(self, run: Run, rule: str | None = None) -> list[dict[str, Any]]:
        if rule is None:
            return super().stored_averages(run)
        if outcome_of(rule) is None:
            return list(stored_results(self.comparable(run), rule)["averages"])
        return outcome_averages(run.manifest, table_metrics(run.scores, run.manifest, rule))

    def suites(self) -> dict[str, str]:
        return {suite.name: suite.description for suite in shipped_suites().values()}

    def averages(self) -> dict[str, dict[str, tuple[str, ...]]]:
        suites = shipped_suites().values()
        return {suite.name: {**suite.groups, "Average": suite.tasks} for suite in suites}

    def label(self, run: Run, task: str) -> Label:
        return label_of(task, run.manifest)

    def dataset(self, run: Run, task: str) -> HubSplit | None:
        return dataset_of(task)
