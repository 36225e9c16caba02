"""Rows of packed tokens in an order that is a function of (seed, position) alone.

In: packed tokens, the length of a row, a seed. Out: a data set for a sequential sampler. Epochs after the first have
orders of their own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from evalkit.errors import DataError


class OrderedRows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Row `order(i)` of the tokens at position i."""

    def __init__(self, tokens: np.ndarray[Any, Any], length: int, count: int, seed: int) -> None:
        """Args: tokens: [n]; length: of a row; count: rows in all, with repetitions; seed: of the order."""
        rows = len(tokens) // length
        if not rows:
            raise DataError(f"the text has {len(tokens):,} tokens, fewer than one row of {length:,}")
        self.rows = tokens[: rows * length].reshape(rows, length)
        self._count, self._seed = count, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        """Return a row as input and as labels, [length] int64 each."""
        if not 0 <= position < self._count:
            raise IndexError(position)
        row = torch.from_numpy(self.rows[self.index(position)].astype(np.int64))
        return {"input_ids": row, "labels": row.clone()}

    def index(self, position: int) -> int:
        """Return which row stands at a position."""
        epoch, place = divmod(position, len(self.rows))
        return int(_order(self._seed, epoch, len(self.rows))[place])


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, rows: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def spread_rows(tokens: np.ndarray[Any, Any], length: int, most: int) -> list[dict[str, torch.Tensor]]:
    """Return at most so many rows at equal distances, the same at each call."""
    rows = len(tokens) // length
    held = OrderedRows(tokens, length, max(rows, 1), 0)
    places = np.unique(np.linspace(0, rows - 1, min(most, rows)).astype(int))
    found = [torch.from_numpy(held.rows[place].astype(np.int64)) for place in places]
    return [{"input_ids": row, "labels": row.clone()} for row in found]
