"""Trainings one after the other, after a line that says how long they will take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accelerate import PartialState
from transformers.utils import logging

from recipe.checkpoints import duration
from recipe.settings import Recipe
from recipe.training import InUse, Training, prepare, seconds_per_step, train


def run(wanted: Sequence[tuple[Path, int, Recipe]], data: Path, *, dry_run: bool) -> None:
    """Prepare and train models.

    Args:
        wanted: output folder, seed and recipe of each.
        data: folder of tokenizer and packed text, which they share.
        dry_run: end after the estimate.
    """
    logging.disable_progress_bar()
    say = print if PartialState().is_main_process else (lambda *_, **__: None)
    trainings = [Training(recipe, seed, output, data) for output, seed, recipe in wanted]
    for training in trainings:
        prepare(training)
    # A model's speed does not depend on its seed
    once = {training.recipe.model: training for training in reversed(trainings) if not training.model.exists()}
    per_step = {model: seconds_per_step(training) for model, training in once.items()}
    seconds = sum(
        per_step[training.recipe.model] * training.steps_left for training in trainings if training.steps_left
    )
    tokens, many = sum(training.recipe.tokens for training in trainings), "s" * (len(trainings) > 1)
    left = f"about {duration(seconds)} left on {PartialState().device}"
    say(f"{len(trainings)} training{many}, {tokens:,} tokens in all; {left}", flush=True)
    if dry_run:
        return
    for training in trainings:
        if training.model.exists():
            say(f"{training.model}: finished", flush=True)
            continue
        recipe = training.recipe
        say(f"{training.output}: {recipe.steps:,} updates of {recipe.batch * recipe.length:,} tokens", flush=True)
        try:
            train(training)
        except InUse as error:
            if len(trainings) == 1:
                raise
            say(f"{error}; left to it", flush=True)
