"""Attention maps, one layer at a time.

In: a model and token ids. Out: each layer's effective map, passed to a callback as soon as the layer has run and then
freed, so that only one layer's map is in memory. `map_blocks.py` has the same maps in blocks of rows.

The effective map contains the weights of the values: the softmax of vanilla and integral attention, the signed map of
cog attention, A₁ − λA₂ of differential attention (before the norm over a pair of heads).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from evalkit.analysis.layers import attention_modules, names_attention, run_layers
from evalkit.compatibility.transformers import attention_of
from evalkit.errors import CheckpointError, UsageError

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
    modules = requested_modules(attention_modules(model), layers)
    if not modules:
        return
    tokens = input_ids.shape[1]

    def after(layer: int, module: Any, output: Any) -> None:
        seen = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if seen is None or seen.dim() != 4 or seen.shape[2:] != (tokens, tokens):
            raise CheckpointError(f"{type(module).__name__} returns no attention map")
        use(layer, seen)

    with _eager(model):
        run_layers(model, modules, input_ids, after, attention_mask=attention_mask, maps=not names_attention(model))


def attention_map(
    model: Any, input_ids: torch.Tensor, layer: int, *, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the effective map of one layer, [batch, heads, query, key]; otherwise as `stream_attention_maps`."""
    found: list[torch.Tensor] = []
    stream_attention_maps(
        model, input_ids, lambda _, seen: found.append(seen), attention_mask=attention_mask, layers=[layer]
    )
    return found[0]


def requested_modules(modules: Mapping[int, Any], layers: Collection[int] | None) -> dict[int, Any]:
    """Select the modules of some layers, in order; None: of all.

    Raises:
        UsageError: there is no such layer.
    """
    requested = set(modules if layers is None else layers)
    if unknown := sorted(requested - set(modules)):
        raise UsageError(f"no attention layer {unknown[0]}; the model's are {min(modules)} to {max(modules)}")
    return {layer: modules[layer] for layer in sorted(requested)}


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    before = attention_of(model.config)
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
