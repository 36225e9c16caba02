"""What generation will take: memory for keys and values, and time.

In: a model and its generator. Out: the most tokens of a batch, and an estimate from one measured chunk.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from evalkit.generation.batches import Prompt
from evalkit.generation.greedy import CHUNK, Generator

_SHARE = 0.5
"""Of the free memory, what keys and values may take."""
_CPU_ROWS, _GPU_ROWS = 16, 256
"""Most rows of a batch: beyond, a step takes as much longer as there are more of them."""


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
        embedding = model.get_input_embeddings().weight.numel()
        # Of each token: two for every weight that it meets, and four for every channel of every earlier token
        self._linear = 2 * (sum(p.numel() for p in model.parameters()) - embedding)
        self._square = 4 * config.num_hidden_layers * config.hidden_size

    def work(self, prompt: Prompt) -> float:
        """Operations of a prompt and of as many tokens as it may be given."""
        tokens = prompt.columns
        return float(self._linear * tokens + self._square * tokens**2 / 2)

    def estimate(self, prompts: Sequence[Prompt]) -> str:
        """One line: how much there is to do, how long that takes, what it needs."""
        longest = max(prompts, key=lambda prompt: len(prompt.tokens))
        probe = Prompt(-1, longest.tokens[:CHUNK], 1)
        self._generator.generate([probe])
        started = time.perf_counter()
        self._generator.generate([probe])
        seconds = (time.perf_counter() - started) / self.work(probe) * sum(map(self.work, prompts))
        tokens, new = sum(len(prompt.tokens) for prompt in prompts), sum(prompt.max_new_tokens for prompt in prompts)
        most = max(prompt.columns for prompt in prompts)
        held = max(most, min(self.tokens, most * self.most_rows)) * self._bytes / 2**30
        return (
            f"{tokens:,} prompt tokens and up to {new:,} generated ones: about {max(1, round(seconds / 60))} min, "
            f"and up to {held:.1f} GiB beside the model"
        )
