"""Noise of benchmark scores: variances between checkpoints and seeds, signal-to-noise ratios, decision accuracy.

In: scores of checkpoints, seeds and models. Out: numbers with 95 % intervals (`Bounded`).

Neighbouring checkpoints of a training are not independent. What K of them show is the variance within such a window,
whose expectation is σ² (1 - ρ) with ρ their mean correlation; the rest, σ² ρ, is common to the window, and only seeds
show it. A variance within a window has K - 1 degrees of freedom if checkpoints are independent, and otherwise fewer,
down to those of a random walk. Intervals have the latter, so they hold for every autocorrelation of first order.

Sources: Heineman et al., Signal and Noise (2508.13144); Satterthwaite (1946); Donner and Zou (2012) for intervals of
differences and ratios from those of their parts (MOVER); Hoeffding (1963) for pairs of models.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from evalkit.stats.estimates import CONFIDENCE, Codes, Estimate, Floats, mean, t_quantile
from evalkit.stats.significance import cluster_sums

_TAIL = (1 - CONFIDENCE) / 2


class Bounded(NamedTuple):
    """A number with its 95 % interval; NaN where it is unknown."""

    value: float
    low: float
    high: float

    def plus(self, number: float) -> Bounded:
        return Bounded(*(part + number for part in self))

    def times(self, factor: float) -> Bounded:
        return Bounded(self.value * factor, *sorted((self.low * factor, self.high * factor)))

    def root(self) -> Bounded:
        """Return the standard deviation of a variance; an estimate below zero, as that of a small component, is 0."""
        return Bounded(*(0.0 if part <= 0 else math.sqrt(part) for part in self))

    def less(self, other: Bounded) -> Bounded:
        """Return the difference of independent estimates."""
        value = self.value - other.value
        below = math.hypot(self.value - self.low, other.high - other.value)
        return Bounded(value, value - below, value + math.hypot(self.high - self.value, other.value - other.low))

    def over(self, other: Bounded) -> Bounded:
        """Return the ratio of independent estimates, by their logarithms; unknown if the other one is 0."""
        if not other.value > 0:
            return UNKNOWN
        own, others = (np.log(np.maximum(number, 1e-300)) for number in (self, other))
        below, above = (
            np.hypot(own[0] - own[1], others[2] - others[0]),
            np.hypot(own[2] - own[0], others[0] - others[1]),
        )
        below, above = below if self.low > 0 else math.inf, above if other.low > 0 else math.inf
        low, high = np.exp(own[0] - others[0] + np.array([-below, above]))
        return Bounded(self.value / other.value, float(low), float(high))


UNKNOWN = Bounded(math.nan, math.nan, math.nan)


def variance_interval(variance: float, freedom: float) -> Bounded:
    """Return a variance of normal values with its χ² interval."""
    from scipy.special import chdtri

    return Bounded(variance, *(float(variance * freedom / chdtri(freedom, tail)) for tail in (_TAIL, 1 - _TAIL)))


def window_freedom(checkpoints: int) -> float:
    """Return the degrees of freedom of the variance within a window of a random walk: 2.1 for 5 checkpoints."""
    eigenvalues = 1 / np.sin(np.pi * np.arange(1, checkpoints) / (2 * checkpoints)) ** 2
    return float(eigenvalues.sum() ** 2 / (eigenvalues**2).sum())


def window_variance(windows: Floats) -> Bounded:
    """Return the mean variance within windows, [models, seeds, checkpoints] of scores.

    Models of one seed may have read the same rows in the same order, and so move alike.
    """
    models, seeds, count = windows.shape
    alike = np.tile(np.eye(seeds), (models, models))
    return _pooled(np.cov(windows.reshape(-1, count)) * alike, window_freedom(count))


def seed_variance(scores: Floats) -> Bounded:
    """Return the mean variance between seeds, [models, seeds] of scores; unknown with a single seed."""
    seeds = scores.shape[1]
    return _pooled(np.cov(scores), seeds - 1) if seeds > 1 else UNKNOWN


def _pooled(covariances: Floats, freedom: float) -> Bounded:
    """Return the mean of the variances on a diagonal, each with these degrees of freedom.

    Together they have Satterthwaite's, with the observed covariances, so series that move alike count once. Few
    observations have large covariances by chance, which makes the interval longer than necessary.
    """
    total, square = float(np.trace(covariances)), float((covariances**2).sum())
    return variance_interval(total / len(covariances), freedom * (total**2 / square if square else 1.0))


def document_error(values: Floats, clusters: Codes | None, strata: Codes | None) -> Estimate:
    """Return a mean over documents (`estimates.mean`), with the degrees of freedom of values that are not normal.

    A sample variance has 2 n / (κ - 1), with κ the kurtosis of the sources' sums. Of skewed values it is estimated far
    too low, so a quarter of it counts: then the interval covers log-normal values, of 50 documents too.
    """
    estimate = mean(values, clusters, strata)
    sums = cluster_sums(values - estimate.value, clusters)
    excess = len(sums) * float((sums**4).sum()) - float((sums**2).sum()) ** 2
    freedom = len(sums) * float((sums**2).sum()) ** 2 / (2 * excess) if excess > 0 else math.inf
    return estimate._replace(freedom=min(estimate.freedom, freedom))


def largest_difference(scores: Floats, variances: Floats, freedom: float) -> Bounded:
    """Return the largest difference between [models] scores; `variances` are those of the pairs' differences.

    The largest of several estimates is too large by chance, so its lower end is that of all pairs together
    (Bonferroni), the upper one the largest of the pairs'.
    """
    differences, errors = np.abs(np.subtract.outer(scores, scores)), np.sqrt(variances)
    low = differences - t_quantile(1 - _TAIL / (len(scores) * (len(scores) - 1)), freedom) * errors
    high = differences + t_quantile(1 - _TAIL, freedom) * errors
    return Bounded(float(differences.max()), max(0.0, float(low.max())), float(high.max()))


def autocorrelation(windows: Floats, independent: int) -> Bounded:
    """Return the correlation of neighbouring checkpoints, from 0 to 0.99, in [trainings, checkpoints] of scores.

    In a short window, whose mean is subtracted, the usual coefficient is far too low. This is the correlation of a
    process of first order from which that coefficient is expected. `independent` is the number of trainings that do
    not share a seed. Unknown for two checkpoints, and without variance.
    """
    count = windows.shape[1]
    centred = windows - windows.mean(axis=1, keepdims=True)
    if count < 3 or not centred.any():
        return UNKNOWN
    grid, centring, expected = np.linspace(0, 0.99, 100), np.eye(count) - 1 / count, list[float]()
    for value in grid:
        covariance = centring @ _correlations(count, value) @ centring
        expected.append(np.trace(covariance, 1) / np.trace(covariance))
    observed, error = (centred[:, 1:] * centred[:, :-1]).sum() / (centred**2).sum(), (independent * (count - 1)) ** -0.5
    return Bounded(*np.interp(observed + 1.96 * error * np.array([0, -1, 1]), expected, grid).tolist())


def independent_checkpoints(count: int, correlation: float) -> float:
    """Return the number of independent checkpoints whose mean varies as that of `count` autocorrelated ones."""
    return float(count**2 / _correlations(count, correlation).sum())


def _correlations(count: int, correlation: float) -> Floats:
    matrix: Floats = correlation ** np.abs(np.subtract.outer(np.arange(count), np.arange(count))).astype(float)
    return matrix


def decided_alike(before: Floats, after: Floats) -> float:
    """Return the share of pairs of models that two series of [models] scores order alike; a tie counts half."""
    upper = np.triu_indices(len(before), 1)
    first, second = (np.sign(np.subtract.outer(scores, scores)[upper]) for scores in (before, after))
    return float((1 + first * second).mean() / 2)


def decision_accuracy(share: float, models: int) -> Bounded:
    """Return a share of pairs of models with an interval about other models like these.

    Pairs that share a model are not independent: M models have at least the information of M / 2 pairs, for which the
    interval is Clopper and Pearson's.
    """
    from scipy.special import betaincinv

    alike, others = share * (models // 2), (1 - share) * (models // 2)
    low = float(betaincinv(alike, others + 1, _TAIL)) if alike > 0 else 0.0
    return Bounded(share, low, float(betaincinv(alike + 1, others, 1 - _TAIL)) if others > 0 else 1.0)


def rank_correlation(a: Floats, b: Floats) -> float:
    """Return Spearman's coefficient, with mean ranks for ties; NaN if one of both is constant."""
    ranks = [(values[:, None] > values).sum(axis=1) + (values[:, None] == values).sum(axis=1) / 2 for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1]) if all(np.ptp(rank) for rank in ranks) else math.nan
