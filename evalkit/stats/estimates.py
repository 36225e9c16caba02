"""Means with standard errors and confidence intervals.

In: one value per document, and which documents share a source or a stratum. Out: an `Estimate`. Also standard errors
of shares, of averages over fixed tasks and of lm-eval's groups, and bootstrap intervals over sources.

Sources: clustered standard errors as in Miller, "Adding Error Bars to Evals" (2411.00640), with the CR2 correction and
degrees of freedom of Bell and McCaffrey (2002) under a random-effects working model (Imbens and Kolesár 2016;
Pustejovsky and Tipton 2018); stratified means as in Cochran, Sampling Techniques, 5.4; degrees of freedom of sums after
Satterthwaite (1946).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
Value = TypeVar("Value")

CONFIDENCE = 0.95
"""Confidence level of every interval."""
_ROUNDING = 1e-12
"""Up to which an error of equal values differs from 0."""


class Estimate(NamedTuple):
    """A mean with its variance and the degrees of freedom of that, in the unit of the values."""

    value: float
    variance: float
    """Square of the standard error; NaN where there are too few values to estimate it."""
    freedom: float
    skewness: float = 0.0
    """Of the mean's distribution, see `skewness`; 0: taken as symmetric."""

    @property
    def stderr(self) -> float:
        return math.sqrt(self.variance)


class Interval(NamedTuple):
    low: float
    high: float


def mean(values: Floats, clusters: Codes | None = None, strata: Codes | None = None) -> Estimate:
    """Estimate the mean of values whose documents may share sources (clusters) and come from fixed strata.

    The variance is the sum over clusters of (sum of v - mean of its stratum)² / n². Each square is corrected for its
    downward bias, since the mean is fitted to the same values: CR2. For clusters of equal size this is Liang and
    Zeger's G / (G - 1), for independent documents s² / n, in strata Cochran's sum.

    The bias of a square, and the degrees of freedom of the sum of squares (Satterthwaite's match of the first two
    moments), depend on how the variance of a cluster's sum grows with its size. That is estimated under a model in
    which documents of a cluster share a random effect. With clusters of very unequal size the degrees of freedom are
    few, whatever the number of clusters; with equal sizes they are that number less one for each stratum.

    The variance within a stratum of one cluster cannot be estimated, so all such strata are pooled (a single one is
    merged with the smallest other), which is conservative.

    Args:
        values: [n].
        clusters: [n], the same number for documents of one source; None: each document is its own cluster.
        strata: [n]; clusters are nested in strata. None: a single stratum.

    Raises:
        ValueError: there are no values.
    """
    n = len(values)
    if not n:
        raise ValueError("mean of no values; expected one or more")
    value = float(values.mean())
    stratum, cluster = _nested(n, clusters, strata)
    stratum_sizes, sizes = np.bincount(stratum).astype(np.float64), np.bincount(cluster).astype(np.float64)
    within = values - (np.bincount(stratum, values) / stratum_sizes)[stratum]
    stratum_of = np.zeros(len(sizes), np.int64)
    stratum_of[cluster] = stratum
    counts = np.bincount(stratum_of).astype(np.float64)
    if counts.min() < 2:
        return Estimate(value, math.nan, math.nan)
    sums = np.bincount(cluster, within).astype(np.float64)
    if len(sizes) == n:
        scale, freedom = (counts / (counts - 1))[stratum_of], n**2 / float((counts**2 / (counts - 1)).sum())
    else:
        model = _working_variances(sums, float(within @ within), sizes, stratum_sizes, stratum_of)
        scale, freedom = _cr2(model, sizes / stratum_sizes[stratum_of], stratum_of)
    return Estimate(value, float((scale * sums**2).sum()) / n**2, freedom)


def skewness(values: Floats, clusters: Codes | None = None, strata: Codes | None = None) -> float:
    """Return the estimated skewness of the distribution of the mean; arguments as of `mean`."""
    stratum, cluster = _nested(len(values), clusters, strata)
    sums = np.bincount(cluster, values - (np.bincount(stratum, values) / np.bincount(stratum))[stratum])
    unit = sums / (float(np.abs(sums).max()) or 1.0)
    return float((unit**3).sum() / ((unit**2).sum() or 1.0) ** 1.5)


def by_sample(values: Sequence[Value], samples: Sequence[str] = ()) -> list[list[Value]]:
    """Return the values of tasks in groups of one sample each, as `average` takes them; without names, one by one."""
    groups: dict[str, list[Value]] = {}
    for name, value in zip(samples or map(str, range(len(values))), values, strict=True):
        groups.setdefault(name, []).append(value)
    return list(groups.values())


def parts_of_average(estimates: Sequence[Estimate], samples: Sequence[str] = ()) -> list[Estimate]:
    """Return what each sample contributes to an unweighted mean of estimates (`average`): independent summands."""
    count = len(estimates)
    return [
        Estimate(
            sum(estimate.value for estimate in of_sample) / count,
            (sum(estimate.stderr for estimate in of_sample) / count) ** 2,
            min(estimate.freedom for estimate in of_sample),
            max((estimate.skewness for estimate in of_sample), key=abs),
        )
        for of_sample in by_sample(estimates, samples)
    ]


def average(estimates: Sequence[Estimate], samples: Sequence[str] = ()) -> Estimate:
    """Return the unweighted mean of estimates; the tasks are fixed, not sampled.

    `samples` names the sample of each estimate. Those of one sample, such as the same questions in texts of several
    lengths, may depend on each other in any way, so that their standard errors add; others are independent.
    """
    of_samples = parts_of_average(estimates, samples)
    value = sum(part.value for part in of_samples)
    parts, freedom = (np.array([getattr(part, name) for part in of_samples]) for name in ("variance", "freedom"))
    shares = parts / (parts.sum() or 1.0)
    skewed = float((shares**1.5 * np.array([part.skewness for part in of_samples])).sum())
    return Estimate(value, float(parts.sum()), _satterthwaite(parts, freedom), skewed)


def known_error(error: float) -> float | None:
    """Return a standard error or deviation; None if it is NaN, or 0 but for rounding.

    Values that are all equal, such as two right answers of two, do not show how much others would vary.
    """
    return error if error > _ROUNDING else None


def error_of_share(share: float, n: int) -> float | None:
    """Return the standard error of a share of n documents (sample variance, as lm-eval's); None for n = 1."""
    return math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else None


def error_of_mean(values: Floats) -> float | None:
    """Return the standard error of the mean of independent values, s / √n; None for a single value or equal ones."""
    return known_error(float(values.std(ddof=1)) / len(values) ** 0.5) if len(values) > 1 else None


def error_of_average(errors: Sequence[float | None], samples: Sequence[str] = ()) -> float | None:
    """Return the standard error of an unweighted mean over fixed tasks: √(Σ SE²) / T; None if any SE is unknown.

    Those of tasks with the same sample add (`average`).
    """
    known = [error for error in errors if error is not None]
    return math.hypot(*map(sum, by_sample(known, samples))) / len(known) if len(known) == len(errors) else None


def pooled_error(errors: Sequence[float | None], sizes: Sequence[int]) -> float | None:
    """Return the standard error of the mean over all documents of several tasks, by lm-eval's formula for groups.

    It is that of the pooled sample variance, from the error of each task's mean and its number of documents. None if a
    task's error is unknown, or every task has a single document.
    """
    known, freedom = [error for error in errors if error is not None], sum(sizes) - len(sizes)
    if len(known) < len(errors) or not freedom:
        return None
    spread = sum((n - 1) * n * error**2 for n, error in zip(sizes, known, strict=True))
    return math.sqrt(spread / freedom / sum(sizes))


def resampled_means(values: Floats, clusters: Codes, count: int, seed: Sequence[int], unit: float = 1.0) -> Floats:
    """Return [count] bootstrap means of [n] values, times `unit`; whole clusters, [n] from 0, are resampled."""
    sums, sizes = np.bincount(clusters, values), np.bincount(clusters).astype(float)
    drawn = len(sizes)
    counts = np.random.default_rng(seed).multinomial(drawn, np.full(drawn, 1 / drawn), size=count)
    means: Floats = unit * (counts @ sums) / (counts @ sizes)
    return means


def percentile_interval(means: Floats) -> Interval:
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(float(low), float(high))


def interval(estimate: Estimate, level: float = 1 - CONFIDENCE) -> Interval:
    """Return the interval of an estimate that misses the true value with a probability of `level`.

    It is that of t; of a skewed estimate its union with that of t after Hall's (1992) cubic transformation. Either
    alone misses too often, t on the side of the longer tail, the other with symmetric heavy tails.
    """
    quantile, error = t_quantile(1 - level / 2, estimate.freedom), estimate.stderr
    if not estimate.skewness:
        return Interval(estimate.value - quantile * error, estimate.value + quantile * error)
    low, high = (_hall_inverse(side, estimate.skewness) for side in (quantile, -quantile))
    return Interval(estimate.value - max(quantile, low) * error, estimate.value - min(-quantile, high) * error)


def hall(statistic: float, skewness: float) -> float:
    """Return a t statistic without its skewness, by Hall's cubic transformation (1992, On the removal of skewness)."""
    return statistic + skewness * statistic**2 / 3 + skewness**2 * statistic**3 / 27 + skewness / 6


def _hall_inverse(transformed: float, skewness: float) -> float:
    return 3 * (math.cbrt(1 + skewness * transformed - skewness**2 / 6) - 1) / skewness


def t_quantile(probability: float, freedom: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


def _nested(n: int, clusters: Codes | None, strata: Codes | None) -> tuple[Codes, Codes]:
    """Return ([n] stratum, [n] cluster) of each value, numbered from 0; merge strata of one cluster if possible."""
    if strata is None:
        stratum = np.zeros(n, np.int64)
        cluster = np.arange(n) if clusters is None else np.unique(clusters, return_inverse=True)[1]
        return stratum, cluster
    stratum, cluster = np.unique(strata, return_inverse=True)[1], np.arange(n)
    if clusters is not None:
        inside = np.unique(clusters, return_inverse=True)[1]
        cluster = np.unique(stratum * (inside.max() + 1) + inside, return_inverse=True)[1]
    stratum_of = np.zeros(cluster.max() + 1, np.int64)
    stratum_of[cluster] = stratum
    sizes = np.bincount(stratum_of)
    lone = sizes == 1
    if lone.sum() == 1 and len(sizes) > 1:
        # A single stratum of one cluster is pooled with the smallest other stratum
        lone[int(np.argmin(np.where(lone, n + 1, sizes)))] = True
    merged = np.where(lone, -1, np.arange(len(sizes)))[stratum]
    return np.unique(merged, return_inverse=True)[1], cluster


def _working_variances(sums: Floats, square: float, sizes: Floats, stratum_sizes: Floats, stratum_of: Codes) -> Floats:
    """Return [clusters] variances of clusters' sums, up to a common factor, under a random-effects model.

    The variances between and within clusters are those of the one-way analysis of variance, about the strata's means.
    `sums` are those of the residuals by cluster, `square` is the sum of their squares.
    """
    n, count = sizes.sum(), len(sizes)
    between = float((sums**2 / sizes).sum())
    inside = max(0.0, square - between) / (n - count)
    typical = n - float((sizes**2 / stratum_sizes[stratum_of]).sum())
    shared = max(0.0, (between - (count - len(stratum_sizes)) * inside) / typical)
    # If all values are equal, both variances are 0 and the model is not identified
    model: Floats = inside * sizes + shared * sizes**2 if inside + shared > 0 else sizes
    return model


def _cr2(model: Floats, share: Floats, stratum_of: Codes) -> tuple[Floats, float]:
    """Return ([clusters] CR2 factors of the squared sums, degrees of freedom of the weighted sum).

    With t the model's variance of a cluster's sum, T the sum of t over the stratum and h (`share`) the cluster's share
    of its documents, two sums about the stratum's mean have the covariance c = [same cluster] t - h t' - h' t + h h' T.
    The factor is t / c of a cluster with itself, so that the products have the expectations t. The degrees of freedom
    are twice the square of their sum's expectation over its variance, which is twice the sum of factor x factor' x c²
    over all pairs in a stratum. That sum is expanded algebraically, since there are too many pairs to enumerate.
    """

    def total(values: Floats) -> Floats:
        return np.bincount(stratum_of, values).astype(np.float64)

    whole = total(model)
    own = model * (1 - share) ** 2 + share**2 * (whole[stratum_of] - model)
    scale = model / own
    both, mixed, squares = total(scale * share**2), total(scale * share * model), total(scale * model**2)
    pairs = 2 * both * squares + 2 * mixed**2 + (whole * both) ** 2 - 4 * whole * mixed * both
    half_variance = total(model**2) + pairs - total((scale * (own - model)) ** 2)
    return scale, float(whole.sum()) ** 2 / float(half_variance.sum())


def _satterthwaite(parts: Floats, freedom: Floats) -> float:
    """Return Satterthwaite's degrees of freedom of a sum of variances; if all are zero, as for equal ones."""
    if np.isnan(parts).any():
        return math.nan
    weights = parts if parts.any() else np.ones(len(parts))
    return float(weights.sum()) ** 2 / float((weights**2 / freedom).sum())
