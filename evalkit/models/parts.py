"""Parts of a loaded transformers model that evalkit runs separately.

In: a causal language model. Out: its base model, its layers, and rotary modules whose state depends on past lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_ORIGINAL = "original_inv_freq"


def base_of(model: Any) -> Any:
    """Return the base model of a causal language model, which computes hidden states: all but the output head.

    For a class that is its own base model (Llama 4's text model), return the submodule with the input embedding.
    """
    base = model.base_model
    if base is not model:
        return base
    embedding = model.get_input_embeddings()
    return next(child for child in model.children() if any(module is embedding for module in child.modules()))


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a causal language model, in order; none where they are not a list of modules."""
    from torch.nn import ModuleList

    layers = model.config.get_text_config().num_hidden_layers
    lists = (module for module in base_of(model).modules() if isinstance(module, ModuleList))
    return next((list(found) for found in lists if len(found) == layers), [])


def dynamic_modules(model: Any) -> list[Any]:
    """Return the rotary modules of a loaded model that keep the length of the longest sequence."""
    return [module for module in model.modules() if "dynamic" in _types(module) and hasattr(module, "inv_freq")]


def forget_lengths(modules: list[Any]) -> None:
    """Reset modules from `dynamic_modules` to their state after loading."""
    for module in modules:
        # One per layer type, with the type as prefix
        for name in [name for name in dir(module) if name.endswith(_ORIGINAL)]:
            prefix = name.removesuffix(_ORIGINAL)
            original = getattr(module, name).to(getattr(module, f"{prefix}inv_freq").device)
            module.register_buffer(f"{prefix}inv_freq", original, persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def cache_reset_lengths(model: Any, trained: Sequence[int | None]) -> frozenset[int]:
    """Return the sequence lengths at which transformers' `generate` drops its cache and recomputes all keys.

    Phi-3 does so one token past the window of training. The lengths are found by calling the model's own
    `prepare_inputs_for_generation`.

    Args:
        model: a causal language model.
        trained: windows of training of its length-dependent rotary embeddings, in tokens.
    """
    import torch

    if not trained:
        return frozenset()
    own = getattr(model.config.get_text_config(), "original_max_position_embeddings", None)
    found = []
    for length in {int(length) for length in (own, *trained) if length}:
        ids = torch.zeros(1, length + 1, dtype=torch.long, device=model.device)
        step = model.prepare_inputs_for_generation(
            ids,
            past_key_values=_FilledCache(length),
            attention_mask=torch.ones_like(ids),
            use_cache=True,
            next_sequence_length=1,
        )
        found += [length + 1] if step["input_ids"].shape[1] > 1 else []
    return frozenset(found)


class _FilledCache:
    """Stand-in for a cache with a given number of tokens."""

    is_compileable = False

    def __init__(self, length: int) -> None:
        self._length = length

    def get_seq_length(self, *_: Any) -> int:
        return self._length


def _types(module: Any) -> set[Any]:
    kinds = getattr(module, "rope_type", None)
    return set(kinds.values()) if isinstance(kinds, dict) else {kinds}
