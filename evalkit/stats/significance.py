"""Two-sided tests of paired differences, and Holm's correction.

In: differences, their sums by cluster, or counts. Out: p values.

Sources: McNemar (1947) in its exact form; sign-flip permutation, Fisher (1935), with (b + 1) / (m + 1) where patterns
are sampled (Phipson and Smyth 2010); Holm (1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evalkit.stats.estimates import Codes, Estimate, Floats

ENUMERATED = 16
"""Largest number of nonzero sums for which all patterns of signs (at most 2^16) are enumerated."""
DRAWS = 9_999
"""Patterns of signs that are sampled where there are more."""
LATTICE = 20_000
"""Largest total for which the distribution of integer sums is computed exactly."""

_CHUNK = 1 << 24
"""Signs in memory at a time."""


class SignFlip(NamedTuple):
    """Result of a sign-flip test."""

    p: float
    exact: bool
    """Whether all patterns of signs were counted, not a sample of them."""


def mcnemar(wins: int, losses: int) -> float:
    """Return the p value of the exact McNemar test on documents that only one side gets right.

    Twice the smaller tail of Binomial(wins + losses, 1/2), at most 1. Its size never exceeds the level, and is below it
    with few discordant documents. (The mid-p variant is nearer to 5 %, but may exceed it.)
    """
    from scipy.special import bdtr

    discordant = wins + losses
    return min(1.0, 2 * float(bdtr(min(wins, losses), discordant, 0.5))) if discordant else 1.0


def cluster_sums(differences: Floats, clusters: Codes | None) -> Floats:
    """Return [clusters] sums of [n] differences; the differences themselves if each document is its own cluster."""
    if clusters is None:
        return differences
    return np.bincount(np.unique(clusters, return_inverse=True)[1], differences).astype(np.float64)


def sign_flip(sums: Floats, seed: int = 0) -> SignFlip:
    """Test whether the total differs from zero, by flipping the sign of each cluster's sum at random.

    Exact where the sums are integers (0/1 scores), by convolving the binomial distributions of the distinct sizes; and
    where few are nonzero, by enumerating all signs. Otherwise signs are sampled, the same for the same seed. With sums
    of plus and minus one it is McNemar's test.

    Args:
        sums: [clusters] differences summed by cluster.
        seed: of the random generator.
    """
    sizes = np.abs(sums[sums != 0])
    total = float(sums.sum())
    if not len(sizes):
        return SignFlip(1.0, True)
    if (sizes == np.rint(sizes)).all() and sizes.sum() <= LATTICE:
        return SignFlip(_lattice(sizes.astype(np.int64), abs(round(total))), True)
    # Tolerance: sums that are mathematically equal differ in their last bits
    reached = abs(total) - 1e-9 * float(sizes.sum())
    if len(sizes) <= ENUMERATED:
        patterns = np.arange(2 ** len(sizes))[:, None] >> np.arange(len(sizes)) & 1
        flipped = 2 * (patterns @ sizes) - sizes.sum()
        return SignFlip(float((np.abs(flipped) >= reached).mean()), True)
    return SignFlip((_drawn(sizes, reached, seed) + 1) / (DRAWS + 1), False)


def t_test(estimate: Estimate) -> float:
    """Return the two-sided p value of a t test of an estimate against zero; NaN if its error is unknown."""
    from scipy.special import stdtr

    if estimate.variance == 0:
        return 1.0 if estimate.value == 0 else math.nan
    return 2 * float(stdtr(estimate.freedom, -abs(estimate.value) / estimate.stderr))


def holm(ps: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p values, in the order given; rejecting those up to 5 % bounds the familywise error."""
    order = sorted(range(len(ps)), key=lambda place: ps[place])
    adjusted, highest = [0.0] * len(ps), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[place]))
        adjusted[place] = highest
    return adjusted


def _lattice(sizes: Codes, reached: int) -> float:
    """Return P(|sum of ± sizes| >= reached) exactly: each of the few distinct sizes has a binomial number of pluses."""
    from scipy.special import gammaln

    distribution = np.ones(1)
    for size, count in zip(*np.unique(sizes, return_counts=True), strict=True):
        plus = np.arange(count + 1)
        logarithm = gammaln(count + 1) - gammaln(plus + 1) - gammaln(count - plus + 1) - count * math.log(2)
        spread = np.zeros(size * count + 1)
        spread[::size] = np.exp(logarithm)
        distribution = np.convolve(distribution, spread)
    totals = 2 * np.arange(len(distribution)) - int(sizes.sum())
    return min(1.0, float(distribution[np.abs(totals) >= reached].sum()))


def _drawn(sizes: Floats, reached: float, seed: int) -> int:
    """Count in how many of `DRAWS` random patterns of signs the total is as far from zero."""
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK // len(sizes))
    as_far = 0
    for start in range(0, DRAWS, rows):
        count = min(rows, DRAWS - start)
        packed = np.frombuffer(generator.bytes(count * -(-len(sizes) // 8)), np.uint8)
        bits = np.unpackbits(packed.reshape(count, -1), axis=1)
        flipped = 2 * (bits[:, : len(sizes)].astype(np.float64) @ sizes) - sizes.sum()
        as_far += int((np.abs(flipped) >= reached).sum())
    return as_far
