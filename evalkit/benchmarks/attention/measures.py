"""Measures of attention maps.

In: the map of a layer in blocks and what is read of it (`Reading`). Out: arrays by the names of the measures, [heads],
or [heads, bins] for names that end in `_by_position`. All but the ranks come from one pass over the blocks.

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
- rank: `rank`, `rank_squares`, `rank_stable`: see `rank.py`; they need each head's whole map.
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
from typing import NamedTuple

import numpy as np
import torch

from evalkit.benchmarks.attention.blocks import MapBlocks
from evalkit.benchmarks.attention.groups import CATEGORIES, GROUPS
from evalkit.benchmarks.attention.map_sums import Floats, MapSums, Reading, divided, sums_of


class Ranks(NamedTuple):
    """Effective ranks under three definitions, from the singular values σ₁ ≥ σ₂ ≥ … of a map."""

    entropy: float
    """exp of the entropy of σ / Σσ; Roy and Vetterli, "The effective rank" (EUSIPCO 2007), definition 1."""
    squares: float
    """The same of σ² / Σσ²: exp of the entropy of the shares of variance."""
    stable: float
    """Stable rank, Σσ² / σ₁²: the squared ratio of the Frobenius norm and the spectral norm."""


def ranks_of(seen: torch.Tensor) -> Ranks:
    """Compute the effective ranks of a map, [tokens, tokens]; the singular values in its dtype, sums in float64."""
    values = torch.linalg.svdvals(seen).double()
    largest = float(values.max())
    if largest == 0:
        return Ranks(0.0, 0.0, 0.0)
    values = values / largest
    squares = values.square()
    return Ranks(_exponential(values), _exponential(squares), float(squares.sum()))


def _exponential(weights: torch.Tensor) -> float:
    """Return exp of the entropy of weights that are divided by their sum."""
    shares = weights / weights.sum()
    return float(torch.special.entr(shares).sum().exp())


SINK_TOKENS = 64
"""Rows that the measures of the sink use; T of arXiv 2410.10781."""


def measures_of(found: MapBlocks, reading: Reading, groups: Collection[str]) -> dict[str, Floats]:
    """Compute groups of measures of one layer.

    Args:
        found: the layer's map.
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
        sums = sums_of(found, reading, by_pass)
        for group in by_pass:
            measured |= _FROM_SUMS[group](sums, reading)
    if "rank" in groups:
        measured |= _ranks(found)
    return measured


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
    return np.where(sums == 0, math.log(row.shape[-1]), _entropy(divided(lifted, sums[:, None])))


def _entropy(shares: Floats) -> Floats:
    """Compute the entropy of distributions, [heads, keys] → [heads]."""
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    found: Floats = -(shares * logs).sum(-1)
    return found


def _means(name: str, rows: Floats, by_position: bool = True) -> dict[str, Floats]:
    """Average [heads, tokens] over rows i ≥ 1, and by position."""
    tokens = rows.shape[1]
    if tokens == 1:
        return {}
    found = {name: rows[:, 1:].mean(1)}
    if by_position:
        starts = np.array(position_edges(tokens)[:-1])
        counts = np.diff(np.append(starts, tokens))
        found[f"{name}_by_position"] = np.add.reduceat(rows, starts, axis=1) / counts
    return found


def _bos(sums: MapSums, reading: Reading) -> dict[str, Floats]:
    if not reading.bos:
        return {}
    return _means("bos", sums.first) | _means("bos_abs", sums.normalised_first())


def _mass(sums: MapSums, reading: Reading) -> dict[str, Floats]:
    if not len(reading.readers):
        return {}
    found = {f"mass_{name}": sums.mass[:, number] for number, name in enumerate(CATEGORIES)}
    return found | {f"mass_abs_{name}": sums.share[:, number] for number, name in enumerate(CATEGORIES)}


def _entropies(sums: MapSums, reading: Reading) -> dict[str, Floats]:
    found = {"entropy_shifted": shifted_entropy(sums.last), "entropy": sums.entropy[:, reading.last]}
    means = _means("entropy", sums.entropy)
    means.pop("entropy", None)
    return found | means


def _negative(sums: MapSums, reading: Reading) -> dict[str, Floats]:
    return _means("bos_negative", (sums.first < 0).astype(float), by_position=False) if reading.bos else {}


def _all_tokens(sums: MapSums, reading: Reading) -> dict[str, Floats]:
    if not reading.bos:
        return {}
    return {"bos_all": sums.first.mean(1), "bos_negative_all": (sums.first < 0).mean(1)}


def _sink(sums: MapSums, _: Reading) -> dict[str, Floats]:
    if sums.tokens < SINK_TOKENS:
        return {}
    return {
        "sink": sums.first[:, :SINK_TOKENS].mean(1),
        "sink_abs": sums.normalised_first()[:, :SINK_TOKENS].mean(1),
    }


def _distance(sums: MapSums, _: Reading) -> dict[str, Floats]:
    return _means("distance", sums.mean_distance(), by_position=False)


def _similarity(sums: MapSums, _: Reading) -> dict[str, Floats]:
    heads = len(sums.products)
    if heads == 1:
        return {}
    norms = np.sqrt(sums.products.diagonal())
    cosines = divided(sums.products, np.outer(norms, norms))
    return {"similarity": (cosines.sum(1) - cosines.diagonal()) / (heads - 1)}


def _ranks(found: MapBlocks) -> dict[str, Floats]:
    """Compute the ranks head by head, so that one head's map is in memory."""
    ranks = [ranks_of(found.head(head)) for head in range(found.heads)]
    names = Ranks(entropy="rank", squares="rank_squares", stable="rank_stable")  # type: ignore[arg-type]
    return {str(name): np.array(values) for name, values in zip(names, zip(*ranks, strict=True), strict=True)}


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
