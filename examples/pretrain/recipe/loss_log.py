"""Losses and evaluations of a training: training.csv, and lines with the time left on standard output."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from evalkit.paths import replace_file
from recipe.folder import LOG

_COLUMNS = {
    "loss": "loss",
    "held_out_loss": "eval_loss",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
}
"""Column → name in Trainer's logs."""
_HEADER = ("step", "tokens", *_COLUMNS, "score", "score_error")
_EVALUATED, _ERROR = "evalkit/", "/stderr"
"""Beginning of the names of an evaluation in Trainer's logs, and end of that of its average's standard error."""


class LossLog(TrainerCallback):
    """Write losses, and the scores of evaluations, to training.csv, and print them with the time left.

    After a resumption, rows of steps that are computed again are removed first.

    Args:
        folder: of training.csv.
        tokens_per_step: tokens of an update.
        sample: documents of each task in an evaluation; None: all.
    """

    def __init__(self, folder: Path, tokens_per_step: int, sample: int | None = None) -> None:
        self._path = folder / LOG
        self._tokens = tokens_per_step
        self._sample = "all documents" if sample is None else f"{sample:,} documents of each task"
        self._began, self._first = 0.0, 0
        self._paused: float | None = None
        self._pauses = 0.0
        """Seconds of held-out measurements, evaluations and saving, which are not training."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the clock; write the log with the rows up to here."""
        self._began, self._first = time.monotonic(), state.global_step
        if state.is_world_process_zero:
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, _HEADER)
            writer.writeheader()
            rows = read_log(self._path) if self._path.exists() else []
            writer.writerows(row for row in rows if int(row["step"]) <= state.global_step)
            replace_file(self._path, text.getvalue().encode())

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End a pause."""
        if self._paused is not None:
            self._pauses += time.monotonic() - self._paused
            self._paused = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin a pause; log before each checkpoint, whose loss a resumed training could not average."""
        self._paused = time.monotonic()
        if control.should_save:
            control.should_log = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Write a row and print a line."""
        if not state.is_world_process_zero or not logs:
            return
        step = state.global_step
        found = {column: logs[name] for column, name in _COLUMNS.items() if name in logs}
        name, score = score_of(logs)
        if not {"loss", "held_out_loss"} & found.keys() and not score:
            return
        with self._path.open("a", newline="", encoding="utf-8") as file:
            row = {column: float(value) for column, value in (found | score).items()}
            csv.DictWriter(file, _HEADER).writerow({"step": step, "tokens": step * self._tokens, **row})
        losses = {"loss": "loss", "held_out_loss": "held-out loss"}
        words = [f"{kind} {found[column]:.3f}" for column, kind in losses.items() if column in found]
        if score:
            error = f" ± {score['score_error']:.4f}" if "score_error" in score else ""
            words.append(f"{name} {score['score']:.4f}{error} ({self._sample})")
        what = ", ".join(words)
        print(f"step {step:,} of {state.max_steps:,}: {what}; {self._pace(step, state.max_steps)}", flush=True)

    def _pace(self, step: int, steps: int) -> str:
        """Format the speed, without pauses, and the time left, with as many pauses as so far."""
        done = step - self._first
        if not done:
            return "resumed"
        now = time.monotonic()
        trained = (now if self._paused is None else self._paused) - self._began - self._pauses
        left = (now - self._began) / done * (steps - step)
        return f"{done * self._tokens / trained:,.0f} tokens/s, about {duration(left)} left"


def score_of(logs: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    """Return the name of an evaluation's average in Trainer's logs, and its columns; none without an evaluation.

    It is the last of the evaluation's numbers, after those of the tasks.
    """
    names = [name for name in logs if name.startswith(_EVALUATED)]
    values = [name for name in names if not name.endswith(_ERROR)]
    if not values:
        return "", {}
    columns = {"score": logs[values[-1]]}
    for name in names:
        if name.endswith(_ERROR):
            columns["score_error"] = logs[name]
    return values[-1].removeprefix(_EVALUATED).replace("/", " "), columns


def read_log(path: Path) -> list[dict[str, str]]:
    """Return the complete rows of a log: the last one may be cut short."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if line.endswith("\n")))


def duration(seconds: float) -> str:
    """Return h:mm:ss."""
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}"
