"""Means with their standard errors and intervals.

In: one value a document, and which documents share a source or a stratum. Out: an `Estimate`.

Sources: clustered standard errors as in Miller, "Adding Error Bars to Evals" (2411.00640), with Liang and Zeger's G /
(G - 1); stratified means as in Cochran, Sampling Techniques, 5.4; degrees of freedom of sums after Satterthwaite
(1946); the interval of a paired difference after Bonett and Price (2012).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]

CONFIDENCE = 0.95
"""Of every interval."""


class Estimate(NamedTuple):
    """A mean and what is known of its error, in the unit of the values."""

    value: float
    variance: float
    """Square of the standard error; not a number where there are too few values to tell."""
    freedom: float
    """Degrees of freedom of the variance; infinite where it is no estimate."""

    @property
    def stderr(self) -> float:
        """The standard error."""
        return math.sqrt(self.variance)


class Interval(NamedTuple):
    """From where to where."""

    low: float
    high: float


def mean(values: Floats, clusters: Codes | None = None, strata: Codes | None = None) -> Estimate:
    """The mean of values whose documents may share sources (clusters) and come from fixed strata.

    The variance is that of cluster totals about their stratum's mean: sum over strata h of G_h / (G_h - 1) times the
    sum over clusters g of (sum of v - mean_h)², divided by n². Without strata this is the clustered sandwich, without
    clusters the stratified variance, without both s² / n. A stratum of one cluster tells nothing of its own spread, so
    all such strata are taken as one (a lone one joins the smallest other), which errs on the safe side.

    Args:
        values: [n].
        clusters: [n], the same number for documents of one source; None: each its own.
        strata: [n]; clusters lie within strata. None: all in one.

    Raises:
        ValueError: there are no values.
    """
    n = len(values)
    if not n:
        raise ValueError("the mean of no values")
    value = float(values.mean())
    stratum, cluster = _nested(n, clusters, strata)
    within = values - (np.bincount(stratum, values) / np.bincount(stratum))[stratum]
    totals = np.bincount(cluster, within)
    home = np.zeros(len(totals), np.int64)
    home[cluster] = stratum
    sizes = np.bincount(home).astype(float)
    if sizes.min() < 2:
        return Estimate(value, math.nan, math.nan)
    parts = sizes / (sizes - 1) * np.bincount(home, totals**2) / n**2
    return Estimate(value, float(parts.sum()), _satterthwaite(parts, sizes - 1))


def average(estimates: Sequence[Estimate]) -> Estimate:
    """The unweighted mean of independent estimates: the tasks are fixed, not drawn."""
    count = len(estimates)
    parts = np.array([estimate.variance for estimate in estimates]) / count**2
    freedom = np.array([estimate.freedom for estimate in estimates])
    value = sum(estimate.value for estimate in estimates) / count
    return Estimate(value, float(parts.sum()), _satterthwaite(parts, freedom))


def with_one_won_and_one_lost(estimate: Estimate, n: int, size: float = 1.0) -> Estimate:
    """A mean difference of scores between 0 and 1, as if two more documents had been compared: one won, one lost.

    An interval about the difference itself covers too little where few documents differ, and has no length where none
    does. Bonett and Price (2012) add a half to each cell of the 2 x 2 table, which is to add these two documents.

    Args:
        estimate: of the mean of n differences, each in [-1, 1].
        n: how many documents.
        size: by how much the two are won and lost: 1 for answers that are right or wrong; for graded ones the root
            mean square of the differences that are not zero, or one graded document would outweigh a task.
    """
    observed = estimate.variance * n**2 / (n + 2) ** 2
    # Squares of the two about the mean, and of the mean's own move
    variance = observed + 2 * (size**2 + n * estimate.value**2 / (n + 2)) / (n + 2) ** 2
    # The two are no estimate, so they add variance without uncertainty about it
    freedom = estimate.freedom * (variance / observed) ** 2 if observed > 0 else math.inf
    return Estimate(estimate.value * n / (n + 2), variance, math.nan if math.isnan(variance) else freedom)


def interval(estimate: Estimate, confidence: float = CONFIDENCE) -> Interval:
    """The t interval of an estimate."""
    reach = t_quantile((1 + confidence) / 2, estimate.freedom) * estimate.stderr
    return Interval(estimate.value - reach, estimate.value + reach)


def t_quantile(probability: float, freedom: float) -> float:
    """Student's t; the normal one where the freedom is infinite."""
    from scipy.special import ndtri, stdtrit

    return float(ndtri(probability) if math.isinf(freedom) else stdtrit(freedom, probability))


def _nested(n: int, clusters: Codes | None, strata: Codes | None) -> tuple[Codes, Codes]:
    """([n] stratum, [n] cluster) of each value, counted from 0; every stratum has two clusters or more if it can be."""
    if strata is None:
        stratum = np.zeros(n, np.int64)
        cluster = np.arange(n) if clusters is None else np.unique(clusters, return_inverse=True)[1]
        return stratum, cluster
    stratum = np.unique(strata, return_inverse=True)[1]
    if clusters is None:
        cluster = np.arange(n)
    else:
        inside = np.unique(clusters, return_inverse=True)[1]
        cluster = np.unique(stratum * (inside.max() + 1) + inside, return_inverse=True)[1]
    home = np.zeros(cluster.max() + 1, np.int64)
    home[cluster] = stratum
    sizes = np.bincount(home)
    lone = sizes == 1
    if lone.sum() == 1 and len(sizes) > 1:
        # Nothing to be pooled with but another stratum
        lone[int(np.argmin(np.where(lone, n + 1, sizes)))] = True
    merged = np.where(lone, -1, np.arange(len(sizes)))[stratum]
    return np.unique(merged, return_inverse=True)[1], cluster


def _satterthwaite(parts: Floats, freedom: Floats) -> float:
    """Degrees of freedom of a sum of variances; infinite where all of them are zero."""
    if np.isnan(parts).any():
        return math.nan
    doubt = float((parts**2 / freedom).sum())
    return float(parts.sum()) ** 2 / doubt if doubt > 0 else math.inf
