"""Results of a finished run under several prompts, as they are stored: metrics, and documents for paired comparison.

A rule's name alone stands for each document's mean over prompts; "RULE@PROMPT" is the rule under one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import AliasChoices, Field

from evalkit.benchmarks.multiple_choice.outcomes import ComparableChoices, outcome_metrics, stored_results
from evalkit.benchmarks.outcomes import Comparable, Measure, Metric
from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import Run
from evalkit.runs.score_table import MARGIN, outcome_of
from evalkit.stats.estimates import Floats

if TYPE_CHECKING:
    from evalkit.benchmarks.prompt_variants.results import PromptTables


class PromptAccuracy(Stored):
    """Accuracy under one prompt, a fraction."""

    prompt: str
    accuracy: float
    stderr: float | None
    """Standard error over documents."""


class VariedAccuracy(Stored):
    """Accuracy of a task, of a subject or of an average under several prompts. Accuracies are fractions."""

    name: str = Field(validation_alias=AliasChoices("name", "task"))
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
    prompts: list[PromptAccuracy]
    """The prompts of the task. Of an average: every prompt, the run's own in place of one that a task lacks."""
    chance: float | None = None
    truncated: int | None = None
    """Documents whose context was truncated under some prompt."""


class VariedResults(Stored):
    """Results of a run under one rule."""

    rule: str
    tasks: list[VariedAccuracy]
    averages: list[VariedAccuracy]
    """The suite's groups, then "Average" over all tasks."""

    @property
    def average(self) -> VariedAccuracy:
        """The mean over all tasks."""
        return self.averages[-1]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, for results.json."""
        content = self.model_dump()
        return content | {"tasks": [{"task": task.pop("name")} | task for task in content["tasks"]]}


class VariedResultsFile(Stored):
    """Schema of results.json, beyond the keys that every benchmark has."""

    tasks: list[VariedAccuracy]
    averages: list[VariedAccuracy]
    rules: dict[str, VariedResults]


class ComparablePrompts(ComparableChoices):
    """Documents of a run under several prompts and, by rule, the share of prompts under which they are right."""

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
        """The rules that every prompt has scores for."""
        return self.tables.rules

    def results(self, rule: str) -> VariedResults:
        """Return the results under a rule."""
        from evalkit.benchmarks.prompt_variants.results import varied_results

        return varied_results(self.tables, self.run.manifest, rule)

    def alternatives(self, rule: str) -> Sequence[str]:
        """Return the mean over prompts, then each prompt."""
        name = rule.partition("@")[0]
        return [name, *(f"{name}@{prompt}" for prompt in self.tables.prompts)]

    def check_alike(self, other: Comparable) -> None:
        """Raise a `UsageError` that names the difference if another run does not have the same prompts."""
        names = self.run.folder.name, other.run.folder.name
        if not isinstance(other, ComparablePrompts):
            raise UsageError(
                f"run {names[0]} has several prompts and run {names[1]} has one; run both with the same --vary"
            )
        for task, own in self.prompts.items():
            others = other.prompts.get(task, own)
            for prompt in (*own, *others):
                if own.get(prompt) == others.get(prompt):
                    continue
                has, lacks = names if prompt in own else names[::-1]
                what = f"run {has} has prompt {prompt}, which run {lacks} does not have"
                if prompt in own and prompt in others:
                    what = f"prompt {prompt} of run {has} has another text than that of run {lacks}"
                raise UsageError(f"task {task}: {what}; run both with the same --vary and --template")

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
            words=under_one.words + about,
            graded=under_one.graded or not prompt,
            name=f"{what} over prompts",
            alternatives="prompt",
        )

    def _grade(self, rule: str) -> Floats:
        name, prompt = self._parsed(rule)
        return self.tables.under(name, prompt) if prompt else self.tables.mean(name)

    @cached_property
    def tables(self) -> PromptTables:
        """The score tables by prompt."""
        from evalkit.benchmarks.prompt_variants.results import prompt_tables  # needs pandas

        return prompt_tables(self.run)

    def _parsed(self, rule: str) -> tuple[str, str]:
        """Return rule and prompt, empty for the mean over prompts."""
        name, _, prompt = rule.partition("@")
        if name == MARGIN:
            name = f"{MARGIN}:{self.run.manifest['rule']}"
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
            truncated = value.get("truncated")
            metrics.append(
                Metric(**about, name=name, value=value["accuracy"], stderr=value["stderr"], truncated=truncated)
            )
    return metrics
