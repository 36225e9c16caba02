"""transformers' `sdpa` attention for a chunk of a prompt, with less copying; the same numbers.

Its own makes the boolean mask additive again in every layer, and copies keys and values for each query head that shares
them. Here the mask is additive from the start, and shared heads stay shared: of a prompt of 7,000 tokens that is an
eighth of the time on a CPU. A GPU's kernels for shared heads take no mask, so there nothing is changed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from evalkit.compatibility.transformers import attention_of
from evalkit.scoring.attention import SPECIAL, attention_named

NAME = "evalkit_chunks"
"""Of this attention among transformers' own."""


def attending_in_chunks(model: Any) -> AbstractContextManager[None]:
    """Have a model's attention be this one, where its own is transformers' `sdpa` on a CPU."""
    # Others than these ask the config's name in their own code, and would take an unknown one for eager attention
    if not (
        model.is_backend_compatible()
        and attention_of(model.config.get_text_config()) == "sdpa"
        and model.get_output_embeddings().weight.device.type == "cpu"
    ):
        return nullcontext()
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    return attention_named(model, NAME)


def _mask(*sizes: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> torch.Tensor | None:
    """Booleans of transformers' → [batch, 1, queries, keys], to be added to the logits."""
    visible: torch.Tensor | None = sdpa_mask(*sizes, **settings)
    if visible is None or visible.dtype != torch.bool:
        return visible
    # Not the infinite: a row of a batch that sees nothing would be NaN
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls, the mask by place or by name.

    Queries [batch, heads, tokens, size] → [batch, tokens, heads, size].
    """
    # What is special, transformers' function sees to, or refuses
    if attention_mask is None or query.shape[2] == 1 or any(settings.get(name) is not None for name in SPECIAL):
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **settings
        )
        return found
    shared = query.shape[1] != key.shape[1]
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=shared
    )
    return attended.transpose(1, 2).contiguous(), None
