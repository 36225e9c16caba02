"""Accuracies with n and standard errors, from a score table under a rule; without torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from evalkit.errors import UsageError
from evalkit.escape import brief, counted, part_name
from evalkit.reporting.numbers import MEANS
from evalkit.runs.rules import Floats, all_rules, decide, find_rule, single_answers, why_unusable
from evalkit.runs.scales import ACCURACY, FRACTION
from evalkit.runs.score_table import sources_of, weighted
from evalkit.stats.estimates import error_of_average, known_error, mean


@dataclass(frozen=True)
class TaskResult:
    """Accuracy of one task, or of one subject of it, under one rule."""

    task: str
    n: int
    value: float
    stderr: float | None
    """Standard error of the mean over documents, see `error_over_documents`; None for a single source."""
    chance: float
    """Expected accuracy of a uniform guess: the mean of 1 / choices."""
    ties: int
    """Documents with several choices of the highest score; the first is the prediction, as in lm-eval."""
    truncated: int | None
    """Documents whose context was truncated to fit the context window; None if unknown, as of an imported log."""
    metric: str = ACCURACY
    unit: str = FRACTION
    higher_is_better: bool = True

    @property
    def centred(self) -> float:
        """Accuracy above chance, as a share of the largest possible: 0 for guessing, 1 if all are right."""
        return (self.value - self.chance) / (1 - self.chance)

    def __repr__(self) -> str:
        shown = MEANS.with_error(self.value, self.stderr)
        return brief(self, self.task, shown, f"chance {self.chance:.3f}", f"n={self.n}")


@dataclass(frozen=True)
class Average:
    """Unweighted mean of accuracies over tasks; its error treats the tasks as fixed."""

    name: str
    """Name of the group; with "2 of 3" where tasks are missing, since it is then not the suite's average."""
    value: float
    stderr: float | None
    centred: float
    """Mean of the tasks' accuracies, each centred on its chance (`TaskResult.centred`)."""
    centred_stderr: float | None
    metric: str = ACCURACY
    unit: str = FRACTION
    higher_is_better: bool = True

    def __repr__(self) -> str:
        return brief(self, self.name, MEANS.with_error(self.value, self.stderr))


@dataclass(frozen=True)
class Results:
    """Results of a run under one rule."""

    rule: str
    tasks: tuple[TaskResult, ...]
    averages: tuple[Average, ...]
    """The suite's groups, then "Average" over all tasks."""
    subtasks: dict[str, tuple[TaskResult, ...]]
    """Task → its subjects, for tasks that have any."""

    def __repr__(self) -> str:
        average = MEANS.with_error(self.average.value, self.average.stderr)
        return brief(self, self.rule, counted(len(self.tasks), "task"), f"average {average}")

    @property
    def average(self) -> Average:
        """The mean over all tasks."""
        return self.averages[-1]

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each task and each average, by name."""
        averages = [{"task": average.name, **asdict(average)} for average in self.averages]
        return pd.DataFrame([*map(asdict, self.tasks), *averages]).drop(columns="name").set_index("task")

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html(float_format="{:.3f}".format, na_rep=""))

    def to_json(self) -> dict[str, Any]:
        """Return plain data, for results.json."""
        return asdict(self)


def summarise(scores: pd.DataFrame, manifest: Mapping[str, Any], rule: str) -> Results:
    """Apply a rule to a score table; the manifest's "groups" name the averages. Tasks without choices are left out."""
    single, chosen = single_answers(scores), with_choices(scores)
    if single and not len(chosen):
        raise UsageError(why_unusable(find_rule(rule), scores))
    decisions = decide(chosen, find_rule(rule))
    given: dict[str, list[str]] = manifest["groups"]
    groups = {name: [task for task in tasks if task not in single] for name, tasks in given.items()}
    groups = {name: tasks for name, tasks in groups.items() if tasks}
    order = [task for tasks in groups.values() for task in tasks]
    by_task = {str(task): rows for task, rows in decisions.groupby("task", sort=False)}
    tasks = {task: _result(task, by_task[task]) for task in order}
    sizes = {name: manifest["group_sizes"][name] - sum(task in single for task in given[name]) for name in groups}
    averages = [average_of(name, [tasks[t] for t in members], sizes[name]) for name, members in groups.items()]
    if len(groups) > 1:
        averages.append(average_of("Average", list(tasks.values()), sum(sizes.values())))
    subtasks = {
        task: tuple(_result(str(name), part) for name, part in rows.groupby("subtask", sort=False))
        for task, rows in by_task.items()
        if (rows["subtask"] != task).any()
    }
    return Results(rule, tuple(tasks.values()), tuple(averages), subtasks)


def summarise_all(scores: pd.DataFrame, manifest: Mapping[str, Any]) -> dict[str, Results]:
    """Return results under every rule that the score table's tasks with choices support, by the rule's name."""
    chosen = with_choices(scores)
    return {rule: summarise(scores, manifest, rule) for rule in available_rules(chosen)} if len(chosen) else {}


def available_rules(scores: pd.DataFrame) -> list[str]:
    """Return the names of the rules that can be applied to a score table."""
    return [rule.name for rule in all_rules() if why_unusable(rule, scores) is None]


def with_choices(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a score table without tasks whose documents have one gold answer."""
    return scores[~scores["task"].isin(single)] if (single := single_answers(scores)) else scores


def rule_beside(rules: Collection[str]) -> str | None:
    """Return the rule of the accuracies beside a run's own outcome, of those that its tasks with choices support."""
    return next((rule for rule in ("olmes", "olmo_core", "acc") if rule in rules), None)


def better_forms(results: Results, forms: Mapping[str, Sequence[str]]) -> list[tuple[str, TaskResult]]:
    """Return each task's name, and the result of the form in which the model is more often right (OLMES).

    `forms`: name → the tasks that are its forms; a name without a result is left out.
    """
    by_task = {result.task: result for result in results.tasks}
    scored = {name: [by_task[task] for task in tasks if task in by_task] for name, tasks in forms.items()}
    return [(name, max(of, key=lambda result: result.value)) for name, of in scored.items() if of]


def _result(name: str, decisions: pd.DataFrame) -> TaskResult:
    correct = weighted(decisions["correct"].to_numpy(float), decisions)
    guessed = weighted(1 / decisions["choices"].to_numpy(float), decisions)
    return TaskResult(
        task=name,
        n=len(decisions),
        value=float(correct.mean()),
        stderr=error_over_documents(correct, decisions),
        chance=float(guessed.mean()),
        ties=int(decisions["tie"].sum()),
        truncated=None if decisions["truncated"].isna().any() else int((decisions["truncated"] > 0).sum()),
    )


def error_over_documents(values: Floats, documents: pd.DataFrame) -> float | None:
    """Return the standard error of the mean of [n] values, by sources and subjects, as in comparisons; None if unknown.

    `documents` has their subtask, doc_id and cluster. Where no source has two documents and there is one subject, it is
    that of the sample variance, as lm-eval's.
    """
    return known_error(mean(values, *sources_of(documents)).stderr)


def average_of(name: str, tasks: Sequence[TaskResult], size: int) -> Average:
    count = len(tasks)
    return Average(
        name=part_name(name, count, size),
        value=sum(task.value for task in tasks) / count,
        stderr=error_of_average([task.stderr for task in tasks]),
        centred=sum(task.centred for task in tasks) / count,
        centred_stderr=error_of_average(
            [None if task.stderr is None else task.stderr / (1 - task.chance) for task in tasks]
        ),
    )
