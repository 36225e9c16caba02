"""One process of a distributed training, which torchrun starts with a file of options."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import evalkit
from evalkit.display import Progress
from evalkit.errors import CheckpointError
from evalkit.models.loading.load import LoadedModel
from tests.training.trainers import state_of, trainer_of


class Slow(Progress):
    """Makes an evaluation last longer than the training's timeout."""

    seconds = 0.0

    def start(self, total: float, done: float) -> None:
        time.sleep(Slow.seconds)
        Slow.seconds = 0.0


def failing(*_: Any, **__: Any) -> Any:
    raise CheckpointError("no space")


def main(options: dict[str, Any]) -> None:
    rank, folder = int(os.environ["RANK"]), Path(options["folder"])
    trainer = trainer_of(Path(options["start"]), folder / "x", **options["arguments"])
    Slow.seconds = options["seconds"]
    if options["fails"]:
        LoadedModel.of = failing  # type: ignore[method-assign]
    if options["callback"] is not None:
        trainer.add_callback(evalkit.TrainerCallback(trainer, progress=Slow(live=False), **options["callback"]))
    trainer.train()
    state = state_of(trainer) | {"all": trainer.state.log_history, "wrapper": type(trainer.model_wrapped).__name__}
    torch.save(state, folder / f"state-{rank}.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(json.loads(Path(sys.argv[1]).read_text()))
