"""A prompt continued by transformers' own `generate`, for models that do not run on keys and values of ours.

Such are models with a state (Mamba, RecurrentGemma) or a cache of their own kind. `generate` knows how each of them is
run; what comes next and what is enough is the row's to say, as everywhere else.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from evalkit.generation.rows import GenerationRow, choose
from evalkit.models.quiet import quiet


def continue_alone(model: Any, row: GenerationRow) -> None:
    """Continue a row to its end.

    Raises:
        ScoringError: the logits are not numbers.
    """
    ids = torch.from_numpy(row.prompt.tokens[None]).to(model.device)
    own, started = model.generation_config, time.perf_counter()
    # The row has taken from it what counts
    model.generation_config = GenerationConfig()
    try:
        with quiet():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=row.prompt.max_new_tokens,
                do_sample=False,
                pad_token_id=0,
                logits_processor=[_Chosen(row, started)],
                stopping_criteria=[_Ended(row)],
            )
    finally:
        model.generation_config = own
    row.seconds = time.perf_counter() - started


class _Chosen(LogitsProcessor):  # type: ignore[misc]
    """Has `generate` take the token that the row chooses."""

    def __init__(self, row: GenerationRow, started: float) -> None:
        self._row, self._started = row, started

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Logits [1, vocabulary] of which one is not minus infinity."""
        row = self._row
        [token] = choose([row], scores.float())
        row.take(token)
        if len(row.tokens) == 1:
            row.prompt_seconds = time.perf_counter() - self._started
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([token], device=scores.device), 0.0)


class _Ended(StoppingCriteria):  # type: ignore[misc]
    """Whether the row has ended."""

    def __init__(self, row: GenerationRow) -> None:
        self._row = row

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """[1] truth value."""
        return torch.tensor([bool(self._row.ended)], device=input_ids.device)
