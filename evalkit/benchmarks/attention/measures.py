"""Measures of attention maps.

In: the map of a layer in blocks and what is read of it (`Reading`). Out: arrays by the names of the measures, [heads],
or [heads, bins] for names that end in `_by_position`. All but the ranks come from one pass over the blocks (`MapSums`).

Maps may be signed (cog and differential attention). A measure with signs uses the weights A[i, j] of row i over keys
j ≤ i; one without uses the normalised weights |A[i, j]| / Σ_j |A[i, j]|, which sum to 1 in every row. In a row whose
weights are all 0 the normalised weights are 0 too, and so are its shares, distance and `entropy`. Row 0 has one key,
itself, and is left out of means over rows, but of those over all tokens.

- bos: `bos`, `bos_abs`: mean over rows i ≥ 1 of the first token's weight, and of its normalised weight; both also by
  position.
- mass: `mass_<category>`, `mass_abs_<category>`: mean over the readers of the weights that the keys of a category have
  together, and of the normalised weights.
- entropy: `entropy_shifted`, `entropy`: of the row `last`, in nats; `entropy_by_position` of all rows i ≥ 1.
- negative: `bos_negative`: share of rows i ≥ 1 whose weight of the first token is negative.
- rank: `rank`, `rank_squares`, `rank_stable`: see `_ranks_of`; they need each head's whole map.
- sink: `sink`, `sink_abs`: mean over the first 64 rows of the first token's weight, and of its normalised weight.
- distance: `distance`: mean over rows i ≥ 1 of Σ_j (i − j) under the normalised weights, in tokens.
- all_tokens: `bos_all`, `bos_negative_all`: as `bos` and `bos_negative`, over all rows, as in the paper.
- similarity: `similarity`: mean over the layer's other heads of the cosine of the two flattened maps.

Absent measures: those of bos, negative and all_tokens where the first token is not BOS (`sink` stays, since it is about
the first token); means over rows i ≥ 1 of a single token; mass without readers; sink of less than 64 tokens; similarity
of a single head.

Sources: the Integral Transformer's paper, section 5 and appendix C, for bos, mass, `entropy_shifted`, `bos_negative`
and `rank`; arXiv 2410.10781 (Attention-Sink) for sink, α of the first token at T = 64, whose share of α > 0.3 is its
sink rate. The paper's entropy is of (a − min a) / Σ(a − min a) over the keys j ≤ i, those outside of a sliding window
too. As soon as one weight is negative this lifts all near-zero weights, so `entropy` stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from evalkit.benchmarks.attention.attention_calls import MapBlocks
from evalkit.benchmarks.attention.groups import CATEGORIES, GROUPS

Floats = NDArray[np.float64]

SINK_TOKENS = 64
"""Rows that the measures of the sink use; T of arXiv 2410.10781."""
_OF_MAGNITUDES = ("bos", "sink", "mass", "entropy", "distance")
"""Groups that need the magnitudes of rows."""


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


def measures_of(blocks: MapBlocks, reading: Reading, groups: Collection[str]) -> dict[str, Floats]:
    """Compute groups of measures of one layer.

    Args:
        blocks: the layer's map.
        reading: what is read of it.
        groups: of `GROUPS`.

    Returns:
        [heads] by name, and [heads, bins] for names that end in `_by_position`, with the bins of `position_edges`.

    Raises:
        ValueError: there is no such group, or the reading does not fit the map.
    """
    if unknown := sorted(set(groups) - set(GROUPS)):
        raise ValueError(f"no group of measures '{unknown[0]}'; there are {', '.join(GROUPS)}")
    measured: dict[str, Floats] = {}
    by_pass = [group for group in GROUPS if group in groups and group != "rank"]
    if by_pass:
        sums = MapSums(blocks, reading, by_pass)
        for group in by_pass:
            measured |= _FROM_SUMS[group](sums, reading)
    if "rank" in groups:
        measured |= _ranks(blocks)
    return measured


class MapSums:
    """Sums over the rows of a map, in one pass over its blocks and for all heads at once.

    Weights are read in the blocks' dtype; sums over rows of blocks are added in float64. Arrays that no group needs
    are zero.

    Raises:
        ValueError: the reading does not fit the map.
    """

    def __init__(self, blocks: MapBlocks, reading: Reading, groups: Collection[str]) -> None:
        _check(blocks.tokens, reading, groups)
        self._reading, self._groups = reading, frozenset(groups)
        heads, self.tokens = blocks.heads, blocks.tokens
        self.first: Floats = np.zeros((heads, self.tokens))
        """[heads, tokens] A[i, 0]."""
        self.magnitude: Floats = np.zeros((heads, self.tokens))
        """[heads, tokens] Σ_j |A[i, j]|."""
        self.distance: Floats = np.zeros((heads, self.tokens))
        """[heads, tokens] Σ_j |A[i, j]| (i − j), in tokens."""
        self.entropy: Floats = np.zeros((heads, self.tokens))
        """[heads, tokens] entropy of the normalised weights, in nats."""
        self.last: Floats = np.zeros((heads, reading.last + 1))
        """[heads, last + 1] the row of `Reading.last`."""
        self._mass = np.zeros((2, heads, len(CATEGORIES)))
        self._products = torch.zeros(heads, heads, dtype=torch.float64)
        self._keys: torch.Tensor | None = None
        for start, block in blocks.blocks():
            self._add(start, block)
        self.mass, self.share = self._mass / max(1, len(reading.readers))
        """[heads, categories] mean over readers of the sum over a category's keys: of weights, of normalised ones."""
        self.products: Floats = self._products.numpy()
        """[heads, heads] inner products of the flattened maps of two heads."""

    def normalised_first(self) -> Floats:
        """Return |A[i, 0]| / Σ_j |A[i, j]|, [heads, tokens]."""
        return _divided(np.abs(self.first), self.magnitude)

    def _add(self, start: int, block: torch.Tensor) -> None:
        """Add a block, [heads, rows, keys]; its weights are replaced by their absolute values."""
        stop = start + block.shape[1]
        self.first[:, start:stop] = block[:, :, 0].cpu().numpy()
        if start <= self._reading.last < stop and "entropy" in self._groups:
            row = block[:, self._reading.last - start, : self._reading.last + 1]
            self.last[:, : row.shape[1]] = row.cpu().double().numpy()
        if "similarity" in self._groups:
            flat = block.flatten(1)
            self._products += (flat @ flat.T).cpu().double()
        if self._groups.isdisjoint(_OF_MAGNITUDES):
            return
        readers = self._readers(start, stop)
        signed = block[:, readers] if len(readers) else None
        magnitude = block.abs_()
        total = magnitude.sum(-1)
        self.magnitude[:, start:stop] = total.cpu().numpy()
        if "distance" in self._groups:
            # From the block's first row: with larger numbers the two terms would cancel
            keys = torch.arange(start, start - block.shape[2], -1, device=total.device, dtype=total.dtype)
            rows = torch.arange(block.shape[1], device=total.device, dtype=total.dtype)
            self.distance[:, start:stop] = (magnitude @ keys + total * rows).cpu().numpy()
        if signed is not None:
            self._add_mass(signed, total[:, readers])
        if "entropy" in self._groups:
            # Σ (a / t) log(a / t) = Σ (a log a) / t − log t
            logs = magnitude.clamp_min(torch.finfo(block.dtype).tiny).log_()
            mean = logs.mul_(magnitude).sum(-1) / total
            self.entropy[:, start:stop] = (total.log() - mean).clamp_(min=0).nan_to_num_(0.0).cpu().numpy()

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
        shares = _divided((rows.abs() @ keys).cpu().double().numpy(), totals.cpu().double().numpy()[:, :, None])
        self._mass += np.stack((masses.sum(1), shares.sum(1)))


def _check(tokens: int, reading: Reading, groups: Collection[str]) -> None:
    positions = np.append(reading.readers, reading.last)
    if positions.min() < 0 or positions.max() >= tokens:
        raise ValueError(f"a position of the reading is outside of the sequence's {tokens} tokens")
    if "mass" in groups:
        if reading.categories is None:
            raise ValueError("the measures of mass need the tokens' categories")
        if reading.categories.shape != (tokens,):
            raise ValueError(f"there are {tokens} tokens, but categories of {len(reading.categories)}")


def _divided(parts: Floats, wholes: Floats) -> Floats:
    """Divide; 0 where the divisor is 0."""
    return np.divide(parts, wholes, out=np.zeros_like(parts), where=wholes != 0)


def _ranks(blocks: MapBlocks) -> dict[str, Floats]:
    """Compute the ranks head by head, so that one head's map is in memory."""
    ranks = np.array([_ranks_of(blocks.head(head)) for head in range(blocks.heads)])
    return dict(zip(("rank", "rank_squares", "rank_stable"), ranks.T, strict=True))


def _ranks_of(head: torch.Tensor) -> tuple[float, float, float]:
    """Compute three effective ranks of a map, [tokens, tokens], with the singular values σ₁ ≥ σ₂ ≥ … ≥ 0.

    - exp of the entropy of σ / Σσ; Roy and Vetterli, "The effective rank" (EUSIPCO 2007), definition 1;
    - the same of σ² / Σσ²: exp of the entropy of the shares of variance;
    - the stable rank, Σσ² / σ₁²: the squared ratio of the Frobenius norm and the spectral norm.

    The singular values are computed in the map's dtype, sums in float64.
    """
    values = torch.linalg.svdvals(head).double()
    largest = float(values.max())
    if largest == 0:
        return 0.0, 0.0, 0.0
    values = values / largest
    squares = values.square()
    return _exponential(values), _exponential(squares), float(squares.sum())


def _exponential(weights: torch.Tensor) -> float:
    """Return exp of the entropy of weights that are divided by their sum."""
    shares = weights / weights.sum()
    return float(torch.special.entr(shares).sum().exp())


def position_edges(tokens: int) -> tuple[int, ...]:
    """Return the edges 1, 2, 4, 8 … of bins of positions, [1, 2), [2, 4) …, up to the first one past the last token.

    The last bin may have positions that the sequence does not. One token has no bins: the only edge is 1.
    """
    return tuple(2**power for power in range(1 + (tokens - 1).bit_length()))


def shifted_entropy(row: Floats) -> Floats:
    """Compute the paper's entropy of rows of visible keys, [heads, keys] → [heads], in nats.

    The smallest weight of a row is subtracted from all, then they are divided by their sum. If all weights are equal,
    the row counts as uniform: log of the number of keys.
    """
    lifted = row - row.min(-1, keepdims=True)
    sums = lifted.sum(-1)
    shares = _divided(lifted, sums[:, None])
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.where(sums == 0, math.log(row.shape[-1]), -(shares * logs).sum(-1))


def _means(name: str, rows: Floats, by_position: bool = True) -> dict[str, Floats]:
    """Average [heads, tokens] over rows i ≥ 1, and by position."""
    tokens = rows.shape[1]
    if tokens == 1:
        return {}
    measured = {name: rows[:, 1:].mean(1)}
    if by_position:
        starts = np.array(position_edges(tokens)[:-1])
        counts = np.diff(np.append(starts, tokens))
        measured[f"{name}_by_position"] = np.add.reduceat(rows, starts, axis=1) / counts
    return measured


def _bos(sums: MapSums, reading: Reading) -> dict[str, Floats]:
    return _means("bos", sums.first) | _means("bos_abs", sums.normalised_first()) if reading.bos else {}


def _mass(sums: MapSums, reading: Reading) -> dict[str, Floats]:
    if not len(reading.readers):
        return {}
    signed = {f"mass_{name}": sums.mass[:, number] for number, name in enumerate(CATEGORIES)}
    return signed | {f"mass_abs_{name}": sums.share[:, number] for number, name in enumerate(CATEGORIES)}


def _entropies(sums: MapSums, reading: Reading) -> dict[str, Floats]:
    of_last = {"entropy_shifted": shifted_entropy(sums.last), "entropy": sums.entropy[:, reading.last]}
    means = _means("entropy", sums.entropy)
    means.pop("entropy", None)
    return of_last | means


def _negative(sums: MapSums, reading: Reading) -> dict[str, Floats]:
    return _means("bos_negative", (sums.first < 0).astype(float), by_position=False) if reading.bos else {}


def _all_tokens(sums: MapSums, reading: Reading) -> dict[str, Floats]:
    return {"bos_all": sums.first.mean(1), "bos_negative_all": (sums.first < 0).mean(1)} if reading.bos else {}


def _sink(sums: MapSums, _: Reading) -> dict[str, Floats]:
    if sums.tokens < SINK_TOKENS:
        return {}
    first, shares = sums.first[:, :SINK_TOKENS], sums.normalised_first()[:, :SINK_TOKENS]
    return {"sink": first.mean(1), "sink_abs": shares.mean(1)}


def _distance(sums: MapSums, _: Reading) -> dict[str, Floats]:
    return _means("distance", _divided(sums.distance, sums.magnitude), by_position=False)


def _similarity(sums: MapSums, _: Reading) -> dict[str, Floats]:
    heads = len(sums.products)
    if heads == 1:
        return {}
    norms = np.sqrt(sums.products.diagonal())
    cosines = _divided(sums.products, np.outer(norms, norms))
    return {"similarity": (cosines.sum(1) - cosines.diagonal()) / (heads - 1)}


_FROM_SUMS: dict[str, Callable[[MapSums, Reading], dict[str, Floats]]] = {
    "bos": _bos,
    "mass": _mass,
    "entropy": _entropies,
    "negative": _negative,
    "sink": _sink,
    "distance": _distance,
    "similarity": _similarity,
    "all_tokens": _all_tokens,
}
