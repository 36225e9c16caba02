"""Results of a finished multiple-choice run: its score table and results.json → metrics, and documents' outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.outcomes import Comparable, Measure, Metric
from evalkit.data.requests import request_tasks
from evalkit.errors import UnknownNameError, UsageError
from evalkit.escape import part_name
from evalkit.runs.continuous import (
    BITS_PER_BYTE,
    OUTCOMES,
    ContinuousOutcome,
    document_outcomes,
    outcome_of,
    with_default_rule,
)
from evalkit.runs.folder import Run
from evalkit.runs.scales import CORRECT
from evalkit.runs.score_table import CLUSTER, weighted
from evalkit.runs.traits import is_imported
from evalkit.stats.estimates import error_of_average

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.stats.estimates import Floats


class ComparableChoices(Comparable):
    """Documents of a multiple-choice run and, by rule, which of them are right; and their continuous outcomes.

    Wherever a rule is an argument, it may be the key of an outcome (`runs.continuous.outcome_of`).
    """

    checked = ("gold", "choices")

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._graded = lru_cache(maxsize=None)(self._grade)
        self.groups = run.manifest["groups"]
        self.group_sizes = run.manifest["group_sizes"]

    @cached_property
    def documents(self) -> pd.DataFrame:
        scores = self.run.scores
        columns = ["task", "subtask", "doc_id", "choices", "gold", CLUSTER]
        return scores.loc[scores["choice"] == 0, columns].reset_index(drop=True)

    @cached_property
    def rules(self) -> Sequence[str]:
        from evalkit.runs.accuracies import available_rules

        return available_rules(self.run.scores)

    def alternatives(self, rule: str) -> Sequence[str]:
        from evalkit.runs.rules import distinct

        return distinct(super().alternatives(rule), rule)

    def results(self, rule: str) -> Any:
        return self.run.results(rule)

    def beside(self, rule: str) -> str | None:
        """Return bits per byte, which does not depend on the tokenizer's units; None for a log that lacks lengths."""
        if (
            outcome_of(rule) is not None
            or not self.rules
            or (is_imported(self.run.manifest) and self.run.scores["bytes"].isna().any())
        ):
            return None
        return BITS_PER_BYTE

    def of_letters(self, key: str) -> frozenset[str]:
        """See `Comparable`. Bits per byte of one-byte answers are those of a letter among all tokens."""
        outcome_and_rule = outcome_of(key.partition("@")[0])
        if outcome_and_rule is None or not outcome_and_rule[0].without_letters:
            return frozenset()
        scores, known = self.run.scores, request_tasks()
        longest = scores.loc[scores["choice"] == scores["gold"]].groupby("task")["bytes"].max()
        letters = {str(task) for task in longest.index[longest <= 1]}
        return frozenset(letters | {task for task in map(str, longest.index) if task in known and known[task].letters})

    def by_rule(self, rule: str) -> Floats:
        """Return [documents] 1 where the rule predicts the gold choice, else 0; or the values of an outcome."""
        return self._graded(rule)

    def measure(self, rule: str) -> Measure:
        from evalkit.runs.rules import find_rule

        if outcome_of(rule) is None:
            return Measure(CORRECT, f"rule {rule}: {find_rule(rule).description}; accuracy in %", False)
        return _outcome_measure(rule, self.run.manifest)

    def _grade(self, rule: str) -> Floats:
        from evalkit.runs.rules import choose, find_rule

        scores = self.run.scores
        try:
            if outcome_of(rule) is not None:
                return _outcomes(scores, self.run.manifest, rule)
            chosen = choose(scores, find_rule(rule)).prediction
        except UsageError as error:
            raise UsageError(f"run {self.run.folder.name}: {error}") from error
        right: Floats = (chosen == self.documents["gold"].to_numpy()).astype("float64")
        return right


def stored_metrics(run: Run, rule: str | None = None) -> list[Metric]:
    """Return the accuracies of the tasks, or the means of a continuous outcome; arguments as of `stored_results`."""
    comparable, key = ComparableChoices(run), rule or str(run.manifest["rule"])
    if outcome_of(key) is not None:
        return outcome_metrics(comparable, key)
    metrics = []
    for result in stored_results(comparable, rule)["tasks"]:
        numbers = {name: result[name] for name in ("task", "n", "value", "stderr", "chance")}
        official = run.manifest["documents"][result["task"]]["official"]
        metrics.append(Metric(CORRECT, **numbers, truncated=result.get("truncated"), official=official))
    return metrics


def stored_results(comparable: ComparableChoices, rule: str | None) -> dict[str, Any]:
    """Return what results.json stores under a rule, "tasks" and "averages"; None: the run's own rule.

    A rule that a package added after the run was finished is not stored; it is applied to the score table.

    Raises:
        UnknownNameError: the run has no scores for that rule.
        RunError: results.json or the score table is damaged.
    """
    run = comparable.run
    name, by_rule = rule or run.manifest["rule"], run.stored.get("rules", {})
    if name not in by_rule and name not in comparable.rules:
        raise UnknownNameError(f"rule of run {run.folder}", name, comparable.rules)
    return dict(by_rule[name] if name in by_rule else comparable.results(name).to_json())


def outcome_metrics(comparable: ComparableChoices, key: str) -> list[Metric]:
    """Return the means of a continuous outcome over the documents of each task; `key`: see `outcome_of`.

    Raises:
        UsageError: a document has no such outcome.
    """
    return _means(comparable.run.manifest, comparable.measure(key), comparable.by_rule(key), comparable.documents)


def table_metrics(scores: pd.DataFrame, manifest: Mapping[str, Any], key: str) -> list[Metric]:
    """Return the same from a score table and a manifest, before the run is finished."""
    documents = scores[scores["choice"] == 0]
    return _means(manifest, _outcome_measure(key, manifest), _outcomes(scores, manifest, key), documents)


def _means(manifest: Mapping[str, Any], measure: Measure, values: Floats, documents: pd.DataFrame) -> list[Metric]:
    from evalkit.runs.accuracies import error_over_documents

    metrics = []
    for task in (task for members in manifest["groups"].values() for task in members):
        is_of_task, official = (documents["task"] == task).to_numpy(), manifest["documents"][task]["official"]
        of_task = weighted(values[is_of_task], documents[is_of_task])
        error = error_over_documents(of_task, documents[is_of_task])
        value = float(of_task.mean())
        metrics.append(Metric(measure.scale, task, len(of_task), value, error, official=official))
    return metrics


def _outcome_measure(key: str, manifest: Mapping[str, Any]) -> Measure:
    outcome, of_rule = _outcome(key, manifest)
    name = outcome.scale.name + (f", rule {of_rule}" if outcome.of_rule else "")
    return Measure(
        outcome.scale.named(name),
        f"{name}: {outcome.description}; {outcome.scale.direction}",
        graded=True,
        resolution=outcome.resolution,
        least_documents=outcome.least_documents,
    )


def _outcomes(scores: pd.DataFrame, manifest: Mapping[str, Any], key: str) -> Floats:
    outcome, of_rule = _outcome(key, manifest)
    return document_outcomes(scores, outcome, of_rule)


def _outcome(key: str, manifest: Mapping[str, Any]) -> tuple[ContinuousOutcome, str | None]:
    if (outcome_and_rule := outcome_of(str(with_default_rule(key, str(manifest["rule"]))))) is None:
        raise UnknownNameError("outcome", key, OUTCOMES)
    return outcome_and_rule


def outcome_entries(metric: Metric) -> dict[str, Any]:
    """Return a task's mean of an outcome in the form of results.json."""
    return {"task": metric.task, "n": metric.n} | metric.stored


def outcome_averages(manifest: Mapping[str, Any], metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Return the averages of an outcome over each group of tasks, and over all, in the form of results.json."""
    groups, sizes = manifest["groups"], manifest["group_sizes"]
    named = [(name, tasks, sizes[name]) for name, tasks in groups.items()]
    if len(groups) > 1:
        named.append(("Average", [metric.task for metric in metrics], sum(sizes.values())))
    by_task = {metric.task: metric for metric in metrics}
    averages = []
    for name, tasks, size in named:
        values = [by_task[task].value or 0.0 for task in tasks]
        error = error_of_average([by_task[task].stderr for task in tasks])
        about = {"name": part_name(name, len(tasks), size)}
        averages.append(about | metrics[0].scale.stored(sum(values) / len(values), error))
    return averages
