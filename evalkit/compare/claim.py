"""What two sides are to each other, and so what a difference between them says.

Two runs are two checkpoints, or one checkpoint asked in two ways; several seeds of each side are two architectures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evalkit.compare.sides import Side
from evalkit.compare.steps import steps_of
from evalkit.errors import UsageError
from evalkit.runs import Run


@dataclass(frozen=True)
class Claim:
    """What the comparison is about."""

    kind: str
    """checkpoints, setting, architectures, trainings, or mixed."""
    sentence: str
    settings: Mapping[str, tuple[str, str]]
    """What else than the checkpoint differs: what it is → (A's, B's)."""


def claim_of(a: Side, b: Side) -> Claim:
    """What a difference between two sides says.

    Raises:
        UsageError: the runs of one side differ in more than their checkpoint.
    """
    for side in (a, b):
        _refuse_mixture(side)
    first, second = settings(a.runs[0]), settings(b.runs[0])
    differing = {key: (first[key], second[key]) for key in first if first[key] != second[key]}
    if "template" in differing:  # of which the text is no news
        differing.pop("template's text", None)
    kind, sentence = _sentence(a, b, differing)
    return Claim(kind, sentence, differing)


def settings(run: Run) -> dict[str, str]:
    """What determines a run's scores beside its checkpoint and its documents, as people call it."""
    specification: Mapping[str, Any] = run.manifest["specification"]
    found = {
        "template": run.template,
        "template's text": str(specification.get("template", ""))[:12],
        "device": str(specification.get("device")),  # only LongBench keeps it: a last bit may change a text
        "solved examples": str(specification.get("num_fewshot") or 0),
        "examples' content": " ".join(text[:12] for text in specification.get("examples", {}).values()),
        "dtype": str(specification.get("dtype")),
        "attention": str(specification.get("attention")),
        "context extension": str(specification.get("context_extension")),
        "limit": str(specification.get("limit") or "none"),
        "scoring version": str(specification.get("scoring")),
        **{f"{name} version": text for name, text in specification.get("versions", {}).items()},
    }
    return found


def _refuse_mixture(side: Side) -> None:
    """Seeds are different checkpoints of one thing, asked in one way."""
    first = settings(side.runs[0])
    seen: dict[str, str] = {}
    for run in side.runs:
        if (weights := _weights(run)) in seen:
            raise UsageError(
                f"group {side.name}: runs {seen[weights]} and {run.folder.name} are of the same checkpoint, so they "
                "are not two seeds; leave one out"
            )
        seen[weights] = run.folder.name
    for run in side.runs[1:]:
        for key, value in settings(run).items():
            if value != first[key] and not key.endswith(" version"):
                raise UsageError(
                    f"group {side.name} mixes runs that differ in {key} ({side.runs[0].folder.name}: {first[key]}, "
                    f"{run.folder.name}: {value}); a group is several seeds or checkpoints, asked in one way"
                )


def _sentence(a: Side, b: Side, differing: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    weights = [{_weights(run) for run in side.runs} for side in (a, b)]
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


def _weights(run: Run) -> str:
    return str(run.manifest["specification"]["checkpoint"])


def _one_training(side: Side) -> bool:
    """Whether the runs' names say that they are steps of one training."""
    steps = steps_of(side.runs)
    return steps is not None and len(set(steps)) == len(steps) > 1
