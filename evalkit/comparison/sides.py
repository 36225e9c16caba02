"""Sides of a comparison.

In: references to runs and groups, as on the command line. Out: `Side`s of finished runs with unique names, and no run
twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.errors import CheckpointError, UsageError
from evalkit.escape import printable
from evalkit.inputs.reading import MOST_TEXT_BYTES, read_json
from evalkit.runs.finding import find_run, is_generic
from evalkit.runs.folder import Run
from evalkit.runs.traits import documents_read

_STEP = re.compile(r"(?:global_?step|step|iter(?:ation)?|checkpoint|ckpt)[-_= ]?(\d+)([kKmM]?)(?![0-9a-zA-Z])")
_SCALE = {"": 1, "k": 1_000, "m": 1_000_000}


def step_in(text: str) -> int | None:
    """Return the training step in a name ("step1000", "checkpoint-500", "iter_20k"), the last of several; else None."""
    found = _STEP.findall(text)
    return int(found[-1][0]) * _SCALE[found[-1][1].lower()] if found else None


def step_of(run: Run) -> int | None:
    """Return a run's step, from its checkpoint's revision, trainer_state.json or name; None if none has it."""
    if (step := step_in(str(run.manifest.get("revision") or ""))) is not None:
        return step
    step = step_of_checkpoint(str(run.manifest["model"]))
    return step if step is not None else step_in(run.folder.name)


def step_of_checkpoint(model: str) -> int | None:
    """Return the step of a checkpoint folder or name, from its trainer_state.json or its last part; else None."""
    path = Path(model) / "trainer_state.json"
    try:
        return int(read_json(path, CheckpointError, most=MOST_TEXT_BYTES)["global_step"])
    except (CheckpointError, ValueError, KeyError, TypeError, OverflowError):
        pass  # not a checkpoint of transformers' trainer, or no longer on this machine
    return step_in(model.rstrip("/").rpartition("/")[2])


def steps_of(runs: Sequence[Run]) -> list[int] | None:
    """Return the runs' steps; None if any run has none."""
    steps = [step_of(run) for run in runs]
    return [step for step in steps if step is not None] if None not in steps else None


@dataclass(frozen=True)
class Side:
    """A side of a comparison: a name and its runs."""

    name: str
    runs: tuple[Run, ...]
    """One run, or several seeds or checkpoints of the same thing."""


def find_sides(given: Sequence[str], groups: Sequence[str], root: Path) -> list[Side]:
    """Find the sides of a comparison, in their order: single runs, then groups.

    Args:
        given: references to runs (`finding.find_run`), each a side.
        groups: "NAME=run,run,…", each a side.
        root: folder of runs, in which names are looked up.

    Raises:
        UsageError: fewer than two sides, a malformed group, or a duplicate run or name.
    """
    named = [read_group(group) for group in groups]
    singles = [find_run(text, root) for text in given]
    return sides_of(singles, [(name, [find_run(run, root) for run in runs]) for name, runs in named])


def read_group(text: str) -> tuple[str, list[str]]:
    """Return name and run references of a group, "NAME=run,run,…". Raises `UsageError`."""
    name, sign, listed = text.partition("=")
    runs = [part.strip() for part in listed.split(",") if part.strip()]
    if not (sign and name.strip() and runs):
        raise UsageError(f"--group {text}: write it as NAME=RUN,RUN,…")
    return printable(name.strip()), runs


def sides_of(singles: Sequence[Run], groups: Sequence[tuple[str, Sequence[Run]]]) -> list[Side]:
    """Return the sides of finished runs, in their order: single runs, then groups.

    Raises:
        UsageError: fewer than two sides, a group without runs, or a duplicate run or name.
    """
    sides = named_sides(names(singles), singles, groups)
    if len(sides) < 2:
        raise UsageError(
            f"there is nothing to compare {sides[0].name} with: name two runs or more, or two groups"
            if sides
            else "name two runs or more: evalkit compare RUN_A RUN_B (evalkit ls runs lists them)"
        )
    check_unique(sides)
    return sides


def named_sides(
    single_names: Sequence[str], singles: Sequence[Run], groups: Sequence[tuple[str, Sequence[Run]]]
) -> list[Side]:
    """Return sides in their order: single runs under these names, then groups. Neither names nor runs are checked.

    Raises:
        UsageError: a group without runs.
    """
    if empty := [name for name, runs in groups if not runs]:
        raise UsageError(f"group {empty[0]} has no runs; name one or more, or remove the group")
    sides = [Side(name, (run,)) for name, run in zip(single_names, singles, strict=True)]
    return sides + [Side(name, tuple(runs)) for name, runs in groups]


def find_trainings(given: Sequence[str], groups: Sequence[str], root: Path) -> list[Side]:
    """Find the trainings of a curve: all single runs are one training, and each group is one.

    Raises:
        UsageError: no run is given, or one is given twice.
    """
    found = [Side(name, tuple(find_run(run, root) for run in runs)) for name, runs in map(read_group, groups)]
    if singles := tuple(find_run(text, root) for text in given):
        found = [Side(_training_name(singles), singles), *found]
    if not found:
        raise UsageError("name the runs of a training's checkpoints: evalkit compare --curve RUN RUN RUN")
    check_unique(found)
    return found


def _training_name(runs: Sequence[Run]) -> str:
    """Return the parent folder that the models' names have in common; "training" if they have none."""
    folders = {str(run.manifest["model"]).rstrip("/").rpartition("/")[0].rpartition("/")[2] for run in runs}
    return printable(folders.pop()) if len(folders) == 1 and "" not in folders else "training"


def check_unique(sides: Sequence[Side]) -> None:
    """Raise `UsageError` if a run or a side's name occurs twice."""
    seen: dict[str, str] = {}
    for side in sides:
        for run in side.runs:
            if (identity := run.manifest["id"]) in seen:
                raise UsageError(
                    f"run {run.folder.name} is named twice (in {seen[identity]} and in {side.name}); a run cannot be "
                    "compared with itself; remove one"
                )
            seen[identity] = side.name
    for place, side in enumerate(sides):
        if side.name in [other.name for other in sides[:place]]:
            raise UsageError(f"two sides are called '{side.name}'; give the groups different names")


def names(runs: Sequence[Run]) -> list[str]:
    """Return a unique name for each run: its model, with the settings that distinguish runs of models of that name."""
    models = [_model_name(run) for run in runs]
    settings = [_settings(run) for run in runs]
    found = []
    for place, model in enumerate(models):
        alike = [settings[other] for other in range(len(runs)) if models[other] == model]
        distinguishing = [
            str(value) for key, value in settings[place].items() if len({one.get(key) for one in alike}) > 1 and value
        ]
        found.append(" ".join([model, *distinguishing]))
    found = [printable(name) for name in found]
    return [
        name if found.count(name) == 1 else f"{name} {run.manifest['id']}"
        for name, run in zip(found, runs, strict=True)
    ]


def _model_name(run: Run) -> str:
    """Return the last part of a folder or hub name, with its parent if the last part is a step or a common word."""
    parts = [part for part in str(run.manifest["model"]).rstrip("/").split("/") if part]
    if len(parts) > 1 and (is_generic(parts[-1]) or step_in(parts[-1]) is not None):
        return "/".join(parts[-2:])
    return parts[-1] if parts else run.folder.name


def _settings(run: Run) -> dict[str, Any]:
    specification = run.manifest["specification"]
    shots = specification.get("num_fewshot")
    return {
        "revision": run.manifest.get("revision"),
        "template": run.template,
        "dtype": specification.get("dtype"),
        "shots": f"{shots}-shot" if shots else None,
        "limit": documents_read(specification) or "all documents",
    }
