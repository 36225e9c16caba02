"""Results of a finished run under several prompts: metrics, and documents for paired comparison.

A rule's name alone stands for each document's mean over prompts; "RULE@PROMPT" is the rule under one prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.multiple_choice.outcomes import ComparableChoices, outcome_metrics
from evalkit.benchmarks.outcomes import Comparable, Measure, Metric
from evalkit.errors import UnknownNameError, UsageError
from evalkit.runs.continuous import MARGIN, outcome_of
from evalkit.runs.folder import Run
from evalkit.stats.estimates import Floats

if TYPE_CHECKING:
    from evalkit.benchmarks.prompt_variants.results import PromptTables

MEAN = "mean accuracy over prompts"


class ComparablePrompts(ComparableChoices):
    """Documents of a run under several prompts and, by rule, the share of prompts under which they are right."""

    @cached_property
    def prompts(self) -> dict[str, dict[str, str]]:
        """Task → prompt → its content hash; an order of the options is its own content."""
        hashes = self.run.manifest["specification"]["prompts"]["templates"]
        return {
            task: {name: hashes.get(name, name) for name in self._tables.prompts_of(task)}
            for task in self._tables.documents["task"].unique()
        }

    @cached_property
    def rules(self) -> Sequence[str]:
        """The rules that every prompt has scores for."""
        return self._tables.rules

    def alternatives(self, rule: str) -> Sequence[str]:
        """Return the mean over prompts, then each prompt."""
        name = rule.partition("@")[0]
        return [name, *(f"{name}@{prompt}" for prompt in self._tables.prompts)]

    def check_alike(self, other: Comparable) -> None:
        """Raise a `UsageError` that names the difference if another run does not have the same prompts."""
        mine, theirs = self.run.folder.name, other.run.folder.name
        if not isinstance(other, ComparablePrompts):
            raise UsageError(f"run {mine} has several prompts and run {theirs} has one; run both with the same --vary")
        for task, own in self.prompts.items():
            others = other.prompts.get(task, own)
            for name in (*own, *others):
                if own.get(name) == others.get(name):
                    continue
                has, lacks = (mine, theirs) if name in own else (theirs, mine)
                what = f"run {has} has prompt {name}, which run {lacks} does not have"
                if name in own and name in others:
                    what = f"prompt {name} of run {mine} has another text than that of run {theirs}"
                raise UsageError(f"task {task}: {what}; run both with the same --vary and --template")

    def beside(self, rule: str) -> str | None:
        """Return bits per byte under the same prompts."""
        name, at, prompt = rule.partition("@")
        found = super().beside(name)
        return found and f"{found}{at}{prompt}"

    def measure(self, rule: str) -> Measure:
        """Return the measure of a rule or an outcome: of each document its mean over prompts, or under one prompt."""
        name, prompt = self._parsed(rule)
        one = super().measure(name)
        about = f", under prompt {prompt}" if prompt else ", of each document the mean over its prompts"
        what = one.name if outcome_of(name) else f"accuracy by {name}"
        return replace(
            one,
            words=one.words + about,
            graded=one.graded or not prompt,
            name=f"{what} over prompts",
            alternatives="prompt",
        )

    def _grade(self, rule: str) -> Floats:
        name, prompt = self._parsed(rule)
        return self._tables.under(name, prompt) if prompt else self._tables.mean(name)

    @cached_property
    def _tables(self) -> PromptTables:
        from evalkit.benchmarks.prompt_variants.results import (
            prompt_tables,  # needs pandas, which stored results do not
        )

        return prompt_tables(self.run)

    def _parsed(self, rule: str) -> tuple[str, str]:
        """Return rule and prompt, empty for the mean over prompts."""
        name, _, prompt = rule.partition("@")
        if name == MARGIN:
            name = f"{MARGIN}:{self.run.manifest['rule']}"
        if name not in self.rules and outcome_of(name) is None:
            raise UnknownNameError(f"rule of run {self.run.folder.name}", name, self.rules)
        if prompt and prompt not in self._tables.prompts:
            raise UnknownNameError(f"prompt of run {self.run.folder.name}", prompt, self._tables.prompts)
        return name, prompt


def varied_metrics(run: Run, rule: str | None = None) -> list[Metric]:
    """Return the metrics of the tasks, or the means of a continuous outcome over prompts and documents.

    Arguments and errors: see `stored_varied`.
    """
    if rule is not None and outcome_of(rule) is not None:
        return outcome_metrics(ComparablePrompts(run), rule)
    return [metric for task in stored_varied(run, rule)["tasks"] for metric in _metrics(run, task)]


def stored_varied(run: Run, rule: str | None) -> dict[str, Any]:
    """Return what results.json stores under a rule, "tasks" and "averages"; None: the run's own rule.

    A rule that a package added after the run was finished is not stored; it is applied to the score tables.

    Raises:
        UnknownNameError: a prompt has no scores for that rule.
        RunError: results.json or the score table is damaged.
    """
    name, by_rule = rule or run.manifest["rule"], run.stored["rules"]
    if name in by_rule:
        return dict(by_rule[name])
    from evalkit.benchmarks.prompt_variants.results import prompt_tables, varied_results  # needs pandas

    tables = prompt_tables(run)
    if name not in tables.rules:
        raise UnknownNameError(f"rule of run {run.folder}", name, tables.rules)
    return varied_results(tables, run.manifest, name).to_json()


def _metrics(run: Run, found: dict[str, Any]) -> Iterator[Metric]:
    about = {
        "task": found["task"],
        "n": found["n"],
        "chance": found["chance"],
        "official": run.manifest["documents"][found["task"]]["official"],
    }
    yield Metric(**about, name=MEAN, value=found["accuracy"], stderr=found["stderr"], truncated=found["truncated"])
    for one in found["prompts"]:
        name = f"accuracy under prompt {one['prompt']}"
        yield Metric(**about, name=name, value=one["accuracy"], stderr=one["stderr"])
