"""How many tokens go through the model at a time, when the user leaves that to evalkit."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from evalkit.compatibility.transformers import attention_of

CPU_TOKENS = 2048
"""Enough to keep two cores' matrix units full; more only costs memory (measured: docs/measurements/performance.md)."""
GPU_TOKENS = 65536
MIN_TOKENS = 128
_ROW = 2048
"""Tokens that one token may see, for the size of its masks."""
_SHARE = 0.5
"""Of the free memory, what one batch may take by the estimate below."""


def auto_budget(model: Any) -> int:
    """Tokens of a batch that should fit in half of the device's free memory, at most what keeps it busy.

    Args:
        model: the loaded model, whose weights are already in memory.
    """
    device = model.get_output_embeddings().weight.device
    if device.type == "cuda":
        free, most = torch.cuda.mem_get_info(device)[0], GPU_TOKENS
    else:
        free, most = psutil.virtual_memory().available, CPU_TOKENS
    fits = int(free * _SHARE / bytes_per_token(model))
    return max(MIN_TOKENS, min(most, fits))


def bytes_per_token(model: Any) -> int:
    """Rough peak of the activations one token needs in one layer, mask row and input included."""
    config = model.config.get_text_config()
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    size = model.get_output_embeddings().weight.element_size()
    # Eager attention keeps scores for every head; the others keep the mask alone
    heads = getattr(config, "num_attention_heads", 0) if attention_of(config) == "eager" else 0
    return int(size * (8 * hidden + 4 * inner + (1 + 2 * heads) * _ROW))
