"""Rows of packed tokens in an order that is a function of (seed, position) alone.

In: packed tokens, the length of a row, a seed. Out: data sets of rows, read one after the other. The order is a
permutation by numpy's PCG64 generator, another one in each epoch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from evalkit.errors import DataError

Array = np.ndarray[Any, Any]
Row = dict[str, torch.Tensor]
"""`input_ids` and `labels`, [length] int64 each, and equal: the model shifts the labels."""


def as_rows(tokens: Array, length: int, what: str) -> Array:
    """Divide tokens, [n], into rows, [n // length, length], without copying them.

    Raises:
        DataError: there is not one row; names the text by `what`.
    """
    count = len(tokens) // length
    if not count:
        raise DataError(f"{what}: {len(tokens):,} tokens, fewer than one row of {length:,}")
    return tokens[: count * length].reshape(count, length)


class OrderedRows(torch.utils.data.Dataset[Row]):
    """Rows in a seed's order, for a sequential sampler.

    Args:
        rows: [rows, length].
        count: rows that are read in all, with repetitions.
        seed: of the order.
    """

    def __init__(self, rows: Array, count: int, seed: int) -> None:
        self._rows, self._count, self._seed = rows, count, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> Row:
        """Return the row that is read at a position."""
        if not 0 <= position < self._count:
            raise IndexError(position)
        return _item(self._rows[self.index(position)])

    def index(self, position: int) -> int:
        """Return which row is read at a position."""
        epoch, place = divmod(position, len(self._rows))
        return int(_order(self._seed, epoch, len(self._rows))[place])


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, rows: int) -> Array:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def spread_rows(rows: Array, most: int) -> list[Row]:
    """Return at most so many of the rows, [rows, length], at equal distances."""
    places = np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int))
    return [_item(rows[place]) for place in places]


def stacked(rows: list[Row]) -> Row:
    """Return a batch, [rows, length] each."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def _item(row: Array) -> Row:
    ids = torch.from_numpy(row.astype(np.int64))
    return {"input_ids": ids, "labels": ids.clone()}
