"""What generation will take: memory for keys and values, and time.

In: a model and its generator. Out: the most tokens of a batch, and an estimate from a measured chunk and a few steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import psutil
import torch

from evalkit.generation.batches import plan_batches
from evalkit.generation.generator import CHUNK, Generator
from evalkit.generation.prompts import Prompt

_SHARE = 0.5
"""Of the free memory, what keys and values may take."""
_CPU_ROWS, _GPU_ROWS = 16, 256
"""Most rows of a batch: beyond, a step takes as much longer as there are more of them."""
_STEPS = 4
"""Generated tokens whose time is taken."""


@dataclass(frozen=True)
class Capacity:
    """What a machine can hold of a model's keys and values. See `capacity_of`."""

    tokens: int
    """Most tokens of keys and values at a time."""
    most_rows: int
    """Of a batch."""
    chunk: int
    """Tokens of a prompt at a time."""
    token_bytes: int
    """Bytes of a token's keys and values, in all layers; 0 where the model keeps none."""

    def batches(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Prompts as they go through the model together (`batches.plan_batches`)."""
        return plan_batches(prompts, self.tokens, self.chunk, self.most_rows)


@dataclass(frozen=True)
class Room(Capacity):
    """The same, and how long it takes. See `room_of`."""

    linear: float
    """Operations of each prompt token: two for every weight that it meets."""
    square: float
    """Four for every channel of every earlier token."""
    weights: float
    """Bytes that a generated token has read from memory, once for all rows; its own keys and values come to them."""
    operations_a_second: float
    bytes_a_second: float

    def work(self, prompt: Prompt) -> float:
        """Seconds of a prompt and of as many tokens as it may be given."""
        return _operations(self.linear, self.square, len(prompt.tokens)) / self.operations_a_second + (
            prompt.max_new_tokens * self._read(prompt.columns) / self.bytes_a_second
        )

    def estimate(self, prompts: Sequence[Prompt]) -> str:
        """One line: how much there is to do, how long that takes at most, what it needs."""
        tokens, new = sum(len(prompt.tokens) for prompt in prompts), sum(prompt.max_new_tokens for prompt in prompts)
        most = max(prompt.columns for prompt in prompts)
        held = max(most, min(self.tokens, most * self.most_rows)) * self.token_bytes / 2**30
        return (
            f"{tokens:,} prompt tokens and up to {new:,} generated ones: about "
            f"{max(1, round(sum(map(self.work, prompts)) / 60))} min, and up to {held:.1f} GiB beside the model"
        )

    def _read(self, columns: int) -> float:
        """Bytes for one generated token of a row, in a batch of as many rows of this length as there is room for."""
        rows = max(1, min(self.most_rows, self.tokens // columns))
        return float(self.weights / rows + columns * self.token_bytes)


def capacity_of(generator: Generator, budget: int | None, context: int) -> Capacity:
    """Find out what a machine can hold.

    Args:
        generator: of the model.
        budget: most tokens of a batch; None: what half of the free memory holds.
        context: tokens that the model takes at once.
    """
    device, size = generator.device, generator.token_bytes
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return Capacity(
        # What keeps none is generated prompt by prompt
        tokens=budget or (max(1, int(free * _SHARE / size)) if size else context),
        most_rows=1 if generator.alone else _GPU_ROWS if device.type == "cuda" else _CPU_ROWS,
        chunk=generator.chunk,
        token_bytes=size,
    )


def room_of(model: Any, generator: Generator, budget: int | None, context: int) -> Room:
    """Find out what a machine can hold, and time a chunk and a few tokens after it.

    Args:
        model: the loaded model.
        generator: of the model.
        budget: see `capacity_of`.
        context: see `capacity_of`.
    """
    capacity = capacity_of(generator, budget, context)
    size, embedding = generator.token_bytes, model.get_input_embeddings().weight
    config = model.config.get_text_config()
    total = sum(p.numel() for p in model.parameters())
    linear = 2 * (total - embedding.numel())
    square = 4 * config.num_hidden_layers * config.hidden_size
    untied = model.get_output_embeddings().weight is not embedding
    weights = (total - untied * embedding.numel()) * embedding.element_size()
    length = max(1, min(CHUNK, context - 1 - _STEPS))
    prompt = Prompt(-1, np.arange(length, dtype=np.int64) % embedding.shape[0], 1 + _STEPS)
    # Twice: a model that has been run before is faster
    found = [generator.generate([prompt])[0] for _ in range(2)][-1]
    steps = max(found.seconds - found.prompt_seconds, 1e-9) / _STEPS
    return Room(
        **asdict(capacity),
        linear=linear,
        square=square,
        weights=weights,
        operations_a_second=_operations(linear, square, length) / max(found.prompt_seconds, 1e-9),
        bytes_a_second=(weights + length * size) / steps,
    )


def _operations(linear: float, square: float, tokens: int) -> float:
    return float(linear * tokens + square * tokens**2 / 2)
