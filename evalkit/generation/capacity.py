"""Memory and time that generation needs: a generator → batches of prompts that fit, and an estimate of their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from evalkit.generation.prompts import CHUNK, Prompt, shared_tokens

if TYPE_CHECKING:
    from evalkit.generation.generator import Generator

_GPU_SHARE, _CPU_SHARE = 0.5, 0.25
"""Share of the memory beside the weights for keys and values; other programs use a CPU's memory too."""
_GPU_ROWS, _CPU_ROWS = 256, 16
"""Largest batch size. In larger batches the time of a step grows in proportion to the batch size."""
_STEPS = 4
"""Number of timed decoding steps."""


@dataclass(frozen=True)
class Capacity:
    """Memory limits of a batch; see `capacity_of`."""

    tokens: int
    """Most tokens of keys and values in a batch of several prompts."""
    most_rows: int
    """Largest batch size."""
    chunk: int
    """Prompt tokens in one forward pass."""
    token_bytes: int
    """Bytes of one token's keys and values, in all layers; 0 if the model has no key-value cache."""

    def batches(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Group prompts into batches: next to each other those that share a chunk; padding counts as tokens."""
        groups: list[list[Prompt]] = []
        for prompt in sorted(prompts, key=lambda prompt: prompt.tokens.tolist()):
            if groups and shared_tokens(groups[-1][-1].tokens, prompt.tokens, self.chunk):
                groups[-1].append(prompt)
            else:
                groups.append([prompt])
        # Longest first: out of memory occurs at once, and the remaining time is not underestimated
        groups.sort(key=lambda group: -max(len(prompt.tokens) for prompt in group))
        batches: list[list[Prompt]] = []
        for prompt in chain.from_iterable(groups):
            if batches and len(batches[-1]) < self.most_rows and self._has_room([*batches[-1], prompt]):
                batches[-1].append(prompt)
            else:
                batches.append([prompt])
        return batches

    def _has_room(self, prompts: Sequence[Prompt]) -> bool:
        longest = max(len(prompt.tokens) for prompt in prompts)
        return (longest + max(prompt.max_new_tokens for prompt in prompts)) * len(prompts) <= self.tokens


@dataclass(frozen=True)
class MeasuredCapacity(Capacity):
    """Memory limits and measured speed; see `measure_capacity`."""

    linear: float
    """Floating-point operations per prompt token that do not depend on its position: two per weight."""
    square: float
    """Attention operations per pair of tokens: four per channel."""
    weights: float
    """Bytes of weights read in a decoding step, once for all rows; keys and values are added per row."""
    operations_a_second: float
    bytes_a_second: float

    def work(self, prompt: Prompt) -> float:
        """Return the seconds of a prompt and of its largest number of generated tokens, in the largest batch."""
        rows = max(1, min(self.most_rows, self.tokens // prompt.columns))
        read = float(self.weights / rows + prompt.columns * self.token_bytes)
        operations = _operations(self.linear, self.square, len(prompt.tokens))
        return operations / self.operations_a_second + prompt.max_new_tokens * read / self.bytes_a_second

    def estimate(self, prompts: Sequence[Prompt]) -> str:
        """Return one line: the numbers of tokens, the longest time, and the memory."""
        tokens, new = sum(len(prompt.tokens) for prompt in prompts), sum(prompt.max_new_tokens for prompt in prompts)
        most = max(prompt.columns for prompt in prompts)
        stored = max(most, min(self.tokens, most * self.most_rows)) * self.token_bytes / 2**30
        return (
            f"{tokens:,} prompt tokens and up to {new:,} generated ones: about "
            f"{max(1, round(sum(map(self.work, prompts)) / 60))} min, and up to {stored:.1f} GiB beside the model"
        )


@dataclass(frozen=True)
class GeneratingFacts:
    """Properties of a generating model that planning needs."""

    ends: tuple[int, ...]
    """Token ids that end a text."""
    room: MeasuredCapacity


def capacity_of(generator: Generator, budget: int | None, context: int) -> Capacity:
    """Return the memory limits of a batch on this machine, for a context window in tokens.

    The budget is the most tokens of a batch; None: as many as fit into a share of the memory, whoever else uses it.
    """
    is_gpu = generator.device.type == "cuda"
    share = _GPU_SHARE if is_gpu else _CPU_SHARE
    # Each layer's keys and values are on its device
    rooms = [int(generator.memory[device] * share) // size for device, size in generator.token_bytes_on.items() if size]
    return Capacity(
        # Without a key-value cache, prompts are generated one by one
        tokens=budget or (max(1, min(rooms)) if rooms else context),
        most_rows=1 if generator.one_by_one else _GPU_ROWS if is_gpu else _CPU_ROWS,
        chunk=generator.chunk,
        token_bytes=generator.token_bytes,
    )


def measure_capacity(model: Any, generator: Generator, budget: int | None, context: int) -> MeasuredCapacity:
    """Return the memory limits (see `capacity_of`), and measure a prompt chunk and a few decoding steps."""
    embedding, config = model.get_input_embeddings().weight, model.config.get_text_config()
    total = sum(parameter.numel() for parameter in model.parameters())
    untied = model.get_output_embeddings().weight is not embedding
    linear, square = 2 * (total - embedding.numel()), 4 * config.num_hidden_layers * config.hidden_size
    weights = (total - untied * embedding.numel()) * embedding.element_size()
    length = max(1, min(CHUNK, context - 1 - _STEPS))
    prompt = Prompt(-1, np.arange(length, dtype=np.int64) % embedding.shape[0], 1 + _STEPS)
    generator.generate([prompt])  # the first run is slower
    [measured] = generator.generate([prompt])
    step = max(measured.seconds - measured.prompt_seconds, 1e-9) / _STEPS
    return MeasuredCapacity(
        **asdict(capacity_of(generator, budget, context)),
        linear=linear,
        square=square,
        weights=weights,
        operations_a_second=_operations(linear, square, length) / max(measured.prompt_seconds, 1e-9),
        bytes_a_second=(weights + length * generator.token_bytes) / step,
    )


def _operations(linear: float, square: float, tokens: int) -> float:
    return float(linear * tokens + square * tokens**2 / 2)
