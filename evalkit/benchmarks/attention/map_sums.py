"""Sums over a map's rows, in one pass over its blocks and for all heads at once.

In: a map in blocks, what is read of it, and the groups of measures to prepare. Out: `MapSums`. A row i has the weights
A[i, j] of keys j ≤ i, which may be negative; its magnitude is Σ_j |A[i, j]|, and |A[i, j]| over the magnitude is its
normalised weight. A row whose magnitude is 0 has no weights: its normalised weights are all 0.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from evalkit.benchmarks.attention.blocks import MapBlocks
from evalkit.benchmarks.attention.groups import CATEGORIES

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Reading:
    """What is read of a sequence's maps."""

    categories: NDArray[np.int8] | None
    """[tokens] index into `CATEGORIES`; None: the measures of mass are not requested."""
    readers: NDArray[np.int64]
    """Positions whose rows are read for mass: the continuation's."""
    last: int
    """Position whose row's entropy is read."""
    bos: bool
    """Whether the first token is a BOS token."""


@dataclass(frozen=True)
class MapSums:
    """Sums of one map; arrays that no requested group needs are zero."""

    tokens: int
    first: Floats
    """[heads, tokens] A[i, 0]."""
    magnitude: Floats
    """[heads, tokens] Σ_j |A[i, j]|."""
    distance: Floats
    """[heads, tokens] Σ_j |A[i, j]| (i − j), in tokens."""
    entropy: Floats
    """[heads, tokens] entropy of the normalised weights, in nats."""
    mass: Floats
    """[heads, categories] mean over readers of Σ_j A[i, j] over the keys of a category."""
    share: Floats
    """[heads, categories] the same of normalised weights."""
    last: Floats
    """[heads, last + 1] the row of `Reading.last`."""
    products: Floats
    """[heads, heads] inner products of the flattened maps of two heads."""

    def normalised_first(self) -> Floats:
        """Return |A[i, 0]| / Σ_j |A[i, j]|, [heads, tokens]."""
        return divided(np.abs(self.first), self.magnitude)

    def mean_distance(self) -> Floats:
        """Return the mean distance of a row's keys under its normalised weights, [heads, tokens], in tokens."""
        return divided(self.distance, self.magnitude)


def divided(parts: Floats, wholes: Floats) -> Floats:
    """Divide; 0 where the divisor is 0."""
    return np.divide(parts, wholes, out=np.zeros_like(parts), where=wholes != 0)


def sums_of(found: MapBlocks, reading: Reading, groups: Collection[str]) -> MapSums:
    """Compute the sums that groups of measures need.

    Weights are read in the blocks' dtype and sums over rows of blocks are added in float64.

    Args:
        found: the map.
        reading: what is read of it.
        groups: names of groups of measures.

    Raises:
        ValueError: the reading does not fit the map.
    """
    _check(found, reading, groups)
    return _Pass(found, reading, frozenset(groups)).run()


def _check(found: MapBlocks, reading: Reading, groups: Collection[str]) -> None:
    positions = np.append(reading.readers, reading.last)
    if positions.min() < 0 or positions.max() >= found.tokens:
        raise ValueError(f"a position of the reading is outside of the sequence's {found.tokens} tokens")
    if "mass" in groups:
        if reading.categories is None:
            raise ValueError("the measures of mass need the tokens' categories")
        if reading.categories.shape != (found.tokens,):
            raise ValueError(f"there are {found.tokens} tokens, but categories of {len(reading.categories)}")


class _Pass:
    """One pass over the blocks of a map."""

    def __init__(self, found: MapBlocks, reading: Reading, groups: frozenset[str]) -> None:
        self._found, self._reading, self._groups = found, reading, groups
        heads, tokens = found.heads, found.tokens
        self._rows = {name: np.zeros((heads, tokens)) for name in ("first", "magnitude", "distance", "entropy")}
        self._mass = np.zeros((2, heads, len(CATEGORIES)))
        self._last = np.zeros((heads, reading.last + 1))
        self._products = torch.zeros(heads, heads, dtype=torch.float64)
        self._keys: torch.Tensor | None = None

    def run(self) -> MapSums:
        for start, block in self._found.blocks():
            self._add(start, block)
        mass, share = self._mass / max(1, len(self._reading.readers))
        return MapSums(
            tokens=self._found.tokens,
            mass=mass,
            share=share,
            last=self._last,
            products=self._products.numpy(),
            **self._rows,
        )

    def _add(self, start: int, block: torch.Tensor) -> None:
        """Add a block, [heads, rows, keys]; its weights are replaced by their absolute values."""
        stop = start + block.shape[1]
        self._put("first", start, block[:, :, 0])
        if start <= self._reading.last < stop and "entropy" in self._groups:
            row = block[:, self._reading.last - start, : self._reading.last + 1]
            self._last[:, : row.shape[1]] = row.cpu().double().numpy()
        if "similarity" in self._groups:
            flat = block.flatten(1)
            self._products += (flat @ flat.T).cpu().double()
        if self._groups.isdisjoint(("bos", "sink", "mass", "entropy", "distance")):
            return
        readers = self._readers(start, stop)
        signed = block[:, readers] if len(readers) else None
        magnitude = block.abs_()
        total = magnitude.sum(-1)
        self._put("magnitude", start, total)
        if "distance" in self._groups:
            self._put("distance", start, self._distance(start, magnitude, total))
        if signed is not None:
            self._add_mass(signed, total[:, readers])
        if "entropy" in self._groups:
            # Σ (a / t) log(a / t) = Σ (a log a) / t − log t
            logs = magnitude.clamp_min(torch.finfo(block.dtype).tiny).log_()
            mean = logs.mul_(magnitude).sum(-1) / total
            self._put("entropy", start, (total.log() - mean).clamp_(min=0).nan_to_num_(0.0))

    def _distance(self, start: int, magnitude: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Return Σ_j |A[i, j]| (i − j), [heads, rows]."""
        # From the block's first row: with larger numbers the two terms would cancel
        keys = torch.arange(start, start - magnitude.shape[2], -1, device=total.device, dtype=total.dtype)
        rows = torch.arange(magnitude.shape[1], device=total.device, dtype=total.dtype)
        return magnitude @ keys + total * rows

    def _readers(self, start: int, stop: int) -> torch.Tensor:
        """Return the readers of a block's rows, counted from its first one."""
        readers = self._reading.readers
        if "mass" not in self._groups:
            readers = readers[:0]
        return torch.from_numpy(readers[(readers >= start) & (readers < stop)] - start)

    def _add_mass(self, rows: torch.Tensor, totals: torch.Tensor) -> None:
        """Add the rows of readers, [heads, readers, keys], with their magnitudes, [heads, readers]."""
        if self._keys is None:
            numbers = torch.from_numpy(np.asarray(self._reading.categories, dtype=np.int64))
            self._keys = torch.nn.functional.one_hot(numbers, len(CATEGORIES)).to(rows)
        keys = self._keys[: rows.shape[2]]
        masses = (rows @ keys).cpu().double().numpy()
        shares = divided((rows.abs() @ keys).cpu().double().numpy(), totals.cpu().double().numpy()[:, :, None])
        self._mass += np.stack((masses.sum(1), shares.sum(1)))

    def _put(self, name: str, start: int, values: torch.Tensor) -> None:
        self._rows[name][:, start : start + values.shape[1]] = values.cpu().numpy()
