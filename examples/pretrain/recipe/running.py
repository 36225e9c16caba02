"""Trainings one after the other, after lines that say what they will take."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence

import torch
from accelerate import PartialState
from transformers.utils import logging

from evalkit.errors import OutOfMemoryError
from evalkit.models.zoo.named import named_model
from evalkit.models.zoo.shapes import parameters
from recipe.folder import InUse, Training
from recipe.loss_log import duration
from recipe.packing import Say
from recipe.training import Sources, load, prepare, rows_of, train

_TIMED = 3
"""Passes that an estimate times, of which the fastest counts."""


def run(trainings: Sequence[Training], *, dry_run: bool) -> None:
    """Prepare and train models, each unless it is finished.

    Args:
        trainings: what to train, in order.
        dry_run: end after the estimate.

    Raises:
        EvalkitError: a training cannot be begun, or ended.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # Without an accelerator, processes find each other only if they ask for the CPU; later calls return the same state
    processes = PartialState(cpu=not torch.accelerator.is_available())
    say: Say = _print if processes.is_main_process else lambda _: None
    prepared = [(training, prepare(training, say)) for training in trainings]
    for training, sources in prepared:
        if sources is None:
            say(f"{training.model}: finished")
    left = [(training, sources) for training, sources in prepared if sources is not None]
    try:
        _estimate(left, say)
        for training, sources in left if not dry_run else ():
            recipe = training.recipe
            say(f"{training.output}: {recipe.steps:,} updates of {recipe.batch * recipe.length:,} tokens")
            try:
                train(training, sources)
            except InUse as error:
                if len(trainings) == 1:
                    raise
                say(f"{error}; skipped")
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError("out of memory; give a smaller 'micro_batch', or 'checkpointing: true'") from error


def _estimate(left: Sequence[tuple[Training, Sources]], say: Say) -> None:
    """Say what trainings will take: tokens, space and time."""
    if not left:
        return
    for training, sources in {sources.text: (training, sources) for training, sources in left}.values():
        recipe, rows = training.recipe, len(rows_of(training, sources)[0])
        read = recipe.steps * recipe.batch
        say(f"text: {rows:,} rows of {recipe.length:,} tokens; a training reads {read:,}, each {read / rows:.2f} times")
    # A model's speed does not depend on its seed
    once = {training.recipe.model: training for training, _ in left}
    per_step = {model: seconds_per_step(training) for model, training in once.items()}
    seconds = sum(per_step[training.recipe.model] * training.steps_left for training, _ in left)
    size = sum(bytes_on_disk(training) for training, _ in left)
    free = shutil.disk_usage(left[0][0].output).free
    say(
        f"{len(left)} training{'s' * (len(left) > 1)}, {sum(training.recipe.tokens for training, _ in left):,} tokens; "
        f"{_size(size)} of checkpoints at the end ({_size(free)} are free); "
        f"about {duration(seconds)} on {_processes()}"
    )


def seconds_per_step(training: Training) -> float:
    """Time passes over random tokens; weights and random numbers are left as they are."""
    recipe, processes = training.recipe, PartialState()
    rows = min(recipe.micro_batch or recipe.batch, max(1, recipe.batch // processes.num_processes))
    device = processes.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model = load(training.initial).to(device).train()
        if recipe.checkpointing:
            model.activation_checkpointing_enable()
        tokens = torch.randint(model.config.vocab_size, (rows, recipe.length), device=device)
        times: list[float] = []
        for _ in range(_TIMED):
            began = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    return min(times) * recipe.batch / (rows * processes.num_processes)


def bytes_on_disk(training: Training) -> int:
    """Return the bytes of a training's checkpoints: weights and AdamW's two moments in float32."""
    recipe = training.recipe
    weights = 4 * parameters(named_model(recipe.model).shape).total
    written = -(-recipe.steps // recipe.save_every)
    ends = 2  # the model before its first step and after its last one
    return weights * (ends + 3 * min(written, recipe.keep or written))


def _processes() -> str:
    state = PartialState()
    many = f"{state.num_processes} processes, " if state.num_processes > 1 else ""
    return f"{many}{state.device.type}"


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _print(line: str) -> None:
    print(line, flush=True)
