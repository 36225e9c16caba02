"""How many times fewer documents a continuous outcome needs than accuracy.

In: the lines of both outcomes, on the same documents. Out: the ratio of the numbers of documents at which their average
differences are detected with the same power, with a confidence interval.

A difference of z standard errors on n documents has on m documents z √(m / n); so with the runs' own differences and
variances the numbers of documents for equal power have the ratio (z of the outcome / z of accuracy)². The interval is
Fieller's (1954) for the ratio of two correlated normal variables, squared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from evalkit.comparison.line import ScoredLine
from evalkit.stats.estimates import CONFIDENCE, Estimate, average, mean, t_quantile


class Efficiency(NamedTuple):
    """Documents that accuracy needs for one that the outcome needs, at equal power."""

    times: float
    low: float
    """The 95 % interval."""
    high: float
    """Infinite where accuracy's difference may be zero."""


def efficiency(accuracy: Sequence[ScoredLine], other: Sequence[ScoredLine]) -> Efficiency | None:
    """Return how many times fewer documents an outcome needs than accuracy; None if no interval bounds it.

    Several runs of a side are taken as they are: the ratio is about documents, not about seeds.

    Args:
        accuracy: lines of tasks under accuracy.
        other: lines of the same tasks, in the same order, under the outcome.
    """
    first, second = (average([one.documents for one in lines]) for lines in (accuracy, other))
    if not (first.variance > 0 and second.variance > 0):
        return None
    a, b = first.value / first.stderr, second.value / second.stderr
    shared = _correlation(accuracy, other, first, second)
    found = _fieller(a, b, shared, t_quantile((1 + CONFIDENCE) / 2, min(first.freedom, second.freedom)))
    return None if found is None else Efficiency((b / a) ** 2 if a else math.inf, *found)


def _correlation(
    accuracy: Sequence[ScoredLine], other: Sequence[ScoredLine], first: Estimate, second: Estimate
) -> float:
    """Return the correlation of both average differences over samples of documents."""
    sums = [
        mean(one.differences / first.stderr + two.differences / second.stderr, one.paired.clusters, one.paired.strata)
        for one, two in zip(accuracy, other, strict=True)
    ]
    return max(-1.0, min(1.0, average(sums).variance / 2 - 1))


def _fieller(a: float, b: float, shared: float, quantile: float) -> tuple[float, float] | None:
    """Return the interval of (ratio of expectations, b over a)², of normal variables with deviations of one.

    None where b may be zero, or where every ratio is possible.
    """
    square = quantile**2
    if b**2 <= square:
        return None
    leading, half, last = a**2 - square, a * b - square * shared, b**2 - square
    root = math.sqrt(max(0.0, half**2 - leading * last))
    if leading == 0:
        return (last / (2 * half)) ** 2, math.inf
    ends = sorted(((half - root) / leading, (half + root) / leading), key=abs)
    return ends[0] ** 2, ends[1] ** 2 if leading > 0 else math.inf
