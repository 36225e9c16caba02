"""Properties of a model's class and config that determine how it is scored: kernels, length limits, token budget.

In: a loaded model, or its config. Out: kernels and token counts. What depends on the weights is measured by running the
model (`sharing.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from evalkit.compatibility.transformers import attention_of
from evalkit.models.context.stretch import BY_LENGTH_TYPE
from evalkit.models.loading.files import WINDOW_KEYS
from evalkit.models.memory import device_bytes, logit_tokens
from evalkit.models.parts import computing_devices, layers_of

_CPU_TOKENS = 2048
"""Enough to saturate two cores; more only costs memory (measured: docs/measurements/commands.md)."""
_GPU_TOKENS = 65536
_ROW = 2048
_SHARE = 0.25
"""Share of the memory beside the weights that one batch may use by the estimate below."""


def kernels_for(model: Any) -> tuple[str, ...]:
    """Return the tree attention kernels that may work for a model, the fastest first."""
    if not model.is_backend_compatible() or attention_of(model.config.get_text_config()) != "sdpa":
        return ("dense",)
    # FlexAttention's mask is on one device
    flex = model.device.type == "cuda" and len(computing_devices(model)) == 1
    return ("flex", "tiles", "dense") if flex else ("tiles", "dense")


def window_of(config: Any) -> int:
    """Return a model's context window in tokens; 2,048 if the config does not give it."""
    text = config.get_text_config()
    windows = (getattr(text, key, None) for key in WINDOW_KEYS)
    return next((value for value in windows if isinstance(value, int) and value > 0), 2048)


def longest_shared(config: Any) -> int | None:
    """Return the greatest sequence length at which prefixes may be shared; None without a limit.

    The tree mask replaces a sliding window, beyond which tokens no longer see everything before them. Rotary embeddings
    that depend on the longest position of a batch change for all its sequences.
    """
    text = config.get_text_config()
    lengths = []
    kinds = getattr(text, "layer_types", None)
    if kinds is None or any("sliding" in kind or "chunked" in kind for kind in kinds):
        lengths.append(getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None))
    lengths += rotary_lengths(config)
    return min((int(length) for length in lengths if length), default=None)


def rotary_lengths(config: Any) -> list[int | None]:
    """Return the training lengths of rotary embeddings that depend on the longest position of a batch."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    # Some configs have one set of parameters for each kind of layer
    sets = rope.values() if rope and all(isinstance(p, dict) for p in rope.values()) else [rope]
    return [
        parameters.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", None)
        for parameters in sets
        if parameters.get("rope_type") in ("longrope", "dynamic", BY_LENGTH_TYPE)
    ]


def rotary_limit(config: Any) -> int | None:
    """Return the least of the `rotary_lengths`, up to which these embeddings do not change; None without a limit."""
    return min((length for length in rotary_lengths(config) if length), default=None)


def auto_budget(model: Any) -> int:
    """Return a token budget that fits beside the weights, whatever other processes use, and saturates the device."""
    memory = memory_beside_weights(model)
    most = _GPU_TOKENS if next(iter(memory)).type == "cuda" else _CPU_TOKENS
    # Estimate of the peak activation memory of one token in one layer, mask row and input included
    config = model.config.get_text_config()
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    size = model.get_output_embeddings().weight.element_size()
    # Eager attention stores scores for every head; the others store the mask only
    heads = getattr(config, "num_attention_heads", 0) if attention_of(config) == "eager" else 0
    bytes_per_token = int(size * (8 * hidden + 4 * inner + (1 + 2 * heads) * _ROW))
    # A batch's states are on each device in turn
    return max(128, min(most, int(min(memory.values()) * _SHARE / bytes_per_token)))


def most_logit_tokens(model: Any) -> int:
    """Return the tokens whose logits the memory beside the weights holds."""
    return logit_tokens(min(memory_beside_weights(model).values()), model.get_output_embeddings().weight.shape[0])


def memory_beside_weights(model: Any) -> dict[torch.device, int]:
    """Return each computing device's memory beside the weights, in bytes; the device of the embedding is the first.

    Layers that are stored elsewhere run on that device, so it has room for the largest of them.
    """
    weights = dict.fromkeys(computing_devices(model), 0)
    for weight in model.parameters():
        if not weight.is_meta:
            weights[weight.device] += weight.nbytes
    stored = (sum(weight.nbytes for weight in layer.parameters() if weight.is_meta) for layer in layers_of(model))
    weights[next(iter(weights))] += max(stored, default=0)
    return {device: device_bytes(device) - own for device, own in weights.items()}
