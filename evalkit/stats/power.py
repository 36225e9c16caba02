"""Smallest detectable differences.

In: the observed error. Out: the smallest true difference that a two-sided test, at 5 % if no other level is given,
detects with a power of 80 %, None where no difference reaches this power; and the seeds that a difference needs. The
level is that of the verdict: 5 % / m for the first of m that are corrected by Holm's method, if the others show none.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from evalkit.stats.estimates import Estimate, Floats, t_quantile
from evalkit.stats.significance import Spread

ALPHA = 0.05
"""Significance level of every test."""
POWER = 0.8
"""Power at which a difference counts as detectable."""
MOST_SEEDS = 1000
"""Seeds per side above which a plan is not looked for."""
_DRAWS = 4096
"""Draws of the variances over which power is averaged; stratified, so that its error is below half a point."""


def t_power(shift: float, freedom: float, level: float = ALPHA) -> float:
    """Return the power of a two-sided t test for a difference of `shift` standard errors (noncentral t)."""
    from scipy.special import nctdtr

    critical = t_quantile(1 - level / 2, freedom)
    # Above 5 standard errors the wrong tail is below 1e-9, and scipy's noncentral t is unreliable for it
    wrong = float(nctdtr(freedom, shift, -critical)) if shift < 5 else 0.0
    return 1 - float(nctdtr(freedom, shift, critical)) + wrong


def t_detectable(stderr: float, freedom: float, most: float = 1.0, level: float = ALPHA) -> float | None:
    """Return the smallest difference that a t test detects, in the unit of `stderr`; None if it is more than `most`."""
    if not stderr > 0:
        return None
    # Even with one degree of freedom, 30 standard errors are detected with a power of 80 %
    shift = _first(lambda shift: t_power(shift, freedom, level), 30.0)
    return None if shift is None or shift * stderr > most else shift * stderr


def detectable(
    documents: Estimate,
    parts: Spread | None = None,
    most: float = math.inf,
    level: float = ALPHA,
    is_known: bool = False,
) -> float | None:
    """Return the smallest difference that a comparison with as many documents and runs detects; None above `most`.

    The test is the t test of an estimate, or with several runs that of `significance.crossed`. Of a variance with few
    degrees of freedom the estimate is often too small, and so would be a difference computed from it as if it were
    true. So the power is the mean over the fiducial distribution of the true variances, f v / χ² with f degrees of
    freedom, and over the variances that a repetition estimates: over many comparisons it is 80 %.

    Args:
        documents: its error is over other documents; the value is not used.
        parts: components of the variance, if a side has several runs.
        most: largest possible difference.
        level: of the test.
        is_known: whether the variances are true ones, not estimates.
    """
    from scipy.special import ndtr

    of_documents, both = documents.freedom, parts.runs_a + parts.runs_b - 2 if parts else 0

    def added(*components: tuple[float, float, float, int]) -> tuple[Floats, Floats]:
        """Return draws of the true variance, and of the squared critical difference of a repetition.

        Components are (estimate, degrees of freedom of the estimate, of a repetition's, number of the draw).
        """
        true = critical = np.zeros(_DRAWS)
        for variance, freedom, repeated, number in components:
            if variance > 0:
                scaled = variance * np.ones(_DRAWS) if is_known else variance / _chi_squares(min(number, 1), freedom)
                true = true + scaled
                squared = t_quantile(1 - level / 2, repeated) ** 2 * _chi_squares(2 + number, repeated)
                critical = critical + squared * scaled
        return true, critical

    true, critical = added((documents.variance, of_documents, of_documents, 0))
    if parts:
        # Seeds of both sides have one variance, as in `expected_spread`, and so one estimate
        runs = [(parts.seeds_a, parts.runs_a, 1), (parts.seeds_b, parts.runs_b, 2)]
        pooled = sum((n - 1) * n * of for of, n, _ in runs) / both
        seeds = [(pooled / n, both, n - 1, number) for _, n, number in runs if n > 1]
        whole = added((documents.variance - parts.shared, of_documents, of_documents, 0), *seeds)
        true, critical = np.maximum(true, whole[0]), np.maximum(critical, whole[1])
    if not true.max() > 0:
        return None
    error, critical = np.sqrt(true), np.sqrt(critical)
    unit = float(np.median(error))

    def power(shift: float) -> float:
        return float((ndtr((shift * unit - critical) / error) + ndtr((-shift * unit - critical) / error)).mean())

    shift = _first(power, 1e5, 2.0)
    return None if shift is None or shift * unit > most else shift * unit


@lru_cache(maxsize=64)
def _chi_squares(number: int, freedom: float) -> Floats:
    """Return draws of χ² over its degrees of freedom, stratified, and independent of those with another number."""
    from scipy.special import gammaincinv

    strata = np.random.default_rng(number).permutation(_DRAWS)
    draws: Floats = gammaincinv(freedom / 2, (strata + 0.5) / _DRAWS) * 2 / freedom
    return draws


def sign_flip_detectable(
    sums: Floats, weights: Floats, stderr: float, most: float = 1.0, level: float = ALPHA
) -> float | None:
    """Return the smallest difference that the sign-flip test of whole sources detects.

    It is that of a t test with the observed error and the effective number of equal sources. Where few sources differ,
    the discreteness of the exact test requires more. `sums` and `weights` are [clusters] sums of differences, and
    documents; `stderr` is that of the mean over documents, `most` the largest possible difference of scores.
    """
    n, count = float(weights.sum()), len(sums)
    smooth = 0.0 if stderr == 0 else t_detectable(stderr, n**2 / float((weights**2).sum()) - 1, most, level)
    differing = np.abs(sums[sums != 0])
    exact = mcnemar_detectable(count, len(differing), level)
    if smooth is None or exact is None:
        return None
    size = float(differing.mean()) if len(differing) else n / count
    return max(smooth, exact * size * count / n)


def mcnemar_power(n: int, discordance: float, difference: float, level: float = ALPHA) -> float:
    """Return the power of the exact McNemar test for a true difference, by summing over all outcomes.

    `discordance` is the share of the n documents that only one side gets right; `difference`, at most as large, the
    share won less the share lost.
    """
    from scipy.special import bdtr, gammaln, xlog1py, xlogy

    mean, spread = n * discordance, math.sqrt(n * discordance * (1 - discordance))
    # Six standard deviations and a margin cover all but 1e-9 of the probability
    counts = np.arange(max(1, int(mean - 6 * spread - 10)), min(n, int(mean + 6 * spread + 30)) + 1)
    most = _most_losses(int(counts[0]), int(counts[-1]), level)
    few, won = np.maximum(most, 0), (1 + difference / discordance) / 2
    either = np.where(most >= 0, bdtr(few, counts, 1 - won) + bdtr(few, counts, won), 0.0)
    choose = gammaln(n + 1) - gammaln(counts + 1) - gammaln(n - counts + 1)
    binomial = np.exp(choose + xlogy(counts, discordance) + xlog1py(n - counts, -discordance))
    return float((binomial * either).sum())


def mcnemar_detectable(n: int, discordant: float, level: float = ALPHA) -> float | None:
    """Return the smallest difference that the exact McNemar test detects.

    The number of discordant documents is the observed one, or the number that the difference requires, if larger.
    """
    observed = discordant / n
    return _first(lambda difference: mcnemar_power(n, max(observed, difference), difference, level), 1.0)


@lru_cache(maxsize=64)
def _most_losses(first: int, last: int, level: float) -> Floats:
    """Return, for each number of discordant documents, the most losses (or wins) that are significant; -1 if none."""
    from scipy.special import bdtr, bdtrik

    counts = np.arange(first, last + 1)
    most = np.nan_to_num(np.floor(bdtrik(level / 2, counts, 0.5)), nan=-1.0)
    significant: Floats = np.where(bdtr(np.maximum(most, 0), counts, 0.5) > level / 2, most - 1, most)
    return significant


def _first(power: Callable[[float], float], most: float, start: float | None = None) -> float | None:
    """Return the smallest argument in (0, most] at which an increasing function reaches `POWER`; None if none does."""
    low, high = 0.0, start or most / 32
    under, over = -POWER, power(high) - POWER
    while not over >= 0:
        if high >= most:
            return None
        low, under, high = high, over, min(2 * high, most)
        over = power(high) - POWER
    # False position, halving the value at the retained end (Illinois algorithm); scipy.optimize is slow to import
    side = 0
    while high - low > 1e-7 * high:
        middle = high - over * (high - low) / (over - under)
        reached = power(middle) - POWER
        if abs(reached) < 1e-9:
            return middle
        if reached > 0:
            high, over, under = middle, reached, under / 2 if side > 0 else under
            side = 1
        else:
            low, under, over = middle, reached, over / 2 if side < 0 else over
            side = -1
    return high


def expected_spread(parts: Spread, seeds: int, documents: float = 1.0) -> Spread:
    """Return the variance components to expect with so many seeds on each side, whose variances are taken as equal.

    `parts` are observed, with several runs on both sides, or pairs of runs; `documents` is a multiple of the observed
    number.
    """
    sides = [(of, n) for of, n in ((parts.seeds_a, parts.runs_a), (parts.seeds_b, parts.runs_b)) if n > 1]
    # The interaction of one run with the observed documents, which the variance between runs contains
    residual = parts.shared / sum(1 / n for _, n in sides)
    own = max(sum(of * n for of, n in sides) / len(sides) - residual, 0.0)
    residual /= documents
    side, shared = (own + residual) / seeds, len(sides) * residual / seeds
    of_a, runs_a = (side, seeds) if len(sides) > 1 else (0.0, 1)
    return Spread(of_a, side, max(parts.documents - parts.shared, 0.0) / documents + shared, shared, runs_a, seeds)


def seeds_detectable(parts: Spread, seeds: int, documents: float = 1.0, level: float = ALPHA) -> float | None:
    """Return the smallest difference found with 80 % power, in the scores' unit; None if there is none.

    Without any variance it is 0. The observed variances are taken as true, and documents to be many. Arguments as for
    `expected_spread`, and the level of the verdict.
    """
    expected = expected_spread(parts, seeds, documents)
    if not expected.seeds + expected.documents > 0:
        return 0.0
    return detectable(Estimate(0.0, expected.documents, 1e6), expected, level=level, is_known=True)


def seeds_needed(parts: Spread, difference: float, documents: float = 1.0, level: float = ALPHA) -> int | None:
    """Return the fewest seeds per side that find a difference with 80 % power; None if `MOST_SEEDS` are too few."""

    def suffice(seeds: int) -> bool:
        smallest = seeds_detectable(parts, seeds, documents, level)
        return smallest is not None and smallest <= abs(difference)

    fewest = 2 + bisect_left(range(2, MOST_SEEDS + 1), True, key=suffice)
    return fewest if fewest <= MOST_SEEDS else None
