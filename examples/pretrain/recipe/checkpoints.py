"""A Trainer whose checkpoint folders are complete or absent, and a log of its losses.

transformers' Trainer writes `checkpoint-N` in place, so that a kill during it leaves a folder with parts missing. Here
it writes to `.saving` beside it, which is renamed once it is on disk.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import time
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from evalkit.atomic import replace_file

LOG = "training.csv"
_COLUMNS = ("step", "tokens", "loss", "held_out_loss", "learning_rate", "grad_norm")


class WholeTrainer(Trainer):
    """Saves checkpoints aside and renames them."""

    _saving = False

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._aside) if self._saving else str(super()._get_output_dir(trial))

    @property
    def _aside(self) -> Path:
        return Path(self.args.output_dir) / ".saving"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.should_save:
            shutil.rmtree(self._aside, ignore_errors=True)
            self._aside.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self._saving = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving = False
        self.accelerator.wait_for_everyone()  # each process has saved its random state
        if self.args.should_save:
            folder = self._aside / f"checkpoint-{self.state.global_step}"
            settle(folder)
            folder.replace(Path(self.args.output_dir) / folder.name)
            self._aside.rmdir()
            rotate_checkpoints(output_dir=self.args.output_dir, save_total_limit=self.args.save_total_limit)
        self.accelerator.wait_for_everyone()


def settle(folder: Path) -> None:
    """Wait until all files of a folder are on disk."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def newest_checkpoint(folder: Path) -> str | None:
    """Return the checkpoint of the latest step, or None."""
    return get_last_checkpoint(str(folder)) if folder.is_dir() else None


class LossLog(TrainerCallback):
    """Writes training and held-out losses to training.csv, and a line with the time left to standard output.

    After a resumption, rows of steps that are computed again are removed first.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens = tokens_per_step
        self._start = (0.0, 0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._start = (time.monotonic(), state.global_step)
        if state.is_world_process_zero:
            path = Path(args.output_dir) / LOG
            rows = [row for row in read_log(path) if int(row["step"]) <= state.global_step] if path.exists() else []
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, _COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
            replace_file(path, text.getvalue().encode())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        found = dict(logs or {})
        if not state.is_world_process_zero or not {"loss", "eval_loss"} & found.keys():
            return
        step = state.global_step
        names = {
            "loss": "loss",
            "held_out_loss": "eval_loss",
            "learning_rate": "learning_rate",
            "grad_norm": "grad_norm",
        }
        row = {name: float(found[key]) for name, key in names.items() if key in found}
        with (Path(args.output_dir) / LOG).open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, _COLUMNS).writerow({"step": step, "tokens": step * self._tokens, **row})
        began, first = self._start
        seconds = (time.monotonic() - began) / max(1, step - first)
        words = ", ".join(
            f"{name.replace('_', '-').replace('held-out-loss', 'held-out loss')} {row[name]:.3f}"
            for name in ("loss", "held_out_loss")
            if name in row
        )
        print(
            f"step {step:,} of {state.max_steps:,}: {words}; {self._tokens / seconds:,.0f} tokens/s, "
            f"about {duration(seconds * (state.max_steps - step))} left",
            flush=True,
        )


def read_log(path: Path) -> list[dict[str, str]]:
    """Return the rows of a log that are complete: a kill may have cut the last one short."""
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row.get("grad_norm") is not None and row["step"].isdigit()]


def duration(seconds: float) -> str:
    """Return h:mm:ss."""
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}"
