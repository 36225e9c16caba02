"""What other numbers of seeds and documents could show, from the components of the variance of a finished comparison.

In: a `Spread` (`seeds.spread`). Out: the smallest difference that Banerjee's test finds with a power of 80 %, or the
seeds per side that a difference needs. The observed components are taken as true, although few seeds estimate them
badly: with three seeds on each side, the true deviation between seeds is between 0.6 and 2.9 times the observed one
(95 % interval with 4 degrees of freedom).
"""

from __future__ import annotations

import math

from evalkit.stats.estimates import Estimate
from evalkit.stats.power import ALPHA, t_detectable
from evalkit.stats.seeds import Spread, crossed

MOST_SEEDS = 1000
"""Seeds per side above which a plan is not looked for."""
_FREEDOM = 1e6
"""Degrees of freedom of the variance between documents, if they are many."""


def expected_spread(parts: Spread, seeds: int, documents: float = 1.0) -> Spread:
    """Return the variance components to expect with so many seeds on each side, whose variances are taken as equal.

    Args:
        parts: observed, with several runs on both sides.
        seeds: of each side, at least 2.
        documents: how many times the observed number of documents.
    """
    # The interaction of one run with the observed documents, which the variance between runs contains
    residual = parts.shared / (1 / parts.runs_a + 1 / parts.runs_b)
    own = max((parts.seeds_a * parts.runs_a + parts.seeds_b * parts.runs_b) / 2 - residual, 0.0)
    residual /= documents
    side, shared = (own + residual) / seeds, 2 * residual / seeds
    return Spread(side, side, max(parts.documents - parts.shared, 0.0) / documents + shared, shared, seeds, seeds)


def seeds_detectable(parts: Spread, seeds: int, documents: float = 1.0, level: float = ALPHA) -> float | None:
    """Return the smallest difference found with 80 % power, in the scores' unit; None if it is above 30 errors.

    Without any variance it is 0. The test's distribution is taken as that of the t with the same critical difference.

    Args:
        parts: as for `expected_spread`.
        seeds: of each side.
        documents: how many times the observed number of documents.
        level: of the test; α / m for one of m comparisons under Holm's correction, where the others show nothing.
    """
    expected = expected_spread(parts, seeds, documents)
    estimate = crossed(Estimate(0.0, expected.documents, _FREEDOM), expected, level)
    return t_detectable(estimate.stderr, estimate.freedom, math.inf, level) if estimate.variance > 0 else 0.0


def seeds_needed(parts: Spread, difference: float, documents: float = 1.0, level: float = ALPHA) -> int | None:
    """Return the fewest seeds per side that find a difference with 80 % power; None if `MOST_SEEDS` are too few.

    Arguments as for `seeds_detectable`.
    """

    def found(seeds: int) -> bool:
        smallest = seeds_detectable(parts, seeds, documents, level)
        return smallest is not None and smallest <= abs(difference)

    low, high = 1, 2
    while not found(high):
        if high >= MOST_SEEDS:
            return None
        low, high = high, min(2 * high, MOST_SEEDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high
