"""Trainings of 20 updates of 4 rows of 32 tokens: in this process, and in one that waits to be killed at a moment."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import recipe.checkpoints
import recipe.packing
import recipe.training
import torch
from recipe.folder import Training
from recipe.packing import packed
from recipe.rows import OrderedRows
from recipe.running import run
from recipe.settings import Recipe, Text
from recipe.tokenizer import read_tokenizer
from safetensors.torch import load_file
from transformers import Trainer

from evalkit.inputs.validated import validated


def recipe_of(shared: Path, **changes: Any) -> dict[str, Any]:
    """The keys of a settings file; a key of None is left out."""
    keys = {
        "model": f"{shared}/models.yaml:vanilla",
        "tokenizer": str(shared / "tokenizer"),
        "text": [{"files": [str(shared / "text.jsonl")]}],
        "held_out": [{"files": [str(shared / "held_out.txt")]}],
        "length": 32,
        "batch": 4,
        "steps": 20,
        "learning_rate": 5e-3,
        "warmup_steps": 3,
        "log_every": 3,
        "held_out_every": 8,
        "held_out_rows": 8,
        "save_every": 10,
        "report_to": "none",
    }
    return {key: value for key, value in (keys | changes).items() if value is not None}


def write_recipe(folder: Path, shared: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe_of(shared, **changes)))
    return path


def training_of(shared: Path, output: Path, *, seed: int = 0, model: str = "vanilla", **changes: Any) -> Training:
    """A training of the shared folder's text."""
    keys = recipe_of(shared, model=f"{shared}/models.yaml:{model}", **changes)
    return Training(validated(keys, Recipe, ValueError, "recipe"), seed, output, shared / "data")


def trained(shared: Path, output: Path, **changes: Any) -> Training:
    """A finished training."""
    training = training_of(shared, output, **changes)
    run([training], dry_run=False)
    assert training.model.is_dir()
    return training


def run_all(trainings: list[Training]) -> None:
    """Train all, in a process of its own."""
    run(trainings, dry_run=False)


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Weights, optimizer and scheduler of a checkpoint."""
    return {
        "weights": load_file(checkpoint / "model.safetensors"),
        "optimizer": torch.load(checkpoint / "optimizer.pt", weights_only=False),
        "scheduler": torch.load(checkpoint / "scheduler.pt", weights_only=False),
    }


def train_until(training: Training, moment: str, marker: Path) -> None:
    """Train, and at a moment write `marker` and wait to be killed.

    Moments: "step N", before update N is computed; "weights", when the last checkpoint's weights are on disk and its
    optimizer is not; "settled", before it is renamed; "model", while the model is written.
    """

    def stop() -> None:
        marker.touch()
        time.sleep(1000)

    last = f"checkpoint-{training.recipe.steps}"
    if moment.startswith("step"):
        item, first = OrderedRows.__getitem__, (int(moment.split()[1]) - 1) * training.recipe.batch

        def slow_item(self: OrderedRows, position: int) -> Any:
            return stop() if position >= first else item(self, position)

        OrderedRows.__getitem__ = slow_item  # type: ignore[method-assign]
    elif moment == "weights":
        save = Trainer._save_optimizer_and_scheduler

        def slow_save(self: Trainer, folder: str) -> None:
            return stop() if folder.endswith(last) else save(self, folder)

        Trainer._save_optimizer_and_scheduler = slow_save
    else:
        module = recipe.checkpoints if moment == "settled" else recipe.training
        settle = module.settle

        def slow_settle(folder: Path) -> None:
            return stop() if folder.name == last or moment == "model" else settle(folder)

        module.settle = slow_settle
    run([training], dry_run=False)


def train_without_space(training: Training, most: int, message: Path) -> None:
    """Train where no file may have more bytes than `most`; write the error's message."""
    import resource  # not on Windows

    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        run([training], dry_run=False)
    except Exception as error:
        message.write_text(f"{type(error).__name__}: {error}")


def pack_until(training: Training, root: Path, marker: Path) -> None:
    """Pack a training's text; in the middle, write `marker` and wait to be killed."""
    tokenizer = read_tokenizer(Path(training.recipe.tokenizer or ""), training.recipe)
    rest = recipe.packing.documents

    def slow_documents(text: Text) -> Iterator[str]:
        for number, document in enumerate(rest(text)):
            if number == 20:
                marker.touch()
                time.sleep(1000)
            yield document

    recipe.packing.documents = slow_documents
    recipe.packing._DOCUMENTS = 5  # type: ignore[misc]
    recipe.packing._SECONDS = 0.0  # type: ignore[misc]
    packed(training.recipe.text, tokenizer, root, print)
