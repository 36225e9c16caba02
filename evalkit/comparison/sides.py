"""What is compared: sides, each a name and the runs that stand for it.

In: what the command line was given. Out: `Side`s of finished runs, no run twice, with names that tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.comparison.steps import step_in
from evalkit.errors import UsageError
from evalkit.reporting.escape import printable
from evalkit.runs.finding import find_run
from evalkit.runs.folder import Run


@dataclass(frozen=True)
class Side:
    """One of the things compared."""

    name: str
    runs: tuple[Run, ...]
    """One run, or several seeds or checkpoints of the same thing."""


def find_sides(given: Sequence[str], groups: Sequence[str], root: Path) -> list[Side]:
    """The sides that were named, in their order: single runs, then groups.

    Args:
        given: what runs are called (`finding.find_run`), each a side.
        groups: "NAME=run,run,…", each a side.
        root: where bare names are looked for.

    Raises:
        UsageError: fewer than two sides, a group that cannot be read, a run or a name that comes twice.
    """
    named = [_read_group(group) for group in groups]
    singles = [find_run(text, root) for text in given]
    return sides_of(singles, [(name, [find_run(run, root) for run in runs]) for name, runs in named])


def sides_of(singles: Sequence[Run], groups: Sequence[tuple[str, Sequence[Run]]]) -> list[Side]:
    """The sides that finished runs are, in their order: single ones, then groups by name.

    Raises:
        UsageError: fewer than two sides, a group without runs, a run or a name that comes twice.
    """
    if empty := [name for name, runs in groups if not runs]:
        raise UsageError(f"group {empty[0]} has no runs; name one or more, or leave it out")
    sides = [Side(name, (run,)) for name, run in zip(names(singles), singles, strict=True)]
    sides += [Side(name, tuple(runs)) for name, runs in groups]
    if len(sides) < 2:
        raise UsageError(
            f"there is nothing to compare {sides[0].name} with: name two runs or more, or two groups"
            if sides
            else "name two runs or more: evalkit compare RUN_A RUN_B (evalkit ls runs lists them)"
        )
    refuse_twice(sides)
    return sides


def find_trainings(given: Sequence[str], groups: Sequence[str], root: Path) -> list[Side]:
    """The trainings whose checkpoints were named: all single runs are one, and each group is one.

    Raises:
        UsageError: no run is named, or one twice.
    """
    found = [Side(name, tuple(find_run(run, root) for run in runs)) for name, runs in map(_read_group, groups)]
    if singles := tuple(find_run(text, root) for text in given):
        found = [Side(_training_name(singles), singles), *found]
    if not found:
        raise UsageError("name the runs of a training's checkpoints: evalkit compare --curve RUN RUN RUN")
    refuse_twice(found)
    return found


def _training_name(runs: Sequence[Run]) -> str:
    """What the models' names have in common before their step, if they have."""
    folders = {str(run.manifest["model"]).rstrip("/").rpartition("/")[0].rpartition("/")[2] for run in runs}
    return printable(folders.pop()) if len(folders) == 1 and "" not in folders else "training"


def refuse_twice(sides: Sequence[Side]) -> None:
    """Raise where a run or a name stands for two things."""
    seen: dict[str, str] = {}
    for side in sides:
        for run in side.runs:
            if (identity := run.manifest["id"]) in seen:
                raise UsageError(
                    f"run {run.folder.name} is named twice (in {seen[identity]} and in {side.name}): it cannot differ "
                    "from itself; leave one out"
                )
            seen[identity] = side.name
    for place, side in enumerate(sides):
        if side.name in [other.name for other in sides[:place]]:
            raise UsageError(f"two sides are called '{side.name}'; give the groups names of their own")


def names(runs: Sequence[Run]) -> list[str]:
    """What to call each run: its model, and where models are called alike, what else tells them apart."""
    models = [_model_name(run) for run in runs]
    settings = [_settings(run) for run in runs]
    found = []
    for place, model in enumerate(models):
        alike = [settings[other] for other in range(len(runs)) if models[other] == model]
        telling = [
            str(value) for key, value in settings[place].items() if len({one.get(key) for one in alike}) > 1 and value
        ]
        found.append(" ".join([model, *telling]))
    found = [printable(name) for name in found]
    return [
        name if found.count(name) == 1 else f"{name} {run.manifest['id']}"
        for name, run in zip(found, runs, strict=True)
    ]


def _model_name(run: Run) -> str:
    """The last part of a folder or hub name, with the one before where it only counts steps."""
    parts = [part for part in str(run.manifest["model"]).rstrip("/").split("/") if part]
    if len(parts) > 1 and step_in(parts[-1]) is not None:
        return "/".join(parts[-2:])
    return parts[-1] if parts else run.folder.name


def _settings(run: Run) -> dict[str, Any]:
    specification = run.manifest["specification"]
    shots, limit = specification.get("num_fewshot"), specification.get("limit")
    return {
        "revision": run.manifest.get("revision"),
        "template": run.template,
        "dtype": specification.get("dtype"),
        "shots": f"{shots}-shot" if shots else None,
        "limit": f"limit {limit}" if limit else "all documents",
    }


def _read_group(text: str) -> tuple[str, list[str]]:
    name, sign, listed = text.partition("=")
    runs = [part.strip() for part in listed.split(",") if part.strip()]
    if not (sign and name.strip() and runs):
        raise UsageError(f"--group {text}: write it as NAME=RUN,RUN,…")
    return printable(name.strip()), runs
