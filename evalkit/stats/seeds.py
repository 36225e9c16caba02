"""Variance components of a difference between sides of several runs: seeds and documents.

In: scores of every run of a side on the same documents. Out: the difference of the sides' means, with the error over
other seeds and other documents, and its p value.

Runs and documents are crossed: every run answers every document. The variance of the difference has three components:
seeds, documents, and their interaction. The variance between the runs' scores contains the first and the third, that
between documents the second and the third; so the two are added and the third, estimated from the residuals, is
subtracted once. This is how radiology compares readers on the same cases (Obuchowski and Rockette 1995; Hillis 2007).

The test is Banerjee's (1960): a difference is significant if its square exceeds the sum of the components' variances,
each times the square of its own t quantile. Its size never exceeds the level, whatever share of the variance each
component has. Welch's and Satterthwaite's degrees of freedom are invalid here: with two runs against ten they reject up
to 13 % at 5 %, because they treat a small variance between two runs as well known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from evalkit.stats.estimates import CONFIDENCE, Codes, Estimate, Floats, mean, t_quantile

_SMALLEST_P = 1e-100
_HALVINGS = 45


class Spread(NamedTuple):
    """Components of the variance of a difference of two sides' means."""

    seeds_a: float
    """Between A's runs, s² / K; 0 for a single run, from which it cannot be estimated."""
    seeds_b: float
    documents: float
    """Between documents, paired (and clustered, stratified)."""
    shared: float
    """Interaction of seeds and documents, which both of these contain and which counts once."""
    runs_a: int
    runs_b: int

    @property
    def seeds(self) -> float:
        """Variance between runs, of both sides."""
        return self.seeds_a + self.seeds_b

    @property
    def deviations(self) -> tuple[float, float]:
        """Standard deviations between A's runs and between B's; NaN for a single run."""
        sides = (self.runs_a, self.seeds_a), (self.runs_b, self.seeds_b)
        a, b = (math.sqrt(runs * variance) if runs > 1 else math.nan for runs, variance in sides)
        return a, b


def spread(a: Floats, b: Floats, clusters: Codes | None = None, strata: Codes | None = None) -> Spread:
    """Estimate the components of the variance of mean(b) - mean(a).

    Args:
        a: [runs of A, n] scores on the same documents.
        b: [runs of B, n].
        clusters: [n], see `estimates.mean`.
        strata: [n].
    """
    shared = 0.0
    for side in (a, b):
        if len(side) > 1:
            residuals = side - side.mean(axis=0)
            shared += sum(mean(row, clusters, strata).variance for row in residuals) / (len(side) * (len(side) - 1))
    documents = mean(b.mean(axis=0) - a.mean(axis=0), clusters, strata).variance
    return Spread(between(a.mean(axis=1)), between(b.mean(axis=1)), documents, shared, len(a), len(b))


def between(scores: Floats) -> float:
    """Return the variance of the mean of a side's runs, from the variance between their scores; 0 for a single run.

    Args:
        scores: [runs].
    """
    return float(scores.var(ddof=1)) / len(scores) if len(scores) > 1 else 0.0


def crossed(documents: Estimate, parts: Spread, level: float = 1 - CONFIDENCE) -> Estimate:
    """Return the difference with its error over both other seeds and other documents.

    Its degrees of freedom are those of the t test that has the critical difference of Banerjee's at a level, and so,
    by default, the same 95 % interval.

    Args:
        documents: the difference with its error over other documents alone, adjusted (`stats.adjusted`) or not.
        parts: the other components of its variance.
        level: of the test.
    """
    variance = max(parts.seeds + documents.variance - parts.shared, parts.seeds, documents.variance)
    if not variance > 0:
        return Estimate(documents.value, variance, documents.freedom)
    critical = _critical_difference(documents, parts, level)
    return Estimate(documents.value, variance, _freedom(critical / math.sqrt(variance), level))


def crossed_p_value(documents: Estimate, parts: Spread) -> float:
    """Return the two-sided p value: the smallest level at which the difference is significant. Arguments as `crossed`.

    NaN if a component's variance is unknown, or if there is a difference and no variance.
    """
    difference = abs(documents.value)
    if math.isnan(documents.variance) or not _critical_difference(documents, parts, 1 - CONFIDENCE) > 0:
        return 1.0 if difference == 0 else math.nan
    exponent = _root_of_decreasing(
        lambda power: _critical_difference(documents, parts, 10**power) - difference, math.log10(_SMALLEST_P), 0.0
    )
    return float(10**exponent)


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
    most = 1e9

    def excess(exponent: float) -> float:
        return t_quantile(1 - level / 2, 10**exponent) - quantile

    return most if excess(math.log10(most)) >= 0 else float(10 ** _root_of_decreasing(excess, -1.0, math.log10(most)))


def _root_of_decreasing(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of a decreasing function between two arguments, by bisection; the nearer end if it has none."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if function(middle) > 0:
            low = middle
        else:
            high = middle
    return high
