"""What generation will take: memory for keys and values, and time.

In: a model and its generator. Out: the most tokens of a batch, and an estimate from a measured chunk and a few steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
import torch

from evalkit.generation.batches import Ints, Prompt
from evalkit.generation.greedy import CHUNK, Generator

_SHARE = 0.5
"""Of the free memory, what keys and values may take."""
_CPU_ROWS, _GPU_ROWS = 16, 256
"""Most rows of a batch: beyond, a step takes as much longer as there are more of them."""
_STEPS = 4
"""Generated tokens whose time is taken."""


class Room:
    """What a machine can hold of a model's keys and values.

    Args:
        model: the loaded model.
        generator: of the model.
        budget: most tokens of a batch; None: what half of the free memory holds.
    """

    def __init__(self, model: Any, generator: Generator, budget: int | None) -> None:
        self._generator = generator
        self._bytes = generator.token_bytes
        on_gpu = model.get_output_embeddings().weight.device.type == "cuda"
        free = torch.cuda.mem_get_info()[0] if on_gpu else psutil.virtual_memory().available
        self.tokens = budget or max(1, int(free * _SHARE / self._bytes))
        """Most tokens of keys and values at a time."""
        self.most_rows = 1 if generator.alone else _GPU_ROWS if on_gpu else _CPU_ROWS
        config = model.config.get_text_config()
        embedding = model.get_input_embeddings().weight
        total = sum(p.numel() for p in model.parameters())
        # Of each prompt token: two for every weight that it meets, and four for every channel of every earlier token
        self._linear = 2 * (total - embedding.numel())
        self._square = 4 * config.num_hidden_layers * config.hidden_size
        # What a generated one has read from memory: the weights, once for all rows, and its own keys and values
        untied = model.get_output_embeddings().weight is not embedding
        self._weights = (total - untied * embedding.numel()) * embedding.element_size()
        self._operations_a_second = self._bytes_a_second = 1.0

    def work(self, prompt: Prompt) -> float:
        """Seconds of a prompt and of as many tokens as it may be given; once `estimate` has measured."""
        return self._operations(len(prompt.tokens)) / self._operations_a_second + (
            prompt.max_new_tokens * self._read(prompt.columns) / self._bytes_a_second
        )

    def estimate(self, prompts: Sequence[Prompt]) -> str:
        """One line: how much there is to do, how long that takes at most, what it needs."""
        longest = max(prompts, key=lambda prompt: len(prompt.tokens))
        # No further than it will be taken: a model may have no more positions
        self._measure(longest.tokens[: max(1, min(CHUNK, longest.columns - 1 - _STEPS))])
        tokens, new = sum(len(prompt.tokens) for prompt in prompts), sum(prompt.max_new_tokens for prompt in prompts)
        most = max(prompt.columns for prompt in prompts)
        held = max(most, min(self.tokens, most * self.most_rows)) * self._bytes / 2**30
        return (
            f"{tokens:,} prompt tokens and up to {new:,} generated ones: about "
            f"{max(1, round(sum(map(self.work, prompts)) / 60))} min, and up to {held:.1f} GiB beside the model"
        )

    def _measure(self, tokens: Ints) -> None:
        """Time a chunk and a few tokens after it, as fast as the model is where it has been run before."""
        found = [self._generator.generate([Prompt(-1, tokens, 1 + _STEPS)])[0] for _ in range(2)][-1]
        self._operations_a_second = self._operations(len(tokens)) / max(found.prompt_seconds, 1e-9)
        steps = max(found.seconds - found.prompt_seconds, 1e-9) / _STEPS
        self._bytes_a_second = (self._weights + len(tokens) * self._bytes) / steps

    def _operations(self, tokens: int) -> float:
        return float(self._linear * tokens + self._square * tokens**2 / 2)

    def _read(self, columns: int) -> float:
        """Bytes for one generated token of a row, in a batch of as many rows of this length as there is room for."""
        rows = max(1, min(self.most_rows, self.tokens // columns))
        return float(self._weights / rows + columns * self._bytes)
