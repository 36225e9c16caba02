"""Checkpoint folders that are complete or absent.

transformers' Trainer writes `checkpoint-N` file by file, so that a kill during it would leave a folder with parts
missing. Here it writes to a folder aside, from which the checkpoint is renamed once it is on disk.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipe.folder import checkpoints


class WholeCheckpoints(TrainerCallback):
    """Move each checkpoint that is written aside to its place, and remove the oldest ones.

    Args:
        aside: the trainer's `output_dir`, on the same file system as `folder`.
        folder: folder of the complete checkpoints.
        keep: checkpoints that are kept; None: all.
    """

    def __init__(self, aside: Path, folder: Path, keep: int | None) -> None:
        self._aside, self._folder, self._keep = aside, folder, keep
        self.resumed = False
        """Whether the checkpoint of a resumption, if there is one, is read."""

    @property
    def unfinished(self) -> bool:
        """Whether a checkpoint is being written, or was when an error occurred."""
        return bool(checkpoints(self._aside))

    def clear(self) -> None:
        """Remove what a killed process has left."""
        shutil.rmtree(self._aside, ignore_errors=True)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Note that everything is read."""
        self.resumed = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Rename the checkpoint that has just been written."""
        processes = PartialState()
        processes.wait_for_everyone()  # each has written its random state
        if processes.is_main_process:
            [written] = checkpoints(self._aside)
            settle(written)
            written.replace(self._folder / written.name)
            for old in checkpoints(self._folder)[: -self._keep] if self._keep else ():
                aside = old.replace(self._aside / f"old-{old.name}")  # a kill leaves no half of it in its place
                shutil.rmtree(aside)
        processes.wait_for_everyone()


def settle(folder: Path) -> None:
    """Wait until all files of a folder are on disk."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
