"""What two sides are to each other, and so what a difference between them says.

Two runs are two checkpoints, or one checkpoint asked in two ways; several seeds of each side are two architectures.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from evalkit.benchmarks.alike import differences
from evalkit.comparison.sides import Side
from evalkit.comparison.steps import steps_of
from evalkit.errors import UsageError
from evalkit.runs.folder import Run
from evalkit.runs.traits import Trait, checkpoint_of, model_differences, same_checkpoint


@dataclass(frozen=True)
class Claim:
    """What the comparison is about."""

    kind: str
    """checkpoints, setting, architectures, trainings, or mixed."""
    sentence: str
    settings: Mapping[str, tuple[str, str]]
    """What else than the checkpoint differs: what it is → (A's, B's); several values where a side's own runs differ."""


def claim_of(a: Side, b: Side) -> Claim:
    """What a difference between two sides says.

    Raises:
        UsageError: the runs of one side differ in more than their checkpoint.
    """
    for side in (a, b):
        _refuse_same_checkpoint(side)
        refuse_mixture(side)
    differing = _differing(a, b)
    kind, sentence = _sentence(a, b, differing)
    return Claim(kind, sentence, differing)


def refuse_mixture(side: Side, besides: Collection[str] = ()) -> None:
    """Raise a `UsageError` where the runs of a side are not of one model, or were not measured alike.

    Args:
        side: of one run or several.
        besides: traits in which they may differ.
    """
    first = side.runs[0]
    for run in side.runs[1:]:
        if models := model_differences(first, run):
            raise UsageError(
                f"group {side.name} mixes models: those of {first.folder.name} and {run.folder.name} differ in "
                f"{', '.join(models)}; a group is several seeds or checkpoints of one"
            )
        for one, other in _asked_otherwise(first, run):
            if one.refused and one.name not in besides:
                raise UsageError(
                    f"group {side.name} mixes runs that differ in {one.name} ({first.folder.name}: {one.value}, "
                    f"{run.folder.name}: {other.value}); a group is several seeds or checkpoints, asked in one way"
                )


def _refuse_same_checkpoint(side: Side) -> None:
    """Seeds are different checkpoints."""
    if pair := same_checkpoint(side.runs):
        first, second = (run.folder.name for run in pair)
        raise UsageError(
            f"group {side.name}: runs {first} and {second} are of the same checkpoint, so they are not two seeds; "
            "leave one out"
        )


def _asked_otherwise(a: Run, b: Run) -> list[tuple[Trait, Trait]]:
    """What differs beside the checkpoint; the rule is one for all runs of a comparison."""
    return [pair for pair in differences(a, b) if pair[0].name != "rule"]


def _differing(a: Side, b: Side) -> dict[str, tuple[str, str]]:
    """What differs between any two runs → (A's values, B's)."""
    first = a.runs[0]
    found: dict[str, str] = {}
    by_run: dict[Path, dict[str, str]] = {}
    for run in (*a.runs, *b.runs):
        pairs = _asked_otherwise(first, run)
        found |= {mine.name: mine.value for mine, _ in pairs}
        by_run[run.folder] = {theirs.name: theirs.value for _, theirs in pairs}

    def values(side: Side, name: str) -> str:
        return ", ".join(dict.fromkeys(by_run[run.folder].get(name, found[name]) for run in side.runs))

    return {name: (values(a, name), values(b, name)) for name in found}


def _sentence(a: Side, b: Side, differing: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    weights = [{checkpoint_of(run) for run in side.runs} for side in (a, b)]
    if weights[0] == weights[1]:
        what = " and ".join(differing) or "where it lies"
        return "setting", f"Both are the same checkpoint, so the claim is about {what}, not about models."
    counts = (len(a.runs), len(b.runs))
    few = "; with two seeds of a side its spread is hardly known, so only large differences show" if 2 in counts else ""
    if counts == (1, 1):
        return "checkpoints", (
            "The claim is about these two checkpoints: another seed of either could score otherwise, and one run "
            "cannot tell how far."
        )
    if 1 in counts:
        alone, many = (a, b) if counts[0] == 1 else (b, a)
        return "mixed", (
            f"The claim is about {many.name} ({len(many.runs)} runs) and this one checkpoint of {alone.name}; nothing "
            f"can be claimed of other seeds of {alone.name}, since one run does not show how far they lie apart{few}."
        )
    if any(_one_training(side) for side in (a, b)):
        return "trainings", (
            f"The runs of a side are checkpoints of one training ({counts[0]} and {counts[1]}), so the claim is about "
            "these trainings: their spread stands in for that between seeds, and is likely smaller."
        )
    return "architectures", (
        f"The claim is about two architectures: the errors hold for other seeds ({counts[0]} and {counts[1]} here) and "
        f"other documents{few}."
    )


def _one_training(side: Side) -> bool:
    """Whether the runs' names say that they are steps of one training."""
    steps = steps_of(side.runs)
    return steps is not None and len(set(steps)) == len(steps) > 1
