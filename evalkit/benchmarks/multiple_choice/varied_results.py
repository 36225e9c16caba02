"""Results under several prompts: a prompt is a column of the score table, and the spread a group-by.

In: a run's score table with a column `prompt`, or its results.json. Out: accuracies with their spread over prompts,
metrics, and documents for paired comparison, where a rule's name alone stands for each document's mean over prompts,
and "RULE@PROMPT" for the rule under one prompt. Metrics are read without pandas.

A task's prompts are those that it has rows for: orders of the options only where its prompts list them. A document's
score is the share of its prompts under which it is right. The standard error is that of the mean of this score over
documents, which are sampled. Prompts are a fixed set: their standard deviation describes the set and is no error of the
mean. With few documents a part of that deviation is chance. So it is reported beside the one to expect if no prompt is
easier than another, when each document's answers could be exchanged between its prompts: the root of the sum over
documents of the variance over prompts, divided by n (the permutations within blocks of Cochran's Q test).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AliasChoices, Field

from evalkit.benchmarks.choices import ComparableChoices, outcome_metrics, stored_results
from evalkit.benchmarks.outcomes import Comparable, Measure, Metric
from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.escape import part_name
from evalkit.inputs.validated import Stored
from evalkit.runs.continuous import document_outcomes, outcome_of, with_default_rule
from evalkit.runs.folder import SCORES, Run
from evalkit.runs.rules import decide, find_rule
from evalkit.runs.scales import ACCURACY, CORRECT, FRACTION
from evalkit.runs.score_table import CLUSTER, COLUMNS, PROMPT, weighted
from evalkit.stats.estimates import Floats, error_of_average

if TYPE_CHECKING:
    import pandas as pd

_DOCUMENT = ["task", "subtask", "doc_id"]


class PromptAccuracy(Stored):
    """Accuracy under one prompt, a fraction, with its standard error over documents."""

    prompt: str
    value: float
    stderr: float | None


class VariedAccuracy(Stored):
    """Accuracy of a task, of a subject or of an average under several prompts."""

    name: str = Field(validation_alias=AliasChoices("name", "task"))
    n: int | None
    metric: str = ACCURACY
    unit: str = FRACTION
    higher_is_better: bool = True
    value: float
    """Mean over documents and prompts."""
    stderr: float | None
    """Standard error of that mean over documents; the prompts are fixed."""
    spread: float | None
    """Standard deviation of the accuracies over prompts; None with one prompt."""
    by_chance: float | None
    """The standard deviation that is expected if no prompt is easier than another."""
    prompts: list[PromptAccuracy]
    """The prompts of the task. Of an average: every prompt, the run's own in place of one that a task lacks."""
    chance: float | None = None
    truncated: int | None = None
    """Documents whose context was truncated under some prompt."""


class VariedResults(Stored):
    rule: str
    tasks: list[VariedAccuracy]
    averages: list[VariedAccuracy]
    """The suite's groups, then "Average" over all tasks."""

    @property
    def average(self) -> VariedAccuracy:
        return self.averages[-1]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, for results.json."""
        content = self.model_dump()
        return content | {"tasks": [{"task": task.pop("name")} | task for task in content["tasks"]]}


class VariedResultsFile(VariedResults):
    rules: dict[str, VariedResults]


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
        # A document is truncated if its context is under some prompt
        starts = table.assign(truncated=table.groupby(_DOCUMENT)["truncated"].transform("max")).query("choice == 0")
        by_prompt = [rows.reset_index(drop=True) for _, rows in starts.groupby(PROMPT, sort=False)]
        self.documents = by_prompt[0][[*_DOCUMENT, "choices", "truncated", CLUSTER]]
        self.has = np.stack([self.documents["task"].isin(rows["task"].unique()).to_numpy() for rows in by_prompt])
        """[prompts, documents] whether the document has the prompt."""
        for prompt, rows, has in zip(self.prompts, by_prompt, self.has, strict=True):
            if not np.array_equal(rows[_DOCUMENT].to_numpy(), self.documents.loc[has, _DOCUMENT].to_numpy()):
                raise RunError(f"the table of prompts is damaged: prompt {prompt} has other documents than the first")
        self.graded = lru_cache(maxsize=None)(self._graded)

    @property
    def rules(self) -> list[str]:
        from evalkit.runs.accuracies import available_rules

        first, *others = (available_rules(rows) for rows in self.by_prompt.values())
        return [rule for rule in first if all(rule in other for other in others)]

    def prompts_of(self, task: str) -> list[str]:
        is_task = (self.documents["task"] == task).to_numpy()
        return [name for name, has in zip(self.prompts, self.has, strict=True) if has[is_task].any()]

    def _graded(self, rule: str) -> Floats:
        """Return [prompts, documents] 1 where the rule predicts the gold choice, else 0; NaN without that prompt.

        Of a continuous outcome (`runs.continuous.outcome_of`), its values.
        """
        graded, outcome = np.full(self.has.shape, np.nan), outcome_of(rule)
        for row, has, rows in zip(graded, self.has, self.by_prompt.values(), strict=True):
            row[has] = (
                decide(rows, find_rule(rule))["correct"].to_numpy(float)
                if outcome is None
                else document_outcomes(rows, *outcome)
            )
        return graded


def prompt_tables(run: Run) -> PromptTables:
    columns = [*COLUMNS, PROMPT]
    return PromptTables(run.table(SCORES, columns)[columns])


def varied_results(tables: PromptTables, manifest: Mapping[str, Any], rule: str) -> VariedResults:
    """Apply a rule to the scores under every prompt; the manifest's "groups" name the averages."""
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
    """Return the accuracy over the chosen documents, [documents], which have the same prompts."""
    from evalkit.runs.accuracies import error_over_documents

    n, has = int(chosen.sum()), tables.has[:, chosen].any(axis=1)
    documents = tables.documents[chosen]
    answers = weighted(np.ascontiguousarray(tables.graded(rule)[has][:, chosen]), documents)
    score = answers.mean(axis=0)
    guessed = weighted(1 / documents["choices"].to_numpy(float), documents)
    prompts = [
        PromptAccuracy(prompt=prompt, value=float(of.mean()), stderr=error_over_documents(of, documents))
        for prompt, of in zip(np.array(tables.prompts)[has].tolist(), answers, strict=True)
    ]
    return VariedAccuracy(
        name=name,
        n=n,
        value=float(score.mean()),
        stderr=error_over_documents(score, documents),
        spread=_deviation(prompts),
        by_chance=expected_deviation(answers),
        prompts=prompts,
        chance=float(guessed.mean()),
        truncated=int((documents["truncated"] > 0).sum()),
    )


def expected_deviation(answers: Floats) -> float | None:
    """Return the root of the expected variance over prompts if each document's answers are exchangeable.

    `answers` is [prompts, documents]: 1 (right) or 0, times a document's weight in a mean over subjects (`weighted`).
    """
    count, n = answers.shape
    return float(np.sqrt(answers.var(axis=0, ddof=1).sum())) / n if count > 1 else None


def _average(tables: PromptTables, name: str, tasks: Sequence[VariedAccuracy], size: int) -> VariedAccuracy:
    """Return the unweighted mean over tasks, which are taken as fixed, and as independent of each other."""
    by_task = [{under.prompt: under for under in task.prompts} for task in tasks]
    prompts = []
    for prompt in tables.prompts:
        if any(prompt in of_task for of_task in by_task):
            under = [of_task.get(prompt, of_task[tables.prompts[0]]) for of_task in by_task]
            stderr = error_of_average([p.stderr for p in under])
            prompts.append(PromptAccuracy(prompt=prompt, value=statistics.fmean(p.value for p in under), stderr=stderr))
    count, variance = len(prompts), 0.0
    for task in tasks if count > 1 else ():
        # Where a task has fewer prompts, its own is repeated: of all pairs, those of two repetitions do not differ
        repeated = count - len(task.prompts) + 1
        variance += (task.by_chance or 0.0) ** 2 * (1 - repeated * (repeated - 1) / (count * (count - 1)))
    return VariedAccuracy(
        name=part_name(name, len(tasks), size),
        n=None,
        value=statistics.fmean(task.value for task in tasks),
        stderr=error_of_average([task.stderr for task in tasks]),
        spread=_deviation(prompts),
        by_chance=float(np.sqrt(variance)) / len(tasks) if count > 1 else None,
        prompts=prompts,
    )


def _deviation(prompts: Sequence[PromptAccuracy]) -> float | None:
    return float(np.std([under.value for under in prompts], ddof=1)) if len(prompts) > 1 else None


class ComparablePrompts(ComparableChoices):
    """Documents of a run under several prompts and, by rule, the share of prompts under which they are right."""

    @cached_property
    def tables(self) -> PromptTables:
        return prompt_tables(self.run)

    @cached_property
    def prompts(self) -> dict[str, dict[str, str]]:
        """Task → prompt → its content hash; an order of the options is its own content."""
        hashes = self.run.manifest["specification"]["prompts"]["templates"]
        return {
            task: {name: hashes.get(name, name) for name in self.tables.prompts_of(task)}
            for task in self.tables.documents["task"].unique()
        }

    @cached_property
    def rules(self) -> Sequence[str]:
        return self.tables.rules

    def results(self, rule: str) -> VariedResults:
        return varied_results(self.tables, self.run.manifest, rule)

    def alternatives(self, rule: str) -> Sequence[str]:
        """Return the mean over prompts, then each prompt."""
        name = rule.partition("@")[0]
        return [name, *(f"{name}@{prompt}" for prompt in self.tables.prompts)]

    def check_alike(self, other: Comparable) -> None:
        """Raise a `UsageError` that names the difference if another run does not have the same prompts."""
        first, second = self.run.folder.name, other.run.folder.name
        if not isinstance(other, ComparablePrompts):
            raise UsageError(f"run {first} has several prompts and run {second} has one; run both with the same --vary")
        for task, own in self.prompts.items():
            if differing := own.items() ^ other.prompts.get(task, own).items():
                raise UsageError(f"task {task}: prompt {min(differing)[0]} of run {first} is not that of run {second}")

    def beside(self, rule: str) -> str | None:
        """Return bits per byte under the same prompts."""
        name, at, prompt = rule.partition("@")
        outcome = super().beside(name)
        return outcome and f"{outcome}{at}{prompt}"

    def measure(self, rule: str) -> Measure:
        """Return the measure of a rule or an outcome: of each document its mean over prompts, or under one prompt."""
        name, prompt = self._parsed(rule)
        under_one = super().measure(name)
        about = f", under prompt {prompt}" if prompt else ", of each document the mean over its prompts"
        what = under_one.name if outcome_of(name) else f"accuracy by {name}"
        return replace(
            under_one,
            scale=under_one.scale.named(f"{what} over prompts"),
            words=under_one.words + about,
            graded=under_one.graded or not prompt,
            alternatives="prompt",
        )

    def _grade(self, rule: str) -> Floats:
        name, prompt = self._parsed(rule)
        graded = self.tables.graded(name)
        values: Floats = np.nanmean(graded, axis=0)
        if prompt:
            # The run's own prompt where a task lacks this one: an order changes no prompt without a list of options
            number = self.tables.prompts.index(prompt)
            values = np.where(self.tables.has[number], graded[number], graded[0])
        return values

    def _parsed(self, rule: str) -> tuple[str, str]:
        """Return rule and prompt, empty for the mean over prompts."""
        name, _, prompt = rule.partition("@")
        name = str(with_default_rule(name, self.run.manifest["rule"]))
        if name not in self.rules and outcome_of(name) is None:
            raise UnknownNameError(f"rule of run {self.run.folder.name}", name, self.rules)
        if prompt and prompt not in self.tables.prompts:
            raise UnknownNameError(f"prompt of run {self.run.folder.name}", prompt, self.tables.prompts)
        return name, prompt


def varied_metrics(run: Run, rule: str | None = None) -> list[Metric]:
    """Return the metrics of the tasks, or the means of a continuous outcome over prompts and documents.

    Arguments and errors: see `multiple_choice.outcomes.stored_results`.
    """
    comparable = ComparablePrompts(run)
    if rule is not None and outcome_of(rule) is not None:
        return outcome_metrics(comparable, rule)
    metrics = []
    for result in stored_results(comparable, rule)["tasks"]:
        about = {name: result[name] for name in ("task", "n", "chance")}
        about["official"] = run.manifest["documents"][result["task"]]["official"]
        under = {f"accuracy under prompt {prompt['prompt']}": prompt for prompt in result["prompts"]}
        for name, value in {"mean accuracy over prompts": result, **under}.items():
            numbers = {"value": value["value"], "stderr": value["stderr"], "truncated": value.get("truncated")}
            metrics.append(Metric(CORRECT.named(name), **about, **numbers))
    return metrics
