"""Parts of a loaded transformers model that evalkit runs separately, and the devices that they are on.

In: a causal language model. Out: its base model, its layers, and rotary modules whose state depends on past lengths.
"""

from __future__ import annotations

from typing import Any

import torch

from evalkit.errors import UsageError

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
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = (module for module in base_of(model).modules() if isinstance(module, torch.nn.ModuleList))
    return next((list(modules) for modules in lists if len(modules) == layers), [])


def dynamic_modules(model: Any) -> list[Any]:
    """Return the rotary modules of a loaded model that keep the length of the longest sequence."""
    modules = (module for module in model.modules() if hasattr(module, "inv_freq"))
    # A name, or a dict of names by type of layer
    return [module for module in modules if "dynamic" in str(getattr(module, "rope_type", ""))]


def forget_lengths(modules: list[Any]) -> None:
    """Reset modules from `dynamic_modules` to their state after loading."""
    for module in modules:
        # One per layer type, with the type as prefix
        for name in [name for name in dir(module) if name.endswith(_ORIGINAL)]:
            prefix = name.removesuffix(_ORIGINAL)
            original = getattr(module, name).to(getattr(module, f"{prefix}inv_freq").device)
            module.register_buffer(f"{prefix}inv_freq", original, persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def resolve_device(device: str) -> str:
    """Return the torch device for a `ModelSpec.device`. Raises `UsageError` if this machine has no such device."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[kind]
    if int(index or 0) >= count:
        raise UsageError(f"--device {device}: this machine has {count or 'no'} {kind} device(s) for torch")
    return device


def computing_devices(model: Any) -> tuple[torch.device, ...]:
    """Return the devices that hold a loaded model's weights, that of the embedding first; without stored weights."""
    own = model.get_input_embeddings().weight.device
    return tuple(dict.fromkeys((own, *(weight.device for weight in model.parameters() if not weight.is_meta))))
