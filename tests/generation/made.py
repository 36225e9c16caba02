"""Prompts for the models of `tests/models/variants/building.py`, and transformers' own continuations of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from evalkit.generation.prompts import Prompt, Stops
from tests.models.variants.building import VOCABULARY

NEW = 14
"""Tokens of each continuation, unless it ends before."""


def tokens(*lengths: int, seed: int = 0, beginning: int = 0) -> list[np.ndarray]:
    """Random token ids; the first `beginning` of each are the same."""
    dice = np.random.default_rng(seed)
    shared = dice.integers(1, VOCABULARY, beginning)
    return [np.concatenate([shared, dice.integers(1, VOCABULARY, length - beginning)]) for length in lengths]


def prompts(many: Sequence[np.ndarray], most: int = NEW, **settings: Any) -> list[Prompt]:
    return [Prompt(number, ids, most, Stops(**settings)) for number, ids in enumerate(many)]


def by_transformers(
    model: Any, ids: np.ndarray, most: int = NEW, ends: Sequence[int] = (), barred: bool = False
) -> list[int]:
    """Return the new tokens of greedy `generate` on a single prompt, including the end token."""
    given = torch.from_numpy(ids[None]).to(model.device)
    options: dict[str, Any] = {"eos_token_id": sorted(ends)} if ends else {}
    if barred:
        options["min_new_tokens"] = 1
    with torch.inference_mode():
        options |= {"max_new_tokens": most, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
        out = model.generate(given, attention_mask=torch.ones_like(given), **options)
    return [int(token) for token in out[0, given.shape[1] :]]
