"""Accuracies under several prompts: the spread over prompts beside the standard error over documents.

In: `PromptTables` and a run's manifest. Out: `VariedResults` under a rule. No torch.

A document's score is the share of its prompts under which it is right; its mean over documents is the mean accuracy
over prompts. The standard error is that of this mean over documents, which are sampled. Prompts are a fixed set: their
standard deviation describes the set and is no error of the mean.

With few documents a part of that deviation is chance. So it is reported beside the one to expect if no prompt is easier
than another, when each document's answers could be exchanged between its prompts: the root of the sum over documents of
the variance over prompts, divided by n (the permutations within blocks of Cochran's Q test).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from evalkit.benchmarks.prompt_variants.tables import PromptTables
from evalkit.escape import brief, with_error
from evalkit.stats.estimates import Floats, error_of_average, error_of_mean, error_of_share


@dataclass(frozen=True)
class PromptAccuracy:
    """Accuracy under one prompt, a fraction."""

    prompt: str
    accuracy: float
    stderr: float | None
    """Standard error over documents."""


@dataclass(frozen=True)
class VariedAccuracy:
    """Accuracy of a task, of a subject or of an average under several prompts. Accuracies are fractions."""

    name: str
    n: int | None
    """Documents; None for an average."""
    accuracy: float
    """Mean over documents and prompts."""
    stderr: float | None
    """Standard error of that mean over documents; the prompts are fixed."""
    spread: float | None
    """Standard deviation of the accuracies over prompts; None with one prompt."""
    by_chance: float | None
    """The standard deviation that is expected if no prompt is easier than another."""
    prompts: tuple[PromptAccuracy, ...]
    """The prompts of the task. Of an average: every prompt, the run's own in place of one that a task lacks."""
    chance: float | None = None
    truncated: int | None = None
    """Documents whose context was truncated under some prompt."""

    def __repr__(self) -> str:
        return brief(self, self.name, with_error(self.accuracy, self.stderr), f"{len(self.prompts)} prompts")

    @property
    def lowest(self) -> PromptAccuracy:
        """The prompt of the lowest accuracy, the first of several."""
        return min(self.prompts, key=lambda one: one.accuracy)

    @property
    def highest(self) -> PromptAccuracy:
        """The prompt of the highest accuracy, the first of several."""
        return max(self.prompts, key=lambda one: one.accuracy)


@dataclass(frozen=True)
class VariedResults:
    """Results of a run under one rule."""

    rule: str
    tasks: tuple[VariedAccuracy, ...]
    averages: tuple[VariedAccuracy, ...]
    """The suite's groups, then "Average" over all tasks."""

    @property
    def average(self) -> VariedAccuracy:
        """The mean over all tasks."""
        return self.averages[-1]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, for results.json."""
        tasks = [{"task": one.name} | _content(one) for one in self.tasks]
        averages = [{"name": one.name} | _content(one) for one in self.averages]
        return {"rule": self.rule, "tasks": tasks, "averages": averages}


def varied_results(tables: PromptTables, manifest: Mapping[str, Any], rule: str) -> VariedResults:
    """Apply a rule to the scores under every prompt.

    Args:
        tables: of the run.
        manifest: the run's; its "groups" name the averages.
        rule: a rule's name.

    Raises:
        UsageError: there is no such rule, or a prompt has no scores for it.
    """
    groups: dict[str, list[str]] = manifest["groups"]
    sizes: dict[str, int] = manifest["group_sizes"]
    tasks = {task: task_accuracy(tables, task, rule) for members in groups.values() for task in members}
    averages = [_average(tables, name, [tasks[task] for task in groups[name]], sizes[name]) for name in groups]
    if len(groups) > 1:
        averages.append(_average(tables, "Average", [*tasks.values()], sum(sizes.values())))
    return VariedResults(rule, tuple(tasks.values()), tuple(averages))


def subject_accuracies(tables: PromptTables, task: str, rule: str) -> list[VariedAccuracy]:
    """Return the accuracies of a task's subjects; none of a task without subjects."""
    documents = tables.documents
    subjects = documents.loc[documents["task"] == task, "subtask"].unique()
    if list(subjects) == [task]:
        return []
    return [task_accuracy(tables, task, rule, str(subject)) for subject in subjects]


def task_accuracy(tables: PromptTables, task: str, rule: str, subject: str | None = None) -> VariedAccuracy:
    """Return the accuracy of a task, or of one of its subjects."""
    documents = tables.documents
    own = (documents["task"] == task).to_numpy()
    if subject is not None:
        own = own & (documents["subtask"] == subject).to_numpy()
    graded, n = tables.graded(rule), int(own.sum())
    prompts = tuple(_of_prompt(name, float(graded[name][own].mean()), n) for name in tables.prompts_of(task))
    score = tables.mean(rule)[own]
    answers = np.stack([graded[one.prompt][own] for one in prompts])
    return VariedAccuracy(
        name=subject or task,
        n=n,
        accuracy=float(score.mean()),
        stderr=error_of_mean(score),
        spread=_deviation(prompts),
        by_chance=expected_deviation(answers),
        prompts=prompts,
        chance=float((1 / documents["choices"].to_numpy()[own]).mean()),
        truncated=tables.truncated(own),
    )


def expected_deviation(answers: Floats) -> float | None:
    """Return the root of the expected variance over prompts if each document's answers are exchangeable."""
    count, n = answers.shape
    return float(np.sqrt(answers.var(axis=0, ddof=1).sum())) / n if count > 1 else None


def _average_by_chance(tasks: Sequence[VariedAccuracy], count: int) -> float | None:
    """Return the expected deviation of an average under `count` prompts; tasks are independent.

    Where a task has fewer, its own prompt is repeated: of all pairs of prompts, those of two repetitions do not differ.
    """
    if count < 2:
        return None
    total = 0.0
    for task in tasks:
        repeated = count - len(task.prompts) + 1
        total += (task.by_chance or 0.0) ** 2 * (1 - repeated * (repeated - 1) / (count * (count - 1)))
    return float(np.sqrt(total)) / len(tasks)


def _of_prompt(name: str, accuracy: float, n: int) -> PromptAccuracy:
    return PromptAccuracy(name, accuracy, error_of_share(accuracy, n))


def _average(tables: PromptTables, name: str, tasks: Sequence[VariedAccuracy], size: int) -> VariedAccuracy:
    """Return the unweighted mean over tasks, which are taken as fixed."""
    by_task = [{one.prompt: one for one in task.prompts} for task in tasks]
    prompts = []
    for prompt in tables.prompts:
        if any(prompt in found for found in by_task):
            found = [found.get(prompt, found[tables.prompts[0]]) for found in by_task]
            accuracy = statistics.fmean(one.accuracy for one in found)
            prompts.append(PromptAccuracy(prompt, accuracy, error_of_average([one.stderr for one in found])))
    return VariedAccuracy(
        name=name if len(tasks) == size else f"{name} ({len(tasks)} of {size})",
        n=None,
        accuracy=statistics.fmean(one.accuracy for one in tasks),
        stderr=error_of_average([one.stderr for one in tasks]),
        spread=_deviation(prompts),
        by_chance=_average_by_chance(tasks, len(prompts)),
        prompts=tuple(prompts),
    )


def _deviation(prompts: Sequence[PromptAccuracy]) -> float | None:
    return float(np.std([one.accuracy for one in prompts], ddof=1)) if len(prompts) > 1 else None


def _content(one: VariedAccuracy) -> dict[str, Any]:
    return {name: value for name, value in asdict(one).items() if name != "name"}
