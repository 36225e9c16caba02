"""Suites of multiple-choice tasks: every choice of a document is scored, and a rule predicts one of them.

In: a `SuiteRequest`. Out: a run folder with

scores.parquet   the score table, which every rule reads
results.json     accuracies under every rule
lm_eval/         the same in lm-eval's format
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from evalkit.benchmarks.base import Benchmark, ListedSuite, Plan, lazy
from evalkit.benchmarks.choices import outcome_averages, outcome_entries, stored_results, table_metrics
from evalkit.benchmarks.results import OfSuiteTasks, of_run
from evalkit.display import Say
from evalkit.errors import EvalkitError, UsageError
from evalkit.inputs.validated import Stored
from evalkit.runs.continuous import outcome_of
from evalkit.runs.folder import LM_EVAL, SCORES, StoredAverage, StoredTask, StoredValue
from evalkit.suites.suites import load_suite, shipped_suites

if TYPE_CHECKING:
    from evalkit.benchmarks.request import SuiteRequest
    from evalkit.benchmarks.suite_plan import ChoicePlan
    from evalkit.runs.journal import FinishedRows
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


class FinishedChoices(OfSuiteTasks):
    metrics = of_run("evalkit.benchmarks.choices:stored_metrics")
    comparable = of_run("evalkit.benchmarks.choices:ComparableChoices")
    views = of_run("evalkit.benchmarks.multiple_choice.views:choice_views")
    report = of_run("evalkit.benchmarks.choices_report:choices_report")

    def averages(self, rule: str | None = None) -> list[dict[str, Any]]:
        if rule is None:
            return super().averages()
        if outcome_of(rule) is None:
            return list(stored_results(self.comparable(), rule)["averages"])
        return outcome_averages(self.run.manifest, table_metrics(self.run.scores, self.run.manifest, rule))


class MultipleChoice(Benchmark):
    """Benchmark of suites of multiple-choice tasks."""

    kind = "multiple_choice"
    read = FinishedChoices
    results_form: ClassVar[type[Stored]] = _ChoiceResults

    request = lazy("evalkit.benchmarks.request:SuiteRequest")

    def plan(self, request: SuiteRequest, say: Say) -> Plan:
        """Make the plan of a suite (with `vary`, of `prompt_variants`), or of lm-eval's tasks; see `resolve_suite`."""
        from evalkit.benchmarks.registry import benchmark
        from evalkit.benchmarks.suite_plan import plan_suite, resolve_suite
        from evalkit.suites.lm_eval_tasks import matching_tasks

        if request.vary and request.log_samples:
            raise UsageError("--log-samples writes lm-eval's files, which have one prompt; leave it out, or --vary")
        request = replace(request, tasks=matching_tasks(request.tasks, request.suite, request.include_path, say))
        suite = resolve_suite(request, say)
        if suite is None:
            return benchmark(LM_EVAL).plan(request, say)
        return plan_suite(request, suite, say)

    def finish(self, plan: ChoicePlan, finished: FinishedRows, writer: RunWriter) -> None:
        import pandas as pd

        from evalkit.benchmarks.lm_eval_files import write_lm_eval
        from evalkit.benchmarks.multiple_choice.lm_eval_form import evaluated
        from evalkit.runs.accuracies import summarise_all

        scores = pd.concat([part.scores(finished) for part in plan.parts], ignore_index=True)
        writer.save_table(SCORES, scores)
        writer.save_caveats(plan.caveats)
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

    def suites(self) -> dict[str, ListedSuite]:
        suites = shipped_suites().items()
        return {name: ListedSuite(suite.description, suite.averages) for name, suite in suites}
