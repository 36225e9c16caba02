"""Attention maps, one layer at a time.

In: a model and token ids. Out: each layer's effective map, handed to a function as soon as the layer has run and then
forgotten, so that memory holds one layer's map and not all of them.

The effective map is what the values are summed with: the softmax of vanilla and integral attention, the signed map of
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
"""Given a layer's number, from 0, and its map, [batch, heads, query, key]."""


def stream_attention_maps(
    model: Any,
    input_ids: torch.Tensor,
    use: Use,
    *,
    attention_mask: torch.Tensor | None = None,
    layers: Collection[int] | None = None,
) -> None:
    """Run a model once and hand over its attention maps as they come.

    Layers past the last one asked for are not run. The maps are in the model's dtype: analyse in float32. The model
    computes by `eager` attention meanwhile, which alone makes whole maps.

    Args:
        model: a Hugging Face causal language model.
        input_ids: [batch, tokens].
        use: called with (layer, map) in the layers' order; a map is [batch, heads, query, key], and [batch, pairs of
            heads, query, key] of differential attention.
        attention_mask: [batch, tokens], 0 where padded; maps of padded queries mean nothing.
        layers: numbers from 0; None: all.

    Raises:
        UsageError: there is no such layer.
        CheckpointError: the model's attention layers do not give maps, or not the effective ones.
    """
    modules = _attention_modules(model)
    wanted = set(modules if layers is None else layers)
    if unknown := sorted(wanted - set(modules)):
        raise UsageError(f"no attention layer {unknown[0]}; the model's are {min(modules)} to {max(modules)}")
    if not wanted:
        return
    hooks = [modules[layer].register_forward_hook(_handing(layer, use, layer == max(wanted))) for layer in wanted]
    try:
        with _eager(model), torch.no_grad():
            base_of(model)(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    except _Enough:
        pass
    finally:
        for hook in hooks:
            hook.remove()


def attention_map(
    model: Any, input_ids: torch.Tensor, layer: int, *, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The effective map of one layer, [batch, heads, query, key]; arguments and errors as `stream_attention_maps`'s."""
    found: list[torch.Tensor] = []
    stream_attention_maps(
        model, input_ids, lambda _, seen: found.append(seen), attention_mask=attention_mask, layers=[layer]
    )
    return found[0]


class _Enough(Exception):
    """The last layer that was asked for has run."""


def _attention_modules(model: Any) -> dict[int, Any]:
    """The attention modules by layer, as transformers itself knows them."""
    kind: Any = model.can_record_outputs.get("attentions")
    if not isinstance(kind, type):
        raise CheckpointError(f"{type(model).__name__} does not tell which of its modules attend, so it gives no maps")
    if kind.__name__ == "DiffLlamaAttention":
        raise CheckpointError(
            "DiffLlama gives the two softmax maps of each pair and not their difference; "
            "make an evalkit checkpoint of it with `evalkit models convert`"
        )
    attending: list[Any] = [module for module in model.modules() if isinstance(module, kind)]
    return {module.layer_idx: module for module in attending}


def _handing(layer: int, use: Use, last: bool) -> Callable[[Any, Any, Any], None]:
    def hand(module: Any, _: Any, output: Any) -> None:
        if output[1] is None:
            raise CheckpointError(f"{type(module).__name__} gives no attention map")
        use(layer, output[1])
        if last:
            raise _Enough

    return hand


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    before = attention_of(model.config)
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
