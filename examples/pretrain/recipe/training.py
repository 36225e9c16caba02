"""One training: from a recipe and a seed to `OUTPUT/model`, resumed from its newest checkpoint.

A folder of a training holds `initial` (the model before its first step), `checkpoint-N`, `training.csv`,
`training.json` (its settings and versions) and, once it is finished, `model`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainingArguments, set_seed

from evalkit.atomic import replace_file
from evalkit.errors import UsageError
from evalkit.models.init import write_random
from evalkit.models.quiet import quiet
from evalkit.models.registration import register_models
from evalkit.models.zoo import named_model
from recipe.checkpoints import LossLog, WholeTrainer, newest_checkpoint, settle
from recipe.packing import packed, tokens_of
from recipe.rows import OrderedRows, spread_rows
from recipe.settings import Recipe

_TIMED = 3
"""Passes that an estimate times, of which the fastest counts."""


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
    def steps_left(self) -> int:
        """Updates after the newest checkpoint; 0 once the training is finished."""
        newest = newest_checkpoint(self.output)
        done = int(newest.rpartition("-")[2]) if newest else 0
        return 0 if self.model.exists() else self.recipe.steps - done


_OF_THE_RUN = {
    "model", "text", "tokenizer", "held_out", "log_every", "held_out_every", "held_out_rows", "save_every", "keep",
    "report_to", "micro_batch",
}  # fmt: skip
"""Settings that do not change the weights, and may change at a resumption (`micro_batch`: but for rounding). Text and
tokenizer are recorded by the hash of the packed tokens, the model by its config."""


def prepare(training: Training) -> None:
    """Write what a training needs before its first step: tokenizer, packed texts, the model with random weights.

    Raises:
        UsageError: the folder belongs to another training.
        EvalkitError: a text or a model cannot be read.
    """
    register_models()
    recipe, state = training.recipe, PartialState()
    if state.is_main_process:
        training.output.mkdir(parents=True, exist_ok=True)
        tokenizer = _read_tokenizer(training)
        text = packed(recipe.text, tokenizer, training.data)
        if recipe.held_out:
            packed(recipe.held_out, tokenizer, training.data)
        _record(training, text.name)
        initial = training.output / "initial"
        if not initial.exists():
            write_random(named_model(recipe.model), initial, seed=training.seed, tokenizer=str(_tokenizer(training)))
    state.wait_for_everyone()


def seconds_per_step(training: Training) -> float:
    """Time passes over random tokens; weights and random numbers are left as they are."""
    recipe = training.recipe
    processes = PartialState().num_processes
    rows = min(recipe.micro_batch or recipe.batch, recipe.batch // processes)
    device = PartialState().device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model = _load(training.output / "initial").to(device).train()
        tokens = torch.randint(3, model.config.vocab_size, (rows, recipe.length), device=device)
        times = []
        for _ in range(_TIMED):
            began = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    return min(times) * recipe.batch / (rows * processes)


class InUse(UsageError):
    """Another process trains in the folder."""


def train(training: Training) -> None:
    """Train to the end; write `model`.

    Raises:
        InUse: another process trains in this folder.
        UsageError: the batch cannot be divided over the processes.
    """
    lock = FileLock(training.output / ".lock")
    if PartialState().is_main_process:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise InUse(f"{training.output}: another process trains here") from None
    try:
        _train(training)
    finally:
        lock.release()


def _train(training: Training) -> None:
    recipe = training.recipe
    tokenizer = _read_tokenizer(training)
    tokens = tokens_of(packed(recipe.text, tokenizer, training.data))
    rows = OrderedRows(tokens, recipe.length, recipe.steps * recipe.batch, training.seed)
    held_out = None
    if recipe.held_out:
        held_out = spread_rows(
            tokens_of(packed(recipe.held_out, tokenizer, training.data)), recipe.length, recipe.held_out_rows
        )
    set_seed(training.seed)
    trainer = WholeTrainer(
        model=_load(training.output / "initial"),
        args=_arguments(training),
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=_stacked,
        callbacks=[LossLog(recipe.batch * recipe.length)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=newest_checkpoint(training.output))
    if held_out and recipe.steps % (recipe.held_out_every or recipe.steps + 1):
        trainer.evaluate()
    if trainer.args.should_save:
        part = training.output / ".model.partial"
        shutil.rmtree(part, ignore_errors=True)
        trainer.save_model(str(part))
        settle(part)
        part.replace(training.model)
    trainer.accelerator.wait_for_everyone()


def _arguments(training: Training) -> TrainingArguments:
    recipe, processes = training.recipe, PartialState().num_processes
    own, rest = divmod(recipe.batch, processes)
    micro = min(recipe.micro_batch or own, own)
    if rest or own % micro:
        raise UsageError(
            f"batch {recipe.batch} cannot be divided into micro-batches of {micro} rows on {processes} processes"
        )
    return TrainingArguments(
        output_dir=str(training.output),
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
        eval_strategy="steps" if recipe.held_out and recipe.held_out_every else "no",
        eval_steps=recipe.held_out_every,
        save_steps=recipe.save_every,
        save_total_limit=recipe.keep,
        seed=training.seed,
        data_seed=training.seed,
        report_to=_trackers() if recipe.report_to == "installed" else "none",
        disable_tqdm=True,
        prediction_loss_only=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def _trackers() -> list[str]:
    found = ["tensorboard"] if any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX"))) else []
    return [*found, *(["wandb"] if importlib.util.find_spec("wandb") else [])]


def _stacked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def _load(folder: Path) -> Any:
    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _record(training: Training, text: str) -> None:
    """Write training.json, what the weights depend on; compare it if it is there."""
    path = training.output / "training.json"
    recipe = training.recipe.model_dump(mode="json", exclude=_OF_THE_RUN)
    facts = {"seed": training.seed, "packed_text": text, "model": named_model(training.recipe.model).config, **recipe}
    facts = json.loads(json.dumps(facts))
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if changed := sorted(key for key in facts if before["settings"].get(key) != facts[key]):
            raise UsageError(
                f"{training.output}: was begun with other settings ({', '.join(changed)}); choose another folder"
            )
        return
    versions = {name: importlib.import_module(name).__version__ for name in ("torch", "transformers", "accelerate")}
    replace_file(path, json.dumps({"settings": facts, "versions": versions}, indent=1).encode())


def _tokenizer(training: Training) -> Path:
    """Return the folder or name of the tokenizer; train it if the recipe names none."""
    from evalkit.models.folder import new_folder
    from evalkit.models.train_tokenizer import train_tokenizer

    if training.recipe.tokenizer:
        return Path(training.recipe.tokenizer)
    files = [Path(file) for text in training.recipe.text for file in text.files]
    if not files:
        raise UsageError("a tokenizer can be trained on files only; give `tokenizer` in the settings")
    size = named_model(training.recipe.model).shape.vocabulary
    content = json.dumps([size, *(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)])
    folder = training.data / f"tokenizer-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    training.data.mkdir(parents=True, exist_ok=True)
    with FileLock(training.data / f".{folder.name}.lock"):
        if not folder.exists():
            with new_folder(folder) as part:
                train_tokenizer(files, size, part)
    return folder


def _read_tokenizer(training: Training) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(_tokenizer(training))
    if tokenizer.eos_token_id is None:
        raise UsageError(f"{training.recipe.tokenizer}: has no EOS token, which separates documents")
    return tokenizer
