"""A static key-value cache for a batch of prompts, and attention of prompt chunks on it with few copies.

In: the number of layers, rows and columns. Out: transformers `Cache` views of parts of it. Prompts are left-padded to
end in the same column, so all rows write the keys and values of their next token to the next column. Padding is masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from evalkit.compatibility.transformers import attention_of
from evalkit.scoring.attention import SPECIAL, attention_named

NAME = "evalkit_chunks"
"""Name under which the attention of this module is registered with transformers."""


class Storage:
    """Keys and values of every layer, [rows, heads, columns, size]; a layer is allocated at its first write."""

    def __init__(self, layers: int, rows: int, columns: int) -> None:
        self._rows, self._columns = rows, columns
        self._layers: list[tuple[torch.Tensor, ...]] = [()] * layers

    def states(self) -> Iterator[torch.Tensor]:
        """Yield the keys and the values of each layer."""
        for layer in self._layers:
            yield from layer

    def view(self, rows: slice, start: int, used: int) -> Cache:
        """Return a cache over some rows that starts at column `start` and contains `used` tokens."""
        return Cache(layers=[_LayerView(self, layer, rows, start, used) for layer in range(len(self._layers))])

    def copy_tokens(self, source: tuple[int, int], target: tuple[int, int], tokens: int) -> None:
        """Copy the first tokens of one prompt to another; both are given as (row, first column)."""
        (row, start), (other, begin) = source, target
        for states in self.states():
            states[other, :, begin : begin + tokens] = states[row, :, start : start + tokens]

    def put(self, layer: int, rows: slice, column: int, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Write new keys and values, [rows, heads, tokens, size], from a column on; return all of the layer."""
        if not self._layers[layer]:
            # Zeros, since masked columns are multiplied too: attention weight 0 times NaN is NaN
            self._layers[layer] = tuple(
                states.new_zeros(self._rows, states.shape[1], self._columns, states.shape[3]) for states in new
            )
        for stored, states in zip(self._layers[layer], new, strict=True):
            stored[rows, :, column : column + states.shape[2]] = states
        return self._layers[layer]


class _LayerView(DynamicLayer):  # type: ignore[misc]
    def __init__(self, storage: Storage, layer: int, rows: slice, start: int, used: int) -> None:
        super().__init__()
        self._storage, self._layer, self._rows, self._start, self._used = storage, layer, rows, start, used
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, [rows, heads, tokens, size]; return all keys and values so far."""
        stored = self._storage.put(self._layer, self._rows, self._start + self._used, key_states, value_states)
        self._used += key_states.shape[2]
        keys, values = (states[self._rows, :, self._start : self._start + self._used] for states in stored)
        return keys, values

    def get_seq_length(self) -> int:
        return self._used


def chunked_attention(model: Any) -> AbstractContextManager[None]:
    """Switch a model to the attention of this module if it uses transformers' `sdpa` on a CPU."""
    # Other models compare the config's name in their own code and treat an unknown name as eager attention
    if not (
        model.is_backend_compatible()
        and attention_of(model.config.get_text_config()) == "sdpa"
        and model.get_output_embeddings().weight.device.type == "cpu"
    ):
        return nullcontext()
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    return attention_named(model, NAME)


def _mask(*sizes: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> torch.Tensor | None:
    """Return transformers' boolean mask as an additive mask, [batch, 1, queries, keys]."""
    visible: torch.Tensor | None = sdpa_mask(*sizes, **settings)
    if visible is None or visible.dtype != torch.bool:
        return visible
    # Not minus infinity: a row without a visible key would be NaN
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with transformers' signature: queries [batch, heads, tokens, size] → [batch, tokens, heads, size]."""
    # transformers' own function handles or rejects special arguments
    if attention_mask is None or query.shape[2] == 1 or any(settings.get(name) is not None for name in SPECIAL):
        attended, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
        return attended, None
    shared = query.shape[1] != key.shape[1]
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=shared
    )
    return attended.transpose(1, 2).contiguous(), None
