"""Rotary frequencies that a model adapts to the length of what it sees.

Under rope_type "dynamic", transformers keeps those of the longest sequence so far until one comes that is shorter than
the window the model was trained on. What is computed next would depend on what came before.
"""

from __future__ import annotations

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


def _types(module: Any) -> set[Any]:
    kinds = getattr(module, "rope_type", None)
    return set(kinds.values()) if isinstance(kinds, dict) else {kinds}
