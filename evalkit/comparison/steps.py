"""Training step of a run.

In: a run. Out: the step, from its checkpoint's revision, trainer_state.json or name; None if none has it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from evalkit.errors import CheckpointError
from evalkit.inputs.reading import MOST_TEXT_BYTES, read_json
from evalkit.runs.folder import Run

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
