"""Parts of a loaded transformers model that evalkit runs separately.

In: a causal language model. Out: its base model, its layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evalkit.errors import UsageError

NONE, AUTO = "none", "auto"
STORED = ("cpu", "disk")
"""Places that only store weights beside a GPU; "cpu" computes where no GPU is named."""
_PART = re.compile(r"(cuda:\d{1,3}|cpu|disk)=(\d{1,4})")


@dataclass(frozen=True)
class LayerCounts:
    """Numbers of consecutive layers by device, such as those of "cuda:0=12,cuda:1=12,cpu=8"."""

    given: str
    """The option's value."""
    parts: tuple[tuple[str, int], ...]
    """(device, number of layers) in the layers' order."""

    @property
    def main(self) -> str:
        """Return the device with the embedding and the head: the first GPU, or the CPU."""
        return next((device for device, _ in self.parts if device not in STORED), "cpu")

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the device of each layer."""
        return tuple(device for device, number in self.parts for _ in range(number))


def layer_counts(device_map: str) -> LayerCounts | None:
    """Return the numbers of layers by device; None for "none" and "auto".

    Raises:
        UsageError: the value is neither of them.
    """
    if device_map in (NONE, AUTO):
        return None
    found = [_PART.fullmatch(part) for part in device_map.split(",")]
    parts = tuple((part[1], int(part[2])) for part in found if part)
    if len(parts) < len(found) or not all(number for _, number in parts):
        raise UsageError(
            f"--device-map {device_map}: expected none, auto, or numbers of layers by device, such as "
            "cuda:0=12,cuda:1=12,cpu=8 (cuda:N, cpu or disk)"
        )
    devices = [device for device, _ in parts]
    if twice := [device for device in devices if devices.count(device) > 1]:
        raise UsageError(f"--device-map {device_map}: names {twice[0]} twice")
    if devices == ["disk"]:
        raise UsageError(f"--device-map {device_map}: a disk does not compute; name cuda:N or cpu too")
    return LayerCounts(device_map, parts)


def check_device_map(device: str, device_map: str) -> None:
    """Raise a `UsageError` for an invalid value of `--device-map`, or one beside another `--device` than "auto"."""
    layer_counts(device_map)
    if device_map != NONE and device != "auto":
        raise UsageError(
            f"--device {device} and --device-map {device_map} both choose the device; leave one of them out"
        )


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


_ORIGINAL = "original_inv_freq"


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
