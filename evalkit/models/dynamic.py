"""Rotary frequencies that a model adapts to the length of what it sees.

Under rope_type "dynamic", transformers keeps those of the longest sequence so far until one comes that is shorter than
the window the model was trained on. What is computed next would depend on what came before. Under "longrope" they are
others beyond that window, and some models' `generate` computes all keys anew there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_ORIGINAL = "original_inv_freq"


def dynamic_modules(model: Any) -> list[Any]:
    """The rotary modules of a loaded model that remember the longest sequence."""
    return [module for module in model.modules() if "dynamic" in _types(module) and hasattr(module, "inv_freq")]


def forget_lengths(modules: list[Any]) -> None:
    """Have modules of `dynamic_modules` begin again, as after loading."""
    for module in modules:
        # One for each kind of layer, whose name stands before
        for name in [name for name in dir(module) if name.endswith(_ORIGINAL)]:
            kind = name.removesuffix(_ORIGINAL)
            original = getattr(module, name).to(getattr(module, f"{kind}inv_freq").device)
            module.register_buffer(f"{kind}inv_freq", original, persistent=False)
            setattr(module, f"{kind}max_seq_len_cached", module.original_max_seq_len)


def lengths_computed_anew(model: Any, trained: Sequence[int | None]) -> frozenset[int]:
    """Tokens of a text at which transformers' `generate` drops its cache and computes all keys anew.

    Phi-3's does so one past the window that it was trained on. Each model is asked: it prepares the inputs of its next
    step by itself.

    Args:
        model: a causal language model.
        trained: windows of those of its rotary embeddings that depend on the length.
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
            past_key_values=_Filled(length),
            attention_mask=torch.ones_like(ids),
            use_cache=True,
            next_sequence_length=1,
        )
        found += [length + 1] if step["input_ids"].shape[1] > 1 else []
    return frozenset(found)


class _Filled:
    """What a model may ask of a cache of so many tokens."""

    is_compileable = False

    def __init__(self, length: int) -> None:
        self._length = length

    def get_seq_length(self, *_: Any) -> int:
        return self._length


def _types(module: Any) -> set[Any]:
    kinds = getattr(module, "rope_type", None)
    return set(kinds.values()) if isinstance(kinds, dict) else {kinds}
