"""Selection of a study's models: NAME, or NAME@STEP.

In: a name as users write it. Out: a `Selected`: the checkpoints of its seeds, all of one training step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evalkit.errors import UnknownNameError, UsageError
from evalkit.reporting.escape import printable
from evalkit.studies.study import Study, StudyCheckpoint


@dataclass(frozen=True)
class Selected:
    """A model of a study at one step."""

    name: str
    """As printed: intg, or intg@1000 where the step was given."""
    step: int | None
    """Training step; None for a model without steps."""
    checkpoints: tuple[StudyCheckpoint, ...]
    """Its seeds, in order."""

    @property
    def labels(self) -> list[str]:
        """Name of each checkpoint: the model's, with the seed where there are several."""
        several = len(self.checkpoints) > 1
        return [f"{self.name} seed {one.seed}" if several else self.name for one in self.checkpoints]


def select(study: Study, given: str) -> Selected:
    """Return a model by NAME or NAME@STEP; of several steps by default the last one that all of its seeds have.

    Raises:
        UnknownNameError: the study has no such model, or the model no such step.
        UsageError: its seeds have no step in common.
    """
    name, sign, step = given.rpartition("@")
    if given in study.names or name not in study.names or not sign:
        name, step = given, ""
    if name not in study.names:
        raise UnknownNameError(f"checkpoint of study {study.path}", name, study.names)
    members = [one for one in study.checkpoints if one.name == name]
    steps = _common_steps(members)
    if step:
        if step not in map(str, steps):
            if step in {str(one.step) for one in members}:
                raise UsageError(f"study {study.path}: not every seed of {name} has step {step}")
            known = [f"{name}@{one}" for one in steps]
            raise UnknownNameError(f"step of study {study.path}", given, known or [f"{name} (it has no steps)"])
        chosen: int | None = int(step)
    elif members[0].step is None:
        chosen = None
    elif not steps:
        raise UsageError(f"study {study.path}: the seeds of {name} have no training step in common; list such steps")
    else:
        chosen = steps[-1]
    return Selected(printable(given), chosen, tuple(one for one in members if one.step == chosen))


def trainings(study: Study, name: str) -> list[tuple[str, list[StudyCheckpoint]]]:
    """Return (name, checkpoints by step) of each seed of a model that has steps.

    Raises:
        UnknownNameError: the study has no such model.
        UsageError: the model has no steps.
    """
    if name not in study.names:
        raise UnknownNameError(f"checkpoint of study {study.path}", name, study.names)
    members = [one for one in study.checkpoints if one.name == name]
    if members[0].step is None:
        raise UsageError(
            f"study {study.path}: {name} has no training steps, so it has no curve; list the checkpoints of its "
            "training under 'steps'"
        )
    by_seed: dict[int | None, list[StudyCheckpoint]] = {}
    for one in members:
        by_seed.setdefault(one.seed, []).append(one)
    return [(printable(name if seed is None else f"{name} seed {seed}"), found) for seed, found in by_seed.items()]


def _common_steps(members: Sequence[StudyCheckpoint]) -> list[int]:
    """Return the steps that all seeds have, in order."""
    steps: dict[int | None, set[int]] = {}
    for one in members:
        steps.setdefault(one.seed, set()).update(() if one.step is None else (one.step,))
    return sorted(set.intersection(*steps.values()))
