"""One training: from a recipe and a seed to `OUTPUT/model`, resumed from its newest checkpoint."""

from __future__ import annotations

import importlib.util
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainingArguments, set_seed

import evalkit.models.auto  # noqa: F401  # registers the paper's model types
from evalkit.compatibility.transformers import quiet
from evalkit.errors import CheckpointError, EvalkitError, UsageError, first_line
from evalkit.models.zoo.named import named_model, new_folder, write_random
from recipe.checkpoints import WholeCheckpoints, settle
from recipe.folder import EVALUATIONS, InUse, Training, check_settings, record_settings
from recipe.loss_log import LossLog
from recipe.packing import Say, packed, tokens_of
from recipe.rows import Array, OrderedRows, as_rows, spread_rows, stacked
from recipe.tokenizer import prepared_tokenizer, read_tokenizer

_UNREADABLE = (OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError, SafetensorError)
"""What torch, safetensors and Trainer raise for a damaged file; torch raises a RuntimeError if it cannot write, too."""


@dataclass(frozen=True)
class Sources:
    """What several trainings may share."""

    tokenizer: Path
    text: Path
    """Folder of packed tokens."""
    held_out: Path | None


def prepare(training: Training, say: Say) -> Sources | None:
    """Write what a training needs before its first step: tokenizer, packed texts, the model with random weights.

    Returns:
        What was written or is there already; None if the training is finished.

    Raises:
        UsageError: the folder belongs to another training that has begun.
        EvalkitError: a text or a model cannot be read.
    """
    found: list[Sources | None] = [None]
    if PartialState().is_main_process:
        training.output.mkdir(parents=True, exist_ok=True)
        with FileLock(training.output / ".preparing.lock"):
            if training.begun:
                check_settings(training)
            if not training.model.exists():
                found = [_prepared(training, say)]
    broadcast_object_list(found)
    return found[0]


def _prepared(training: Training, say: Say) -> Sources:
    recipe, data = training.recipe, training.data
    model = named_model(recipe.model)
    if recipe.length > (window := model.config["max_position_embeddings"]):
        raise UsageError(f"{model.source}: {model.name} has a window of {window:,} tokens, fewer than 'length'")
    folder = prepared_tokenizer(recipe, data, say)
    tokenizer = read_tokenizer(folder, recipe)
    text = packed(recipe.text, tokenizer, data, say)
    held_out = packed(recipe.held_out, tokenizer, data, say) if recipe.held_out else None
    record_settings(training, text.name)
    if not training.initial.exists():
        write_random(model, training.initial, seed=training.seed, tokenizer=str(folder))
    return Sources(folder, text, held_out)


def rows_of(training: Training, sources: Sources) -> tuple[Array, Array | None]:
    """Return the rows of the text and of the held-out text, [rows, length] each.

    Raises:
        DataError: a text is shorter than one row.
    """
    length, held_out = training.recipe.length, sources.held_out
    rows = as_rows(tokens_of(sources.text), length, "text")
    return rows, None if held_out is None else as_rows(tokens_of(held_out), length, "held_out")


def train(training: Training, sources: Sources) -> None:
    """Train a prepared training to the end; write `model`.

    Raises:
        InUse: another process trains in this folder.
        UsageError: the batch cannot be divided over the processes, or the folder was prepared for others since.
        CheckpointError: a checkpoint cannot be read or written.
    """
    with _locked(training):
        if not training.model.exists():  # another process may just have finished it
            check_settings(training, sources.text.name)
            _train(training, sources)


@contextmanager
def _locked(training: Training) -> Iterator[None]:
    """Hold a training's folder by the main process of those that train together."""
    lock, held = FileLock(training.lock), [True]
    if PartialState().is_main_process:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            held = [False]
    broadcast_object_list(held)
    if not held[0]:
        raise InUse(f"{training.output}: another process trains here")
    try:
        yield
    finally:
        lock.release()


def _train(training: Training, sources: Sources) -> None:
    recipe, aside = training.recipe, training.output / ".saving"
    arguments = _arguments(training, aside)
    saving = WholeCheckpoints(aside, training.output, recipe.keep)
    if arguments.should_save:
        saving.clear()
    PartialState().wait_for_everyone()
    rows, held_out = rows_of(training, sources)
    set_seed(training.seed)
    sample = recipe.evaluate.sample if recipe.evaluate else None
    log = LossLog(training.output, recipe.batch * recipe.length, sample)
    trainer = Trainer(
        model=load(training.initial),
        args=arguments,
        train_dataset=OrderedRows(rows, recipe.steps * recipe.batch, training.seed),
        eval_dataset=None if held_out is None else spread_rows(held_out, recipe.held_out_rows),
        processing_class=read_tokenizer(sources.tokenizer, recipe),
        data_collator=stacked,
        callbacks=[log, saving],
    )
    trainer.remove_callback(PrinterCallback)
    if recipe.evaluate:
        from evalkit import TrainerCallback

        output = str(training.output / EVALUATIONS)
        trainer.add_callback(TrainerCallback(trainer, output=output, **recipe.evaluate.model_dump()))
    newest = training.newest
    with _explained(training.output, newest, saving):
        trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    if arguments.should_save:
        with new_folder(training.model) as part:
            trainer.save_model(str(part))
            settle(part)
        saving.clear()
    PartialState().wait_for_everyone()


@contextmanager
def _explained(output: Path, newest: Path | None, saving: WholeCheckpoints) -> Iterator[None]:
    """Explain errors of checkpoints' files."""
    try:
        yield
    except (EvalkitError, torch.OutOfMemoryError):
        raise
    except _UNREADABLE as error:
        if saving.unfinished:
            raise CheckpointError(
                f"{output}: a checkpoint cannot be written ({first_line(error)}); free space; the same command resumes"
            ) from error
        if newest and not saving.resumed:
            raise CheckpointError(
                f"{newest}: cannot be read ({first_line(error)}); remove this folder; the same command resumes from "
                "the checkpoint before it, or begins again"
            ) from error
        raise


def _arguments(training: Training, aside: Path) -> TrainingArguments:
    recipe, processes = training.recipe, PartialState()
    own, rest = divmod(recipe.batch, processes.num_processes)
    micro = min(recipe.micro_batch or own, own)
    if rest or own % micro:
        raise UsageError(
            f"batch {recipe.batch} cannot be divided into micro-batches of {micro} rows on "
            f"{processes.num_processes} processes"
        )
    if recipe.report_to == "installed":
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(training.output / "tensorboard")
    return TrainingArguments(
        output_dir=str(aside),
        run_name=training.output.name,
        max_steps=recipe.steps,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=own // micro,
        train_sampling_strategy="sequential",
        optim=recipe.optimizer,
        learning_rate=recipe.learning_rate,
        warmup_steps=recipe.warmup_steps,
        lr_scheduler_type=recipe.schedule,
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.betas[0],
        adam_beta2=recipe.betas[1],
        max_grad_norm=recipe.clip,
        bf16=recipe.precision == "bfloat16",
        activation_checkpointing=recipe.checkpointing,
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,  # which would write the average of the others for a loss that is not finite
        eval_strategy="steps" if recipe.held_out else "no",
        eval_steps=recipe.held_out_every or recipe.steps,
        save_steps=recipe.save_every,
        seed=training.seed,
        data_seed=training.seed,
        report_to=_trackers() if recipe.report_to == "installed" else "none",
        disable_tqdm=True,
        prediction_loss_only=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=processes.device.type == "cuda",
        use_cpu=processes.device.type == "cpu",
        ddp_find_unused_parameters=False,
    )


def _trackers() -> list[str]:
    found = ["tensorboard"] if any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX"))) else []
    return [*found, *(["wandb"] if importlib.util.find_spec("wandb") else [])]


def load(folder: Path) -> Any:
    """Load a model in float32."""
    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
