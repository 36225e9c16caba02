"""Attention maps, one layer at a time.

In: a model and token ids. Out: each layer's effective map, passed to a callback as soon as the layer has run and then
freed, so that only one layer's map is in memory.

The effective map contains the weights of the values: the softmax of vanilla and integral attention, the signed map of
cog attention, A₁ − λA₂ of differential attention (before the norm over a pair of heads).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from evalkit.compatibility.transformers import attention_of
from evalkit.errors import CheckpointError, UsageError
from evalkit.models.parts import base_of

Use = Callable[[int, torch.Tensor], None]
"""Callback with a layer's number, from 0, and its map, [batch, heads, query, key]."""


def stream_attention_maps(
    model: Any,
    input_ids: torch.Tensor,
    use: Use,
    *,
    attention_mask: torch.Tensor | None = None,
    layers: Collection[int] | None = None,
) -> None:
    """Run a model once and pass its attention maps to a callback.

    Layers after the last requested one are not run. The maps are in the model's dtype: analyse in float32. During the
    call the model uses `eager` attention, the only implementation that returns maps.

    Args:
        model: a Hugging Face causal language model.
        input_ids: [batch, tokens].
        use: called with (layer, map) in the layers' order; a map is [batch, heads, query, key], and [batch, pairs of
            heads, query, key] of differential attention.
        attention_mask: [batch, tokens], 0 where padded; maps of padded queries are undefined.
        layers: numbers from 0; None: all.

    Raises:
        UsageError: there is no such layer.
        CheckpointError: the model's attention layers do not return maps, or not the effective ones.
    """
    modules = _attention_modules(model)
    requested = set(modules if layers is None else layers)
    if unknown := sorted(requested - set(modules)):
        raise UsageError(f"no attention layer {unknown[0]}; the model's are {min(modules)} to {max(modules)}")
    if not requested:
        return
    hooks = [
        modules[layer].register_forward_hook(_map_hook(layer, use, layer == max(requested))) for layer in requested
    ]
    try:
        with _eager(model), torch.no_grad():
            base_of(model)(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    except _LastLayerDone:
        pass
    finally:
        for hook in hooks:
            hook.remove()


def attention_map(
    model: Any, input_ids: torch.Tensor, layer: int, *, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the effective map of one layer, [batch, heads, query, key]; otherwise as `stream_attention_maps`."""
    found: list[torch.Tensor] = []
    stream_attention_maps(
        model, input_ids, lambda _, seen: found.append(seen), attention_mask=attention_mask, layers=[layer]
    )
    return found[0]


class _LastLayerDone(Exception):
    """The last requested layer has run."""


def _attention_modules(model: Any) -> dict[int, Any]:
    """Return the attention modules by layer, of the class that transformers registers for the model."""
    kind: Any = model.can_record_outputs.get("attentions")
    if not isinstance(kind, type):
        raise CheckpointError(f"{type(model).__name__} does not declare its attention modules, so it has no maps")
    if kind.__name__ == "DiffLlamaAttention":
        raise CheckpointError(
            "DiffLlama returns the two softmax maps of each pair and not their difference; "
            "convert it to an evalkit checkpoint with `evalkit models convert`"
        )
    attending: list[Any] = [module for module in model.modules() if isinstance(module, kind)]
    return {module.layer_idx: module for module in attending}


def _map_hook(layer: int, use: Use, last: bool) -> Callable[[Any, Any, Any], None]:
    def hook(module: Any, _: Any, output: Any) -> None:
        if output[1] is None:
            raise CheckpointError(f"{type(module).__name__} returns no attention map")
        use(layer, output[1])
        if last:
            raise _LastLayerDone

    return hook


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    before = attention_of(model.config)
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
