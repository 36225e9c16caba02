"""Accuracies under several prompts: the spread over prompts beside the standard error over documents.

In: a score table with a column `prompt`, and a run's manifest. Out: `VariedResults` under a rule. No torch.

A task's prompts are those that it has rows for: orders of the options only where its prompts list them. A document's
score is the share of its prompts under which it is right; its mean over documents is the mean accuracy over prompts.
The standard error is that of this mean over documents, which are sampled. Prompts are a fixed set: their standard
deviation describes the set and is no error of the mean.

With few documents a part of that deviation is chance. So it is reported beside the one to expect if no prompt is easier
than another, when each document's answers could be exchanged between its prompts: the root of the sum over documents of
the variance over prompts, divided by n (the permutations within blocks of Cochran's Q test).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from evalkit.benchmarks.prompt_variants import PROMPT, PROMPTS
from evalkit.errors import RunError
from evalkit.escape import brief, with_error
from evalkit.runs.accuracies import available_rules
from evalkit.runs.continuous import document_outcomes, outcome_of
from evalkit.runs.rules import decide, find_rule
from evalkit.runs.score_table import CLUSTER, ScoreRow
from evalkit.stats.estimates import Floats, error_of_average, error_of_mean, error_of_share

if TYPE_CHECKING:
    from evalkit.runs.folder import Run

_DOCUMENT = ["task", "subtask", "doc_id"]


class PromptTables:
    """Score tables of a run by prompt.

    Args:
        table: with the column `PROMPT`; the first prompt is the run's own, which every document has.

    Raises:
        RunError: a prompt lacks documents of a task.
    """

    def __init__(self, table: pd.DataFrame) -> None:
        self.by_prompt = {str(name): rows for name, rows in table.groupby(PROMPT, sort=False)}
        self.prompts = tuple(self.by_prompt)
        base = self.by_prompt[self.prompts[0]]
        self.documents = base.loc[base["choice"] == 0, [*_DOCUMENT, "choices", CLUSTER]].reset_index(drop=True)
        self._places = {name: self._places_of(name, rows) for name, rows in self.by_prompt.items()}
        self.graded = lru_cache(maxsize=None)(self._graded)

    @property
    def rules(self) -> list[str]:
        """The rules that every prompt has the scores for."""
        first, *others = (available_rules(rows) for rows in self.by_prompt.values())
        return [rule for rule in first if all(rule in other for other in others)]

    def prompts_of(self, task: str) -> list[str]:
        """Return the prompts of a task."""
        is_own = (self.documents["task"] == task).to_numpy()
        return [name for name, places in self._places.items() if is_own[places].any()]

    def _graded(self, rule: str) -> dict[str, Floats]:
        """Return prompt → [documents] 1 where the rule predicts the gold choice, else 0; NaN without that prompt.

        Of a continuous outcome (`runs.outcomes.outcome_of`), its values.
        """
        found, outcome = {}, outcome_of(rule)
        for name, rows in self.by_prompt.items():
            found[name] = np.full(len(self.documents), np.nan)
            found[name][self._places[name]] = (
                decide(rows, find_rule(rule))["correct"].to_numpy(float)
                if outcome is None
                else document_outcomes(rows, outcome[0], find_rule(outcome[1] or "acc"))
            )
        return found

    def mean(self, rule: str) -> Floats:
        """Return [documents] shares of the document's prompts under which the rule predicts the gold choice."""
        found: Floats = np.nanmean(np.stack([*self.graded(rule).values()]), axis=0)
        return found

    def under(self, rule: str, prompt: str) -> Floats:
        """Return [documents] of `graded` under a prompt; the run's own prompt stands in where a task lacks it.

        An order of the options changes no prompt without a list of them, so that the prompt is the same.
        """
        graded = self.graded(rule)
        return np.where(np.isnan(graded[prompt]), graded[self.prompts[0]], graded[prompt])

    def truncated(self, chosen: NDArray[np.bool_]) -> int:
        """Return how many of some documents, [documents], have a truncated context under some prompt."""
        cut = np.zeros(len(self.documents), bool)
        for name, rows in self.by_prompt.items():
            starts = np.flatnonzero(rows["choice"].to_numpy() == 0)
            cut[self._places[name]] |= np.maximum.reduceat(rows["truncated"].to_numpy(), starts) > 0
        return int((cut & chosen).sum())

    def _places_of(self, prompt: str, rows: pd.DataFrame) -> NDArray[np.int64]:
        """Return the place among the documents of each of a prompt, which must be all of its tasks."""
        keys = (pd.MultiIndex.from_frame(table[_DOCUMENT]) for table in (self.documents, rows[rows["choice"] == 0]))
        every, own = keys
        places = np.asarray(every.get_indexer(own), np.int64)
        expected = self.documents["task"].isin(rows["task"].unique()).sum()
        if (places < 0).any() or len(np.unique(places)) != expected or len(places) != expected:
            raise RunError(f"the table of prompts is damaged: prompt {prompt} has other documents than the first")
        return places


def prompt_tables(run: Run) -> PromptTables:
    """Return the tables of a finished run.

    Raises:
        RunError: the file is damaged.
    """
    columns = [*ScoreRow._fields, CLUSTER, PROMPT]
    return PromptTables(run.table(PROMPTS, columns)[columns])


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
    def extremes(self) -> tuple[PromptAccuracy, PromptAccuracy]:
        """The prompts of the lowest and of the highest accuracy, the first of several."""
        lowest, highest = (extreme(self.prompts, key=lambda one: one.accuracy) for extreme in (min, max))
        return lowest, highest


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
        tasks = [asdict(one) for one in self.tasks]
        averages = [asdict(one) for one in self.averages]
        return {"rule": self.rule, "tasks": [{"task": one.pop("name")} | one for one in tasks], "averages": averages}


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
    tasks = {task: _task_accuracy(tables, task, rule) for members in groups.values() for task in members}
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
    return [_task_accuracy(tables, task, rule, str(subject)) for subject in subjects]


def _task_accuracy(tables: PromptTables, task: str, rule: str, subject: str | None = None) -> VariedAccuracy:
    """Return the accuracy of a task, or of one of its subjects."""
    documents = tables.documents
    chosen = (documents["task"] == task).to_numpy()
    if subject is not None:
        chosen = chosen & (documents["subtask"] == subject).to_numpy()
    n, score = int(chosen.sum()), tables.mean(rule)[chosen]
    answers = {name: tables.graded(rule)[name][chosen] for name in tables.prompts_of(task)}
    accuracies = {name: float(graded.mean()) for name, graded in answers.items()}
    prompts = tuple(PromptAccuracy(name, share, error_of_share(share, n)) for name, share in accuracies.items())
    return VariedAccuracy(
        name=subject or task,
        n=n,
        accuracy=float(score.mean()),
        stderr=error_of_mean(score),
        spread=_deviation(prompts),
        by_chance=expected_deviation(np.stack([*answers.values()])),
        prompts=prompts,
        chance=float((1 / documents["choices"].to_numpy()[chosen]).mean()),
        truncated=tables.truncated(chosen),
    )


def expected_deviation(answers: Floats) -> float | None:
    """Return the root of the expected variance over prompts if each document's answers are exchangeable.

    Args:
        answers: [prompts, documents] 1 (right) or 0.
    """
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
