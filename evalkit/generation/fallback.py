"""Generation by transformers' `generate`, for models that do not run on evalkit's key-value cache.

In: a model and a `GenerationRow`. Out: the row, continued to its end. Such models have a recurrent state (Mamba,
RecurrentGemma) or a cache of their own kind, which `generate` supports. The row still chooses each token and applies
the stopping criteria, as in `generator.py`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from evalkit.generation.rows import GenerationRow, choose
from evalkit.models.quiet import quiet


def generate_with_transformers(model: Any, row: GenerationRow) -> None:
    """Generate the tokens of a row until it ends.

    Raises:
        ScoringError: the logits are NaN or infinite.
    """
    ids = torch.from_numpy(row.prompt.tokens[None]).to(model.device)
    config, started = model.generation_config, time.perf_counter()
    # The row already applies the model's settings
    model.generation_config = GenerationConfig()
    try:
        with quiet():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=row.prompt.max_new_tokens,
                do_sample=False,
                pad_token_id=0,
                logits_processor=[_RowProcessor(row, started)],
                stopping_criteria=[_RowStoppingCriteria(row)],
            )
    finally:
        model.generation_config = config
    row.seconds = time.perf_counter() - started


class _RowProcessor(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that makes `generate` take the token that the row chooses."""

    def __init__(self, row: GenerationRow, started: float) -> None:
        self._row, self._started = row, started

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return logits [1, vocabulary], minus infinity for every token but the chosen one."""
        row = self._row
        [token] = choose([row], scores.float())
        row.append(token)
        if len(row.tokens) == 1:
            row.prompt_seconds = time.perf_counter() - self._started
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([token], device=scores.device), 0.0)


class _RowStoppingCriteria(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that is met when the row has ended."""

    def __init__(self, row: GenerationRow) -> None:
        self._row = row

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return whether the row has ended, [1]."""
        return torch.tensor([bool(self._row.ended)], device=input_ids.device)
