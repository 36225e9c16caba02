"""A static key-value cache for a batch of prompts, and attention of prompt chunks on it with few copies.

In: the number of layers, rows and columns. Out: transformers `Cache` views of parts of it. Prompts are left-padded to
end in the same column, so all rows write the keys and values of their next token to the next column. Padding is masked.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from evalkit.compatibility.transformers import attention_of
from evalkit.scoring.attention import SPECIAL, attention_named


class Storage:
    """Keys and values of every layer, [rows, heads, columns, size]; a layer is allocated at its first write."""

    def __init__(self, layers: int, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.keys: list[torch.Tensor | None] = [None] * layers
        self.values: list[torch.Tensor | None] = [None] * layers

    def view(self, rows: slice, start: int, used: int) -> Cache:
        """Return a cache over some rows that starts at column `start` and contains `used` tokens."""
        return Cache(layers=[_LayerView(self, layer, rows, start, used) for layer in range(len(self.keys))])

    def copy_tokens(self, source: tuple[int, int], target: tuple[int, int], tokens: int) -> None:
        """Copy the first tokens of one prompt to another; both are given as (row, first column)."""
        for states in (*self.keys, *self.values):
            if states is not None:
                (row, start), (other, begin) = source, target
                states[other, :, begin : begin + tokens] = states[row, :, start : start + tokens]

    def put(self, layer: int, rows: slice, column: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values, [rows, heads, tokens, size], starting at a column."""
        for layers, states in ((self.keys, keys), (self.values, values)):
            stored = layers[layer]
            if stored is None:
                _, heads, _, size = states.shape
                # Zeros, since masked columns are multiplied too: attention weight 0 times NaN is NaN
                stored = layers[layer] = states.new_zeros(self.rows, heads, self.columns, size)
            stored[rows, :, column : column + states.shape[2]] = states


class _LayerView(DynamicLayer):  # type: ignore[misc]
    """A view of one layer for some rows."""

    def __init__(self, storage: Storage, layer: int, rows: slice, start: int, used: int) -> None:
        super().__init__()
        self._storage, self._layer, self._rows, self._start, self._used = storage, layer, rows, start, used
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, [rows, heads, tokens, size]; return all keys and values so far."""
        end = self._start + self._used
        self._storage.put(self._layer, self._rows, end, key_states, value_states)
        self._used += key_states.shape[2]
        keys, values = self._storage.keys[self._layer], self._storage.values[self._layer]
        assert keys is not None and values is not None
        columns = slice(self._start, self._start + self._used)
        return keys[self._rows, :, columns], values[self._rows, :, columns]

    def get_seq_length(self) -> int:
        """Return the number of stored tokens."""
        return self._used


NAME = "evalkit_chunks"
"""Name under which this attention is registered with transformers."""


def chunked_attention(model: Any) -> AbstractContextManager[None]:
    """Switch a model to this attention if it uses transformers' `sdpa` on a CPU."""
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
        attended: torch.Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **settings
        )[0]
        return attended, None
    shared = query.shape[1] != key.shape[1]
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=shared
    )
    return attended.transpose(1, 2).contiguous(), None
