"""Default token budget: how many tokens a batch may have, from the device's memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from evalkit.compatibility.transformers import attention_of
from evalkit.models.parts import layers_of
from evalkit.models.placement import computing_devices
from evalkit.scoring.memory import device_bytes

CPU_TOKENS = 2048
"""Enough to saturate two cores; more only costs memory (measured: docs/measurements/performance.md)."""
GPU_TOKENS = 65536
MIN_TOKENS = 128
_ROW = 2048
"""Assumed length of a token's mask row."""
_SHARE = 0.25
"""Share of the memory beside the weights that one batch may use by the estimate below."""


def auto_budget(model: Any) -> int:
    """Return a token budget that fits in the device's memory beside the weights, at most what saturates the device.

    It does not depend on how much memory other processes use.

    Args:
        model: the loaded model, whose weights are already in memory.
    """
    memory = memory_beside_weights(model)
    most = GPU_TOKENS if next(iter(memory)).type == "cuda" else CPU_TOKENS
    # A batch's states are on each device in turn
    fits = int(min(memory.values()) * _SHARE / bytes_per_token(model))
    return max(MIN_TOKENS, min(most, fits))


def memory_beside_weights(model: Any) -> dict[torch.device, int]:
    """Return each computing device's memory beside the weights, in bytes; the device of the embedding is the first.

    Layers that are stored elsewhere run on that device, so it has room for the largest of them.
    """
    weights = dict.fromkeys(computing_devices(model), 0)
    for one in model.parameters():
        if not one.is_meta:
            weights[one.device] += weight_bytes([one])
    stored = (weight_bytes(one for one in layer.parameters() if one.is_meta) for layer in layers_of(model))
    weights[next(iter(weights))] += max(stored, default=0)
    return {device: device_bytes(device) - own for device, own in weights.items()}


def weight_bytes(weights: Iterable[torch.Tensor]) -> int:
    """Return the bytes of weights."""
    return sum(one.numel() * one.element_size() for one in weights)


def bytes_per_token(model: Any) -> int:
    """Estimate the peak activation memory of one token in one layer, mask row and input included."""
    config = model.config.get_text_config()
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    size = model.get_output_embeddings().weight.element_size()
    # Eager attention stores scores for every head; the others store the mask only
    heads = getattr(config, "num_attention_heads", 0) if attention_of(config) == "eager" else 0
    return activation_bytes(hidden, inner, size, heads)


def activation_bytes(hidden: int, inner: int, size: int, heads: int = 0) -> int:
    """Return the estimate of `bytes_per_token` from sizes.

    Args:
        hidden: hidden size.
        inner: intermediate size.
        size: bytes of a number.
        heads: heads whose scores are stored.
    """
    return int(size * (8 * hidden + 4 * inner + (1 + 2 * heads) * _ROW))
