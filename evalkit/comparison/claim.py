"""The claim that a comparison supports.

In: two sides. Out: a `Claim`. Two runs compare two checkpoints, or one checkpoint under two settings; several seeds of
each side compare two architectures.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from evalkit.benchmarks.alike import differences
from evalkit.comparison.sides import Side, steps_of
from evalkit.errors import UsageError
from evalkit.runs.folder import Run
from evalkit.runs.traits import Trait, checkpoint_of, model_differences, same_checkpoint


@dataclass(frozen=True)
class Claim:
    """Subject of a comparison."""

    kind: str
    """checkpoints, setting, architectures, trainings, or mixed."""
    sentence: str
    settings: Mapping[str, tuple[str, str]]
    """Setting that differs besides the checkpoint → (A's values, B's); several values if a side's own runs differ."""


def claim_of(a: Side, b: Side) -> Claim:
    """Return the claim that a difference between two sides supports.

    Raises:
        UsageError: the runs of one side differ in more than their checkpoint.
    """
    for side in (a, b):
        _check_distinct_checkpoints(side)
        check_uniform(side)
    differing = _differing(a, b)
    kind, sentence = _sentence(a, b, differing)
    return Claim(kind, sentence, differing)


def check_uniform(side: Side, may_differ: Collection[str] = ()) -> None:
    """Raise `UsageError` if the runs of a side have different models or measurement settings.

    Args:
        side: one run or several.
        may_differ: traits in which the runs may differ.
    """
    first = side.runs[0]
    for run in side.runs[1:]:
        if models := model_differences(first, run):
            raise UsageError(
                f"group {side.name} mixes models: those of {first.folder.name} and {run.folder.name} differ in "
                f"{', '.join(models)}; a group must be seeds or checkpoints of one model"
            )
        for one, other in _setting_differences(first, run):
            if one.refused and one.name not in may_differ:
                raise UsageError(
                    f"group {side.name} mixes runs that differ in {one.name} ({first.folder.name}: {one.value}, "
                    f"{run.folder.name}: {other.value}); a group must be seeds or checkpoints under the same settings"
                )


def _check_distinct_checkpoints(side: Side) -> None:
    """Raise `UsageError` if two runs of a side have the same checkpoint: seeds are different checkpoints."""
    if pair := same_checkpoint(side.runs):
        first, second = (run.folder.name for run in pair)
        raise UsageError(
            f"group {side.name}: runs {first} and {second} have the same checkpoint, so they are not two seeds; "
            "remove one"
        )


def _setting_differences(a: Run, b: Run) -> list[tuple[Trait, Trait]]:
    """Return the traits that differ besides the checkpoint; the rule is the same for all runs of a comparison."""
    return [pair for pair in differences(a, b) if pair[0].name != "rule"]


def _differing(a: Side, b: Side) -> dict[str, tuple[str, str]]:
    """Return the settings that differ between any two runs → (A's values, B's)."""
    first = a.runs[0]
    found: dict[str, str] = {}
    by_run: dict[Path, dict[str, str]] = {}
    for run in (*a.runs, *b.runs):
        pairs = _setting_differences(first, run)
        found |= {mine.name: mine.value for mine, _ in pairs}
        by_run[run.folder] = {theirs.name: theirs.value for _, theirs in pairs}

    def values(side: Side, name: str) -> str:
        return ", ".join(dict.fromkeys(by_run[run.folder].get(name, found[name]) for run in side.runs))

    return {name: (values(a, name), values(b, name)) for name in found}


def _sentence(a: Side, b: Side, differing: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    weights = [{checkpoint_of(run) for run in side.runs} for side in (a, b)]
    if weights[0] == weights[1]:
        what = " and ".join(differing) or "its location"
        return "setting", f"Both are the same checkpoint, so the claim is about {what}, not about models."
    counts = (len(a.runs), len(b.runs))
    few = "; with two seeds of a side its spread is hardly known, so only large differences show" if 2 in counts else ""
    if counts == (1, 1):
        return "checkpoints", (
            "The claim is about these two checkpoints: another seed of either could score differently, and one run "
            "does not show by how much."
        )
    if 1 in counts:
        alone, many = (a, b) if counts[0] == 1 else (b, a)
        return "mixed", (
            f"The claim is about {many.name} ({len(many.runs)} runs) and this one checkpoint of {alone.name}; it does "
            f"not extend to other seeds of {alone.name}, since one run does not show their spread{few}."
        )
    if any(_one_training(side) for side in (a, b)):
        return "trainings", (
            f"The runs of a side are checkpoints of one training ({counts[0]} and {counts[1]}), so the claim is about "
            "these trainings: their spread replaces the spread between seeds, and is likely smaller."
        )
    return "architectures", (
        f"The claim is about two architectures: the errors cover other seeds ({counts[0]} and {counts[1]} here) and "
        f"other documents{few}."
    )


def _one_training(side: Side) -> bool:
    """Return whether the runs' names have distinct training steps."""
    steps = steps_of(side.runs)
    return steps is not None and len(set(steps)) == len(steps) > 1
