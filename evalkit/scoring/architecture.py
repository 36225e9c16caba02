"""Properties of a model's class and config that determine how it is scored: attention kernels and length limits.

In: a loaded model, or its config. Out: kernels and token counts. What depends on the weights is measured by running the
model (`sharing.py`).
"""

from __future__ import annotations

from typing import Any

from evalkit.compatibility.transformers import attention_of
from evalkit.models.config_check import WINDOW_KEYS
from evalkit.models.placement import computing_devices
from evalkit.models.stretch import BY_LENGTH_TYPE

_WINDOW = 2048
"""Context window in tokens where the config does not give one."""


def kernels_for(model: Any) -> tuple[str, ...]:
    """Return the tree attention kernels that may work for a model, the fastest first."""
    if not model.is_backend_compatible() or attention_of(model.config.get_text_config()) != "sdpa":
        return ("dense",)
    # FlexAttention's mask is on one device
    flex = model.device.type == "cuda" and len(computing_devices(model)) == 1
    return ("flex", "tiles", "dense") if flex else ("tiles", "dense")


def window_of(config: Any) -> int:
    """Return a model's context window in tokens."""
    text = config.get_text_config()
    windows = (getattr(text, key, None) for key in WINDOW_KEYS)
    return next((value for value in windows if isinstance(value, int) and value > 0), _WINDOW)


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
