"""Keys and values of a batch of prompts, in memory that is allocated once.

In: how many rows and columns. Out: transformers caches over parts of it. Prompts end in the same column, so that all
rows write their next token's keys and values into the next one; what stands left of a shorter prompt is masked.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer


class Storage:
    """Keys and values of every layer, [rows, heads, columns, size]; allocated when a layer's first keys come.

    Args:
        layers: of the model.
        rows: prompts.
        columns: most tokens of any of them, generated ones included.
    """

    def __init__(self, layers: int, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.keys: list[torch.Tensor | None] = [None] * layers
        self.values: list[torch.Tensor | None] = [None] * layers

    def view(self, rows: slice, start: int, used: int) -> Cache:
        """A cache over some rows, whose first column is `start` and that holds `used` tokens from there."""
        return Cache(layers=[_Part(self, layer, rows, start, used) for layer in range(len(self.keys))])

    def copy_tokens(self, source: tuple[int, int], target: tuple[int, int], tokens: int) -> None:
        """Copy the first tokens of a prompt to another; each is given as (row, first column)."""
        for states in (*self.keys, *self.values):
            if states is not None:
                (row, start), (other, begin) = source, target
                states[other, :, begin : begin + tokens] = states[row, :, start : start + tokens]

    def put(self, layer: int, rows: slice, column: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write [rows, heads, tokens, size] from a column on."""
        for held, states in ((self.keys, keys), (self.values, values)):
            place = held[layer]
            if place is None:
                _, heads, _, size = states.shape
                # Zeros, since masked columns are multiplied too: a share of 0 times NaN would be NaN
                place = held[layer] = states.new_zeros(self.rows, heads, self.columns, size)
            place[rows, :, column : column + states.shape[2]] = states


class _Part(DynamicLayer):  # type: ignore[misc]
    """One layer of some rows."""

    def __init__(self, storage: Storage, layer: int, rows: slice, start: int, used: int) -> None:
        super().__init__()
        self._storage, self._layer, self._rows, self._start, self._used = storage, layer, rows, start, used
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep new keys and values, [rows, heads, tokens, size]; give all of them."""
        end = self._start + self._used
        self._storage.put(self._layer, self._rows, end, key_states, value_states)
        self._used += key_states.shape[2]
        keys, values = self._storage.keys[self._layer], self._storage.values[self._layer]
        assert keys is not None and values is not None
        columns = slice(self._start, self._start + self._used)
        return keys[self._rows, :, columns], values[self._rows, :, columns]

    def get_seq_length(self) -> int:
        """Tokens that it holds."""
        return self._used
