"""Trainings of a few steps by transformers' Trainer: a tiny model with dropout, and made-up rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from evalkit.compatibility.torch import shard_of

LENGTH = 16
"""Tokens of a row."""


def rows(count: int = 64) -> list[dict[str, list[int]]]:
    """Return rows of tokens, deterministically."""
    dice = random.Random(0)
    texts = [[dice.randrange(10, 400) for _ in range(LENGTH)] for _ in range(count)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in texts]


def trainer_of(
    checkpoint: Path,
    output: Path,
    dtype: str = "float32",
    checkpointing: dict[str, Any] | None = None,
    **arguments: Any,
) -> Trainer:
    """Return a trainer of a checkpoint whose attention has dropout, so that random numbers count."""
    set_seed(7)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attention_dropout=0.2, dtype=getattr(torch, dtype))
    if checkpointing is not None:
        model.activation_checkpointing_enable(checkpointing)
        assert model.model.layers[0].gradient_checkpointing
    given: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": 6,
        "save_strategy": "no",
        "logging_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 7,
    }
    return Trainer(
        model,
        TrainingArguments(**(given | arguments)),
        data_collator=default_data_collator,
        train_dataset=rows(),
        eval_dataset=rows(4),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
    )


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return everything that a further step depends on, and the losses that the trainer has logged."""
    kept = ("loss", "grad_norm", "learning_rate", "step", "epoch")
    logged = [
        {key: value for key, value in entry.items() if key in kept}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return {
        "weights": tree_map_only(torch.Tensor, shard_of, trainer.model.state_dict()),
        "optimizer": tree_map_only(torch.Tensor, shard_of, trainer.optimizer.state_dict()),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "random": (random.getstate(), np.random.get_state()[1], torch.get_rng_state()),
        "training": {name: part.training for name, part in trainer.model.named_modules()},
        "logged": logged,
    }


def equal(value: Any, other: Any) -> bool:
    """Return whether two states are equal, bit for bit."""
    if isinstance(value, torch.Tensor):
        return isinstance(other, torch.Tensor) and value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, np.ndarray):
        return bool(np.array_equal(value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(equal(member, other[key]) for key, member in value.items())
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(equal(*pair) for pair in zip(value, other, strict=True))
    return bool(value == other)
