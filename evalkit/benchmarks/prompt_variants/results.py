"""Accuracies under several prompts: a prompt is a column of the score table, and the spread a group-by.

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
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from evalkit.benchmarks.prompt_variants import PROMPT, PROMPTS
from evalkit.benchmarks.prompt_variants.outcomes import PromptAccuracy, VariedAccuracy, VariedResults
from evalkit.errors import RunError
from evalkit.runs.accuracies import available_rules, document_outcomes
from evalkit.runs.rules import decide, find_rule
from evalkit.runs.score_table import CLUSTER, ScoreRow, outcome_of
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
        base, *_ = self.by_prompt.values()
        self.documents = base.loc[base["choice"] == 0, [*_DOCUMENT, "choices", CLUSTER]].reset_index(drop=True)
        tasks = [rows["task"].unique() for rows in self.by_prompt.values()]
        self.has = np.stack([self.documents["task"].isin(of_prompt).to_numpy() for of_prompt in tasks])
        """[prompts, documents] whether the document has the prompt."""
        for (prompt, rows), has in zip(self.by_prompt.items(), self.has, strict=True):
            own = rows.loc[rows["choice"] == 0, _DOCUMENT].to_numpy()
            if not np.array_equal(own, self.documents.loc[has, _DOCUMENT].to_numpy()):
                raise RunError(f"the table of prompts is damaged: prompt {prompt} has other documents than the first")
        self.graded = lru_cache(maxsize=None)(self._graded)

    @property
    def rules(self) -> list[str]:
        """The rules that every prompt has the scores for."""
        first, *others = (available_rules(rows) for rows in self.by_prompt.values())
        return [rule for rule in first if all(rule in other for other in others)]

    def prompts_of(self, task: str) -> list[str]:
        """Return the prompts of a task."""
        is_task = (self.documents["task"] == task).to_numpy()
        return [name for name, has in zip(self.prompts, self.has, strict=True) if has[is_task].any()]

    def _graded(self, rule: str) -> Floats:
        """Return [prompts, documents] 1 where the rule predicts the gold choice, else 0; NaN without that prompt.

        Of a continuous outcome (`runs.score_table.outcome_of`), its values.
        """
        graded, outcome = np.full(self.has.shape, np.nan), outcome_of(rule)
        for row, has, rows in zip(graded, self.has, self.by_prompt.values(), strict=True):
            row[has] = (
                decide(rows, find_rule(rule))["correct"].to_numpy(float)
                if outcome is None
                else document_outcomes(rows, outcome[0], find_rule(outcome[1] or "acc"))
            )
        return graded

    def mean(self, rule: str) -> Floats:
        """Return [documents] shares of the document's prompts under which the rule predicts the gold choice."""
        shares: Floats = np.nanmean(self.graded(rule), axis=0)
        return shares

    def under(self, rule: str, prompt: str) -> Floats:
        """Return [documents] of `graded` under a prompt; the run's own prompt stands in where a task lacks it.

        An order of the options changes no prompt without a list of them, so that the prompt is the same.
        """
        number, graded = self.prompts.index(prompt), self.graded(rule)
        values: Floats = np.where(self.has[number], graded[number], graded[0])
        return values

    def is_truncated(self) -> NDArray[np.bool_]:
        """Return [documents] whether the context is truncated under some prompt."""
        truncated = np.zeros(len(self.documents), bool)
        for has, rows in zip(self.has, self.by_prompt.values(), strict=True):
            starts = np.flatnonzero(rows["choice"].to_numpy() == 0)
            truncated[has] |= np.maximum.reduceat(rows["truncated"].to_numpy(), starts) > 0
        return truncated


def prompt_tables(run: Run) -> PromptTables:
    """Return the tables of a finished run.

    Raises:
        RunError: the file is damaged.
    """
    columns = [*ScoreRow._fields, CLUSTER, PROMPT]
    return PromptTables(run.table(PROMPTS, columns)[columns])


def varied_results(tables: PromptTables, manifest: Mapping[str, Any], rule: str) -> VariedResults:
    """Apply a rule to the scores under every prompt; the manifest's "groups" name the averages.

    Raises:
        UsageError: there is no such rule, or a prompt has no scores for it.
    """
    groups: dict[str, list[str]] = manifest["groups"]
    sizes: dict[str, int] = manifest["group_sizes"]
    column = tables.documents["task"].to_numpy()
    tasks = {task: _accuracy(tables, task, rule, column == task) for members in groups.values() for task in members}
    averages = [_average(tables, name, [tasks[task] for task in groups[name]], sizes[name]) for name in groups]
    if len(groups) > 1:
        averages.append(_average(tables, "Average", [*tasks.values()], sum(sizes.values())))
    return VariedResults(rule=rule, tasks=[*tasks.values()], averages=averages)


def subject_accuracies(tables: PromptTables, task: str, rule: str) -> list[VariedAccuracy]:
    """Return the accuracies of a task's subjects; none of a task without subjects."""
    is_task, subtask = tables.documents["task"] == task, tables.documents["subtask"]
    if list(subjects := subtask[is_task].unique()) == [task]:
        return []
    return [_accuracy(tables, str(name), rule, (is_task & (subtask == name)).to_numpy()) for name in subjects]


def _accuracy(tables: PromptTables, name: str, rule: str, chosen: NDArray[np.bool_]) -> VariedAccuracy:
    """Return the accuracy over some of the documents, [documents], which have the same prompts."""
    n, has = int(chosen.sum()), tables.has[:, chosen].any(axis=1)
    answers = np.ascontiguousarray(tables.graded(rule)[has][:, chosen])
    score = answers.mean(axis=0)
    prompts = []
    for prompt, share in zip(np.array(tables.prompts)[has].tolist(), answers.mean(axis=1).tolist(), strict=True):
        prompts.append(PromptAccuracy(prompt=prompt, accuracy=share, stderr=error_of_share(share, n)))
    return VariedAccuracy(
        name=name,
        n=n,
        accuracy=float(score.mean()),
        stderr=error_of_mean(score),
        spread=_deviation(prompts),
        by_chance=expected_deviation(answers),
        prompts=prompts,
        chance=float((1 / tables.documents["choices"].to_numpy()[chosen]).mean()),
        truncated=int(tables.is_truncated()[chosen].sum()),
    )


def expected_deviation(answers: Floats) -> float | None:
    """Return the root of the expected variance over prompts if each document's answers are exchangeable.

    `answers` is [prompts, documents]: 1 (right) or 0.
    """
    count, n = answers.shape
    return float(np.sqrt(answers.var(axis=0, ddof=1).sum())) / n if count > 1 else None


def _average(tables: PromptTables, name: str, tasks: Sequence[VariedAccuracy], size: int) -> VariedAccuracy:
    """Return the unweighted mean over tasks, which are taken as fixed."""
    by_task = [{under.prompt: under for under in task.prompts} for task in tasks]
    prompts = []
    for prompt in tables.prompts:
        if any(prompt in of_task for of_task in by_task):
            under = [of_task.get(prompt, of_task[tables.prompts[0]]) for of_task in by_task]
            accuracy, stderr = statistics.fmean(p.accuracy for p in under), error_of_average([p.stderr for p in under])
            prompts.append(PromptAccuracy(prompt=prompt, accuracy=accuracy, stderr=stderr))
    return VariedAccuracy(
        name=name if len(tasks) == size else f"{name} ({len(tasks)} of {size})",
        n=None,
        accuracy=statistics.fmean(task.accuracy for task in tasks),
        stderr=error_of_average([task.stderr for task in tasks]),
        spread=_deviation(prompts),
        by_chance=_average_by_chance(tasks, len(prompts)),
        prompts=prompts,
    )


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


def _deviation(prompts: Sequence[PromptAccuracy]) -> float | None:
    return float(np.std([under.accuracy for under in prompts], ddof=1)) if len(prompts) > 1 else None
