"""The folder of a training, and the settings that it was begun with.

A folder holds `initial` (the model before its first step), `checkpoint-N`, `training.csv`, `training.json` (settings
and versions), `runs` (evaluations in the training) and, once the training is finished, `model`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from evalkit.errors import UsageError
from evalkit.inputs.reading import read_json
from evalkit.models.zoo.named import named_model
from evalkit.paths import replace_file
from recipe.settings import Recipe

LOG = "training.csv"
EVALUATIONS = "runs"
_OF_THE_RUN = {
    "model", "text", "tokenizer", "held_out", "log_every", "held_out_every", "held_out_rows", "evaluate", "save_every",
    "keep", "report_to", "micro_batch",
}  # fmt: skip
"""Settings that do not change the weights, and may change at a resumption (`micro_batch`: but for rounding). Text and
tokenizer are recorded by the hash of the packed tokens, the model by its config."""
_RESTORE = "restore it, or remove it if the settings are those that the training was begun with"
_LIBRARIES = ("torch", "transformers", "accelerate", "numpy")


class InUse(UsageError):
    """Another process trains in the folder."""


@dataclass(frozen=True)
class Training:
    """A recipe with a seed and a folder."""

    recipe: Recipe
    seed: int
    output: Path
    data: Path
    """Folder of tokenizer and packed texts, which several trainings share."""

    @property
    def model(self) -> Path:
        """The trained checkpoint; exists once the training is finished."""
        return self.output / "model"

    @property
    def initial(self) -> Path:
        """The model before its first step."""
        return self.output / "initial"

    @property
    def newest(self) -> Path | None:
        """The checkpoint of the latest step."""
        found = checkpoints(self.output)
        return found[-1] if found else None

    @property
    def settings(self) -> Path:
        """The settings that the folder was prepared with."""
        return self.output / "training.json"

    @property
    def lock(self) -> Path:
        """The lock of the process that trains."""
        return self.output / ".lock"

    @property
    def begun(self) -> bool:
        """Whether there is more than preparation, as after a dry run."""
        return self.model.exists() or self.newest is not None or (self.output / LOG).exists()

    @property
    def steps_left(self) -> int:
        """Updates after the newest checkpoint; 0 once the training is finished."""
        if self.model.exists():
            return 0
        return self.recipe.steps - (step_of(self.newest) if self.newest else 0)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the latest last."""
    return sorted((path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the updates of a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def check_settings(training: Training, packed_text: str | None = None) -> None:
    """Compare a training's settings, and its packed text if given, with those in training.json, if there are any.

    Raises:
        UsageError: they are others, or cannot be read.
    """
    if not training.settings.exists():
        return
    before, facts = _recorded(training.settings), _facts(training, packed_text)
    if changed := sorted(key for key in facts if before.get(key) != facts[key]):
        raise UsageError(
            f"{training.output}: was begun with other settings ({', '.join(changed)}); choose another folder"
        )


def record_settings(training: Training, packed_text: str) -> None:
    """Write training.json, or compare with it; before the training's beginning, replace other settings.

    Raises:
        UsageError: the training was begun with other settings.
        InUse: another process is about to begin it.
    """
    try:
        check_settings(training, packed_text)
        if training.settings.exists():
            return
    except UsageError:
        if training.begun:
            raise
    if not training.begun:
        try:
            with FileLock(training.lock, timeout=0):
                shutil.rmtree(training.initial, ignore_errors=True)
        except Timeout:
            raise InUse(f"{training.output}: another process trains here") from None
    facts = {"settings": _facts(training, packed_text), "versions": {name: version(name) for name in _LIBRARIES}}
    replace_file(training.settings, json.dumps(facts, indent=1).encode())


def _recorded(path: Path) -> dict[str, Any]:
    """Return the settings of a training.json."""
    try:
        content = read_json(path, UsageError)
    except UsageError as error:
        raise UsageError(f"{error}; {_RESTORE}") from error
    found = content.get("settings") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: holds no settings; {_RESTORE}")
    return found


def _facts(training: Training, packed_text: str | None) -> dict[str, Any]:
    """Return what the weights depend on, as JSON gives it back."""
    facts = {
        "seed": training.seed,
        "packed_text": packed_text,
        "model": named_model(training.recipe.model).config,
        **training.recipe.model_dump(mode="json", exclude=_OF_THE_RUN),
    }
    if packed_text is None:
        del facts["packed_text"]
    found: dict[str, Any] = json.loads(json.dumps(facts))
    return found
