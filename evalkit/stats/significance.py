"""Two-sided tests of paired differences, Holm's correction, and differences between sides of several runs.

In: differences, their sums by cluster, or counts. Out: p values.

Sources: McNemar (1947) in its exact form; sign-flip permutation, Fisher (1935), with (b + 1) / (m + 1) where patterns
are sampled (Phipson and Smyth 2010); Holm (1979).

Several runs of a side and documents are crossed: every run answers every document. The variance of the difference has
three components: seeds, documents, and their interaction. The variance between the runs' scores contains the first and
the third, that between documents the second and the third; so the two are added and the third, estimated from the
residuals, is subtracted once. This is how radiology compares readers on the same cases (Obuchowski and Rockette 1995;
Hillis 2007). The test is Banerjee's (1960): a difference is significant if its square exceeds the sum of the
components' variances, each times the square of its own t quantile. Its size never exceeds the level, whatever share of
the variance each component has. Welch's and Satterthwaite's degrees of freedom are invalid here: with two runs against
ten they reject up to 13 % at 5 %, because they treat a small variance between two runs as well known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from evalkit.stats.estimates import CONFIDENCE, Codes, Estimate, Floats, hall, mean, t_quantile

ENUMERATED = 16
"""Largest number of nonzero sums for which all patterns of signs (at most 2^16) are enumerated."""
DRAWS = 9_999
"""Patterns of signs that are sampled where there are more."""
LATTICE = 20_000
"""Largest total for which the distribution of integer sums is computed exactly."""

_CHUNK = 1 << 24
"""Signs in memory at a time."""


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


def sign_flip(sums: Floats, seed: int = 0) -> float:
    """Return the p value of whether [clusters] sums of differences have a total of zero, by flipping their signs.

    Exact where the sums are integers (0/1 scores), by convolving the binomial distributions of the distinct sizes; and
    where few are nonzero, by enumerating all signs. Otherwise signs are sampled, the same for the same seed. With sums
    of plus and minus one it is McNemar's test.
    """
    sizes = np.abs(sums[sums != 0])
    total = float(sums.sum())
    if not len(sizes):
        return 1.0
    if (sizes == np.rint(sizes)).all() and sizes.sum() <= LATTICE:
        return _lattice(sizes.astype(np.int64), abs(round(total)))
    # Tolerance: sums that are mathematically equal differ in their last bits
    reached = abs(total) - 1e-9 * float(sizes.sum())
    if len(sizes) <= ENUMERATED:
        patterns = np.arange(2 ** len(sizes))[:, None] >> np.arange(len(sizes)) & 1
        flipped = 2 * (patterns @ sizes) - sizes.sum()
        return float((np.abs(flipped) >= reached).mean())
    return (_drawn(sizes, reached, seed) + 1) / (DRAWS + 1)


def t_test(estimate: Estimate) -> float:
    """Return the two-sided p value of an estimate against zero; NaN if its error is unknown.

    It is that of t; of a skewed estimate the larger of it and that of Hall's transformation, as in `interval`.
    """
    from scipy.special import stdtr

    if estimate.variance == 0:
        return 1.0 if estimate.value == 0 else math.nan
    statistic = estimate.value / estimate.stderr
    least = min(abs(statistic), abs(hall(statistic, estimate.skewness)))
    return 2 * float(stdtr(estimate.freedom, -least))


def holm(ps: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p values, in the order given; rejecting those up to 5 % bounds the familywise error."""
    order = sorted(range(len(ps)), key=lambda number: ps[number])
    adjusted, highest = [0.0] * len(ps), 0.0
    for rank, number in enumerate(order):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[number]))
        adjusted[number] = highest
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


class Spread(NamedTuple):
    """Components of the variance of a difference of two sides' means."""

    seeds_a: float
    """Between A's runs, s² / K; 0 for a single run, from which it cannot be estimated."""
    seeds_b: float
    documents: float
    shared: float
    """Interaction of seeds and documents, which both of these contain and which counts once."""
    runs_a: int
    runs_b: int

    @property
    def seeds(self) -> float:
        return self.seeds_a + self.seeds_b

    @property
    def deviations(self) -> tuple[float, float]:
        """Standard deviations between A's runs and between B's; NaN for a single run."""
        of_a = math.sqrt(self.runs_a * self.seeds_a) if self.runs_a > 1 else math.nan
        return of_a, math.sqrt(self.runs_b * self.seeds_b) if self.runs_b > 1 else math.nan


def spread(a: Floats, b: Floats, clusters: Codes | None = None, strata: Codes | None = None) -> Spread:
    """Estimate the components of the variance of mean(b) - mean(a).

    `a` [runs of A, n] and `b` [runs of B, n] are scores on the same documents; `clusters` and `strata` as of `mean`. Of
    runs in pairs `a` is zero, [1, n], and `b` has the differences of the pairs: what a pair shares is not an error.
    """
    shared = 0.0
    for side in (a, b):
        if len(side) > 1:
            residuals = side - side.mean(axis=0)
            shared += sum(mean(row, clusters, strata).variance for row in residuals) / (len(side) * (len(side) - 1))
    documents = mean(b.mean(axis=0) - a.mean(axis=0), clusters, strata).variance
    return Spread(between(a.mean(axis=1)), between(b.mean(axis=1)), documents, shared, len(a), len(b))


def between(scores: Floats) -> float:
    """Return the variance of the mean of a side's [runs], from that between their scores; 0 for a single run."""
    return float(scores.var(ddof=1)) / len(scores) if len(scores) > 1 else 0.0


def crossed(documents: Estimate, parts: Spread, level: float = 1 - CONFIDENCE) -> Estimate:
    """Return the difference with its error over both other seeds and other documents.

    Its degrees of freedom are those of the t test that has the critical difference of Banerjee's at a level, and so,
    by default, the same 95 % interval. `documents` has the error over other documents alone, adjusted or not; `parts`
    has the other components of the variance.
    """
    variance = max(parts.seeds + documents.variance - parts.shared, parts.seeds, documents.variance)
    if not variance > 0:
        return Estimate(documents.value, variance, documents.freedom)
    critical = _critical_difference(documents, parts, level)
    return Estimate(documents.value, variance, _freedom(critical / math.sqrt(variance), level))


def crossed_p_value(documents: Estimate, parts: Spread) -> float:
    """Return the smallest level at which the difference is significant. Arguments as `crossed`.

    NaN if a component's variance is unknown, or if there is a difference and no variance.
    """
    difference = abs(documents.value)
    if math.isnan(documents.variance) or not _critical_difference(documents, parts, 1 - CONFIDENCE) > 0:
        return 1.0 if difference == 0 else math.nan

    def excess(exponent: float) -> float:
        return _critical_difference(documents, parts, 10**exponent) - difference

    return float(10 ** _root_of_decreasing(excess, -100.0, 0.0))


def _critical_difference(documents: Estimate, parts: Spread, level: float) -> float:
    """Return the smallest significant difference at a level; at least that of documents alone."""

    def squared(variance: float, freedom: float) -> float:
        return variance * t_quantile(level / 2, freedom) ** 2 if variance > 0 else 0.0

    alone = squared(documents.variance, documents.freedom)
    whole = (
        squared(parts.seeds_a, parts.runs_a - 1)
        + squared(parts.seeds_b, parts.runs_b - 1)
        + squared(documents.variance - parts.shared, documents.freedom)
    )
    return math.sqrt(max(whole, alone))


def _freedom(quantile: float, level: float) -> float:
    """Return the degrees of freedom at which a two-sided t test at a level has this quantile."""
    return float(10 ** _root_of_decreasing(lambda power: t_quantile(1 - level / 2, 10**power) - quantile, -1.0, 9.0))


def _root_of_decreasing(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of a decreasing function between two arguments, by bisection; the nearer end if it has none."""
    for _ in range(45):
        middle = (low + high) / 2
        if function(middle) > 0:
            low = middle
        else:
            high = middle
    return high
