"""Several runs of each side: how much of a difference is seeds, and how much is documents.

In: scores of every run of a side on the same documents. Out: the difference of the sides' means, with the error that
holds for other seeds and other documents, and its p value.

Runs and documents are crossed: every run answers every document. The variance of the difference has three parts,
seeds, documents, and what a seed does to a single document. The spread between the runs' scores holds the first and
the third, that between documents the second and the third; so the two are added and the third, estimated from the
residuals, is taken off once. This is how radiology compares readers on the same cases (Obuchowski and Rockette 1995;
Hillis 2007).

The test is Banerjee's (1960): a difference is significant where its square exceeds the sum of the parts' variances,
each times the square of its own t quantile. That rejects at most as often as it says, whatever share of the variance
each part has. Welch's and Satterthwaite's degrees of freedom do not hold here: with two runs beside ten they reject up
to 13 % at 5 %, because a small spread between two runs is taken for a well-known one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from evalkit.stats.estimates import CONFIDENCE, Codes, Estimate, Floats, mean, t_quantile

_SMALLEST_P = 1e-100
_HALVINGS = 45


class Spread(NamedTuple):
    """Parts of the variance of a difference of two sides' means."""

    seeds_a: float
    """From the spread between A's runs, s² / K; 0 for a single run, which shows none."""
    seeds_b: float
    documents: float
    """From the spread between documents, paired (and clustered, stratified)."""
    shared: float
    """What both of these hold, which counts once."""
    runs_a: int
    runs_b: int

    @property
    def seeds(self) -> float:
        """From the spread between runs, of both sides."""
        return self.seeds_a + self.seeds_b

    @property
    def deviations(self) -> tuple[float, float]:
        """Standard deviations between A's runs and between B's; not a number for a single run."""
        sides = (self.runs_a, self.seeds_a), (self.runs_b, self.seeds_b)
        a, b = (math.sqrt(runs * variance) if runs > 1 else math.nan for runs, variance in sides)
        return a, b


def spread(a: Floats, b: Floats, clusters: Codes | None = None, strata: Codes | None = None) -> Spread:
    """The parts of the variance of mean(b) - mean(a).

    Args:
        a: [runs of A, n] scores on the same documents.
        b: [runs of B, n].
        clusters: [n], as `estimates.mean` takes them.
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
    """The variance of the mean of a side's runs, from their scores alone; 0 for a single run, which shows none.

    Args:
        scores: [runs].
    """
    return float(scores.var(ddof=1)) / len(scores) if len(scores) > 1 else 0.0


def crossed(documents: Estimate, parts: Spread) -> Estimate:
    """The difference with the error that holds for other seeds and other documents alike.

    Its degrees of freedom are those of the t that has the same 95 % interval as Banerjee's test.

    Args:
        documents: the difference with the error for other documents alone, as it is or with one won and one lost.
        parts: the other parts of its variance.
    """
    variance = max(parts.seeds + documents.variance - parts.shared, parts.seeds, documents.variance)
    if not variance > 0:
        return Estimate(documents.value, variance, documents.freedom)
    reach = _reach(documents, parts, 1 - CONFIDENCE)
    return Estimate(documents.value, variance, _freedom(reach / math.sqrt(variance)))


def crossed_p_value(documents: Estimate, parts: Spread) -> float:
    """Two-sided: the smallest level at which the difference is significant. Arguments as those of `crossed`.

    Not a number where a part's variance is not known, or where there is a difference and no variance.
    """
    difference = abs(documents.value)
    if math.isnan(documents.variance) or not _reach(documents, parts, 1 - CONFIDENCE) > 0:
        return 1.0 if difference == 0 else math.nan
    exponent = _falling(lambda power: _reach(documents, parts, 10**power) - difference, math.log10(_SMALLEST_P), 0.0)
    return float(10**exponent)


def _reach(documents: Estimate, parts: Spread, level: float) -> float:
    """How large a difference is significant at a level; never less than if seeds did not differ at all."""

    def squared(variance: float, freedom: float) -> float:
        return variance * t_quantile(level / 2, freedom) ** 2 if variance > 0 else 0.0

    alone = squared(documents.variance, documents.freedom)
    whole = (
        squared(parts.seeds_a, parts.runs_a - 1)
        + squared(parts.seeds_b, parts.runs_b - 1)
        + squared(documents.variance - parts.shared, documents.freedom)
    )
    return math.sqrt(max(whole, alone))


def _freedom(quantile: float) -> float:
    """The degrees of freedom with which Student's t has this 97.5 % quantile."""
    most = 1e9

    def excess(exponent: float) -> float:
        return t_quantile((1 + CONFIDENCE) / 2, 10**exponent) - quantile

    return most if excess(math.log10(most)) >= 0 else float(10 ** _falling(excess, -1.0, math.log10(most)))


def _falling(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function crosses zero, between two arguments (the nearer of which is returned if it does not)."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if function(middle) > 0:
            low = middle
        else:
            high = middle
    return high
