"""Keys and values of a batch in columns of one static cache.

In: a model with a key-value cache, and the prompts of a batch. Out: as of every `Storage`. Prompts end in the same
column, so all rows write the keys and values of their next token to the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from evalkit.generation.prompts import Ints, shared_tokens
from evalkit.generation.rows import Generation
from evalkit.generation.storage import Behind, Calls, Sizes, Storage


class Columns(Storage):
    """Keys and values of every layer, [rows, heads, columns, size]; a layer is allocated at its first write."""

    def __init__(self, calls: Calls, rows: Sequence[Generation], chunk: int, layers: int) -> None:
        super().__init__(calls, rows, chunk)
        self._columns = self.used + max(row.prompt.columns - len(row.prompt.tokens) for row in rows)
        self.layers: list[tuple[torch.Tensor, ...]] = [()] * layers

    def prefill(self, index: int) -> torch.Tensor:
        row, logits = self.rows[index], torch.empty(0)
        tokens = row.prompt.tokens
        shared = [shared_tokens(other.prompt.tokens, tokens, self.chunk) for other in self.rows[:index]]
        row.reused = max(shared, default=0)
        if row.reused:
            source = self.rows[shared.index(row.reused)]
            self._copy((source.place, source.start), (row.place, row.start), row.reused)
        cache = self._view(slice(row.place, row.place + 1), row.start, row.reused)
        for begin, end in self.parts(row.reused, [len(tokens)]):
            logits, _ = self.run_behind(cache, begin, tokens[begin:end])
        return logits[:, -1]

    @contextmanager
    def before_answers(self, index: int) -> Iterator[Behind]:
        """Restore the columns that answers have overwritten when the context ends."""
        row = self.rows[index]
        stored = row.prompt.shared - 1
        columns = slice(row.start + stored, self.used)
        before = [[states[row.place, :, columns].clone() for states in layer] for layer in self.layers]

        def behind(ids: Ints) -> torch.Tensor:
            cache = self._view(slice(row.place, row.place + 1), row.start, stored)
            logits, _ = self.run_behind(cache, stored, ids, len(ids))
            return logits

        yield behind
        for layer, copies in zip(self.layers, before, strict=True):
            for states, kept in zip(layer, copies, strict=True):
                states[row.place, :, columns] = kept

    def without_ended(self, rows: Sequence[Generation]) -> list[Generation]:
        """Move the rows that have not ended to the first places, and return them in that order."""
        live = [row for row in rows if not row.ended]
        free = sorted(set(range(len(live))) - {row.place for row in live})
        for row in live:
            if row.place >= len(live):
                target = free.pop()
                self._copy((row.place, row.start), (target, row.start), self.used - row.start)
                row.place = target
        return sorted(live, key=lambda row: row.place)

    def step(self, live: Sequence[Generation]) -> torch.Tensor:
        logits, _ = self.run_last(live, self._view(slice(0, len(live)), 0, self.used))
        return logits

    def sizes(self) -> Sizes:
        token_bytes: Counter[torch.device] = Counter()
        for layer in self.layers:
            for states in layer:
                token_bytes[states.device] += states[0, :, 0].nbytes
        return Sizes(token_bytes, {}, sum(bool(layer) for layer in self.layers))

    def put(self, layer: int, rows: slice, column: int, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Write new keys and values, [rows, heads, tokens, size], from a column on; return all of the layer."""
        if not self.layers[layer]:
            # Zeros, since masked columns are multiplied too: attention weight 0 times NaN is NaN
            self.layers[layer] = tuple(
                states.new_zeros(len(self.rows), states.shape[1], self._columns, states.shape[3]) for states in new
            )
        for stored, states in zip(self.layers[layer], new, strict=True):
            stored[rows, :, column : column + states.shape[2]] = states
        return self.layers[layer]

    def _view(self, rows: slice, start: int, used: int) -> Cache:
        """Return a cache over some rows that starts at column `start` and contains `used` tokens."""
        return Cache(layers=[_LayerView(self, layer, rows, start, used) for layer in range(len(self.layers))])

    def _copy(self, source: tuple[int, int], target: tuple[int, int], tokens: int) -> None:
        """Copy some tokens of one row to another; both are given as (row, first column)."""
        (row, start), (other, begin) = source, target
        for layer in self.layers:
            for states in layer:
                states[other, :, begin : begin + tokens] = states[row, :, start : start + tokens]


class _LayerView(DynamicLayer):  # type: ignore[misc]
    def __init__(self, storage: Columns, layer: int, rows: slice, start: int, used: int) -> None:
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
