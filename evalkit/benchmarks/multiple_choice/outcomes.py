"""Results of a finished multiple-choice run: its score table and results.json → metrics, and right or wrong answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.outcomes import Comparable, Measure, Metric
from evalkit.errors import UnknownNameError, UsageError
from evalkit.runs.folder import Run
from evalkit.scores.table import CLUSTER

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.stats.estimates import Floats


class ComparableChoices(Comparable):
    """Documents of a multiple-choice run and, by rule, which of them are right."""

    checked = ("gold", "choices")

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._graded = lru_cache(maxsize=None)(self._grade)
        self.groups = run.manifest["groups"]
        self.group_sizes = run.manifest["group_sizes"]

    @cached_property
    def documents(self) -> pd.DataFrame:
        """One row for each document, in the score table's order."""
        scores = self.run.scores
        columns = ["task", "subtask", "doc_id", "choices", "gold", CLUSTER]
        return scores.loc[scores["choice"] == 0, columns].reset_index(drop=True)

    @cached_property
    def rules(self) -> Sequence[str]:
        """The rules that the run has scores for."""
        from evalkit.scores.results import available_rules

        return available_rules(self.run.scores)

    def by_rule(self, rule: str) -> Floats:
        """Return [documents] 1 where the rule predicts the gold choice, else 0."""
        return self._graded(rule)

    def measure(self, rule: str) -> Measure:
        """Return accuracy under the rule."""
        from evalkit.scores.rules import find_rule

        return Measure(f"rule {rule}: {find_rule(rule).description}; accuracy in %", False, "accuracy")

    def _grade(self, rule: str) -> Floats:
        from evalkit.scores.rules import choose, find_rule

        try:
            chosen = choose(self.run.scores, find_rule(rule)).prediction
        except UsageError as error:
            raise UsageError(f"run {self.run.folder.name}: {error}") from error
        right: Floats = (chosen == self.documents["gold"].to_numpy()).astype("float64")
        return right


def stored_metrics(run: Run, rule: str | None) -> list[Metric]:
    """Return the accuracies of the tasks. Arguments and errors: see `stored_results`."""
    return [_metric(run, task) for task in stored_results(run, rule)["tasks"]]


def stored_results(run: Run, rule: str | None) -> dict[str, Any]:
    """Return what results.json stores under a rule, "tasks" and "averages"; None: the run's own rule.

    A rule that a package added after the run was finished is not stored; it is applied to the score table.

    Raises:
        UnknownNameError: the run has no scores for that rule.
        RunError: results.json or the score table is damaged.
    """
    name, by_rule = rule or run.manifest["rule"], run.stored.get("rules", {})
    if name in by_rule:
        return dict(by_rule[name])
    from evalkit.scores.results import available_rules  # needs pandas, which stored results do not

    if name not in available_rules(run.scores):
        raise UnknownNameError(f"rule of run {run.folder}", name, by_rule)
    return run.results(name).to_json()


def _metric(run: Run, found: dict[str, Any]) -> Metric:
    return Metric(
        task=found["task"],
        name="accuracy",
        n=found["n"],
        value=found["accuracy"],
        stderr=found["stderr"],
        chance=found["chance"],
        truncated=found.get("truncated"),
        official=run.manifest["documents"][found["task"]]["official"],
    )
