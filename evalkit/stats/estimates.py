"""Means with their standard errors and intervals.

In: one value a document, and which documents share a source or a stratum. Out: an `Estimate`.

Standard errors by other formulas stand here too: of shares, of averages over fixed tasks, of lm-eval's groups, and
intervals of resampled sources.

Sources: clustered standard errors as in Miller, "Adding Error Bars to Evals" (2411.00640), with the CR2 correction and
degrees of freedom of Bell and McCaffrey (2002) under a random-effects working model (Imbens and Kolesár 2016;
Pustejovsky and Tipton 2018); stratified means as in Cochran, Sampling Techniques, 5.4; degrees of freedom of sums after
Satterthwaite (1946).
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
    """Degrees of freedom of the variance."""

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

    The variance is the sum over clusters of (sum of v - mean of its stratum)² / n², each square divided by what it
    falls short of the variance of the cluster's sum, because the mean is fitted to the same values: CR2. For clusters
    of equal size this is Liang and Zeger's G / (G - 1), for independent documents s² / n, in strata Cochran's sum.

    By how much a square falls short, and how many degrees of freedom the squares have together (Satterthwaite's match
    of the first two moments), depends on how the variance of a cluster's sum grows with its size. That is estimated:
    documents of a cluster share a random effect. With clusters of very unequal size the degrees of freedom are few,
    whatever the number of clusters; with equal sizes they are that number less one for each stratum.

    A stratum of one cluster does not show its own spread, so all such strata are pooled (a single one joins the
    smallest other), which errs on the safe side.

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
    stratum_sizes, sizes = np.bincount(stratum).astype(np.float64), np.bincount(cluster).astype(np.float64)
    within = values - (np.bincount(stratum, values) / stratum_sizes)[stratum]
    home = np.zeros(len(sizes), np.int64)
    home[cluster] = stratum
    counts = np.bincount(home).astype(np.float64)
    if counts.min() < 2:
        return Estimate(value, math.nan, math.nan)
    sums = np.bincount(cluster, within).astype(np.float64)
    if len(sizes) == n:
        scale, freedom = (counts / (counts - 1))[home], n**2 / float((counts**2 / (counts - 1)).sum())
    else:
        model = _working_variances(sums, float(within @ within), sizes, stratum_sizes, home)
        scale, freedom = _cr2(model, sizes / stratum_sizes[home], home)
    return Estimate(value, float((scale * sums**2).sum()) / n**2, freedom)


def average(estimates: Sequence[Estimate]) -> Estimate:
    """The unweighted mean of independent estimates: the tasks are fixed, not drawn."""
    count = len(estimates)
    parts = np.array([estimate.variance for estimate in estimates]) / count**2
    freedom = np.array([estimate.freedom for estimate in estimates])
    value = sum(estimate.value for estimate in estimates) / count
    return Estimate(value, float(parts.sum()), _satterthwaite(parts, freedom))


def error_of_share(share: float, n: int) -> float | None:
    """Standard error of the share of right answers among n (sample variance, as lm-eval's); None for a single one."""
    return math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else None


def error_of_mean(values: Floats) -> float | None:
    """Standard error of the mean of independent values, s / √n; None for a single one."""
    return float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else None


def error_of_average(errors: Sequence[float | None]) -> float | None:
    """Of an unweighted mean over fixed tasks, from the tasks' own: √(Σ SE²) / T; None where one is not known."""
    known = [error for error in errors if error is not None]
    return math.sqrt(sum(error**2 for error in known)) / len(known) if len(known) == len(errors) else None


def pooled_error(errors: Sequence[float | None], sizes: Sequence[int]) -> float | None:
    """Of the mean over all documents of a group of tasks, as lm-eval has it: from their pooled sample variance.

    Args:
        errors: of each task's mean.
        sizes: documents of each.

    Returns:
        None where an error is not known, or every task has a single document.
    """
    known, freedom = [error for error in errors if error is not None], sum(sizes) - len(sizes)
    if len(known) < len(errors) or not freedom:
        return None
    spread = sum((n - 1) * n * error**2 for n, error in zip(sizes, known, strict=True))
    return math.sqrt(spread / freedom / sum(sizes))


def resampled_means(values: Floats, clusters: Codes, count: int, seed: Sequence[int], unit: float = 1.0) -> Floats:
    """[count] means of the values with whole clusters drawn anew (bootstrap), as many as there are.

    Args:
        values: [n].
        clusters: [n], numbered from 0.
        count: of means.
        seed: of the draws.
        unit: what the means are multiplied by.
    """
    sums, sizes = np.bincount(clusters, values), np.bincount(clusters).astype(float)
    drawn = len(sizes)
    counts = np.random.default_rng(seed).multinomial(drawn, np.full(drawn, 1 / drawn), size=count)
    means: Floats = unit * (counts @ sums) / (counts @ sizes)
    return means


def percentile_interval(means: Floats) -> Interval:
    """The middle of resampled means that holds 95 % of them."""
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(float(low), float(high))


def interval(estimate: Estimate, confidence: float = CONFIDENCE) -> Interval:
    """The t interval of an estimate."""
    reach = t_quantile((1 + confidence) / 2, estimate.freedom) * estimate.stderr
    return Interval(estimate.value - reach, estimate.value + reach)


def t_quantile(probability: float, freedom: float) -> float:
    """Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


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


def _working_variances(sums: Floats, square: float, sizes: Floats, stratum_sizes: Floats, home: Codes) -> Floats:
    """[clusters] variances of clusters' sums, up to a common factor, if documents of a cluster share a random effect.

    Both variances, between and within clusters, are those of the one-way analysis of variance, about the strata's
    means.

    Args:
        sums: [clusters] of what is left of the values when their stratum's mean is taken off.
        square: the sum of squares of the same.
        sizes: [clusters] documents.
        stratum_sizes: [strata] documents.
        home: [clusters] stratum.
    """
    n, count = sizes.sum(), len(sizes)
    between = float((sums**2 / sizes).sum())
    inside = max(0.0, square - between) / (n - count)
    typical = n - float((sizes**2 / stratum_sizes[home]).sum())
    shared = max(0.0, (between - (count - len(stratum_sizes)) * inside) / typical)
    # Values that are all equal say nothing of it
    model: Floats = inside * sizes + shared * sizes**2 if inside + shared > 0 else sizes
    return model


def _cr2(model: Floats, share: Floats, home: Codes) -> tuple[Floats, float]:
    """([clusters] what squared sums are multiplied by, degrees of freedom of the products' sum).

    With t the model's variance of a cluster's sum, T the sum of t over the stratum and h the cluster's share of its
    documents, two sums about the stratum's mean have the covariance c = [same cluster] t - h t' - h' t + h h' T. The
    factor is t / c of a cluster with itself, so that the products have the expectations t. The freedom is twice the
    square of their sum's expectation over its variance, which is twice the sum of factor x factor' x c² over all pairs
    in a stratum. That sum is written out, since pairs are too many.

    Args:
        model: [clusters] t, up to a common factor.
        share: [clusters] h.
        home: [clusters] stratum.
    """

    def total(values: Floats) -> Floats:
        return np.bincount(home, values).astype(np.float64)

    whole = total(model)
    own = model * (1 - share) ** 2 + share**2 * (whole[home] - model)
    scale = model / own
    both, mixed, squares = total(scale * share**2), total(scale * share * model), total(scale * model**2)
    pairs = 2 * both * squares + 2 * mixed**2 + (whole * both) ** 2 - 4 * whole * mixed * both
    doubt = total(model**2) + pairs - total((scale * (own - model)) ** 2)
    return scale, float(whole.sum()) ** 2 / float(doubt.sum())


def _satterthwaite(parts: Floats, freedom: Floats) -> float:
    """Degrees of freedom of a sum of variances; where all of them are zero, as if they were equal."""
    if np.isnan(parts).any():
        return math.nan
    weights = parts if parts.any() else np.ones(len(parts))
    return float(weights.sum()) ** 2 / float((weights**2 / freedom).sum())
