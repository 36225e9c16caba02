"""Means, errors and intervals, compared with statsmodels, scipy, published matrices and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.weightstats import DescrStatsW

from evalkit.stats.adjusted import adjusted_average, pooled, size_of_differences, with_one_won_and_one_lost
from evalkit.stats.estimates import (
    Codes,
    Estimate,
    Floats,
    average,
    error_of_average,
    error_of_mean,
    error_of_share,
    interval,
    mean,
    percentile_interval,
    pooled_error,
    resampled_means,
)
from evalkit.stats.significance import mcnemar, t_test

EXACT = {"rel": 1e-10, "abs": 1e-12}


def random_differences(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).choice([-1.0, 0.0, 1.0], n, p=[0.15, 0.6, 0.25])


@settings(max_examples=50)
@given(st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=40))
def test_independent_documents_are_a_one_sample_t_interval(values: list[float]) -> None:
    estimate = mean(np.array(values))
    assert estimate.value == pytest.approx(np.mean(values), abs=1e-12)
    assert (estimate.stderr, estimate.freedom) == pytest.approx((stats.sem(values), len(values) - 1), **EXACT)
    if estimate.variance:
        assert interval(estimate) == pytest.approx(DescrStatsW(values).tconfint_mean(), **EXACT)


@pytest.mark.parametrize(("size", "groups"), [(3, 30), (5, 400), (100, 9), (1, 50)])
def test_clusters_of_equal_size_are_statsmodels_sandwich(size: int, groups: int) -> None:
    n = size * groups
    clusters = np.random.default_rng(n).permutation(np.repeat(np.arange(groups), size))
    values = random_differences(n, n) + np.random.default_rng(n).normal(0, 0.2, groups)[clusters]
    theirs = sm.OLS(values, np.ones(n)).fit(cov_type="cluster", cov_kwds={"groups": clusters}, use_t=True)
    ours = mean(values, clusters * 7 - 3)  # arbitrary labels
    expected = (theirs.params[0], theirs.bse[0], groups - 1, *theirs.conf_int()[0])
    assert (ours.value, ours.stderr, ours.freedom, *interval(ours)) == pytest.approx(expected, **EXACT)


def literal_cr2(values: Floats, clusters: Codes, strata: Codes) -> tuple[float, float]:
    """(variance, degrees of freedom) of the strata's weighted mean, matrix by matrix as Pustejovsky and Tipton (2018)
    write them, under the working covariance of the one-way random-effects model."""
    n = len(values)
    x = (strata[:, None] == np.unique(strata)).astype(float)
    groups = np.unique(clusters)
    member = (clusters[:, None] == groups).astype(float)
    contrast, solve = x.mean(axis=0), np.linalg.pinv(x)
    residual_maker = np.eye(n) - x @ solve
    residuals = residual_maker @ values
    between = float(((member.T @ residuals) ** 2 / member.sum(axis=0)).sum())
    within = (residuals @ residuals - between) / (n - len(groups))
    typical = np.trace(member.T @ residual_maker @ member)
    effect = max(0.0, (between - (len(groups) - x.shape[1]) * within) / typical)
    covariance = within * np.eye(n) + effect * member @ member.T
    variance, columns = 0.0, []
    for group in groups:
        rows = np.flatnonzero(clusters == group)
        root = np.linalg.cholesky(covariance[np.ix_(rows, rows)]).T
        inner = root @ (residual_maker @ covariance @ residual_maker)[np.ix_(rows, rows)] @ root.T
        eigenvalues, vectors = np.linalg.eigh(inner)
        kept = eigenvalues > 1e-10 * eigenvalues.max()
        adjustment = root.T @ (vectors[:, kept] / np.sqrt(eigenvalues[kept])) @ vectors[:, kept].T @ root
        weights = (contrast @ solve)[rows] @ adjustment
        variance += float(weights @ residuals[rows]) ** 2
        columns.append(residual_maker[rows].T @ weights)
    form = np.stack(columns) @ covariance @ np.stack(columns).T
    return variance, float(np.trace(form) ** 2 / (form**2).sum())


@settings(max_examples=25)
@given(st.lists(st.integers(1, 12), min_size=4, max_size=9), st.floats(0, 2), st.integers(0, 99), st.booleans())
def test_clusters_are_the_literal_matrices_of_cr2(sizes: list[int], effect: float, seed: int, strata: bool) -> None:
    dice = np.random.default_rng(seed)
    clusters = np.repeat(np.arange(len(sizes)), sizes)
    values = dice.normal(size=len(clusters)) + effect * dice.normal(size=len(sizes))[clusters]
    if len(sizes) == len(clusters):
        return
    halves = (clusters > 1).astype(np.int64) * strata
    ours, theirs = mean(values, clusters, halves), literal_cr2(values, clusters, halves)
    assert (ours.variance, ours.freedom) == pytest.approx(theirs, rel=1e-8)
    # The same numbers in another stratum are other clusters
    again = mean(values, np.where(clusters > 1, clusters - 2, clusters), halves) if strata else ours
    assert again == pytest.approx(ours)


@settings(max_examples=40)
@given(st.lists(st.lists(st.floats(-1, 1), min_size=2, max_size=9), min_size=1, max_size=6))
def test_strata_are_cochrans_sum_of_variances(parts: list[list[float]]) -> None:
    sizes = [len(part) for part in parts]
    n = sum(sizes)
    expected = sum((size / n) ** 2 * np.var(part, ddof=1) / size for size, part in zip(sizes, parts, strict=True))
    estimate = mean(np.concatenate(parts), strata=np.repeat(np.arange(len(sizes)), sizes))
    assert estimate.variance == pytest.approx(expected, **EXACT)
    # Satterthwaite's, if the strata's documents vary alike
    assert estimate.freedom == pytest.approx(n**2 / sum(size**2 / (size - 1) for size in sizes))


def test_strata_and_values_that_tell_little() -> None:
    values = random_differences(12, 4)
    assert mean(values, strata=np.arange(12)).variance == pytest.approx(mean(values).variance, **EXACT)
    # A stratum of one document joins the smallest other
    mixed = np.array([0] * 6 + [1] * 5 + [2])
    assert mean(values, strata=mixed) == mean(values, strata=np.minimum(mixed, 1))
    assert math.isnan(mean(np.array([1.0])).variance)
    with pytest.raises(ValueError, match="no values"):
        mean(np.array([]))
    # Values that are all equal keep their degrees of freedom
    ones, halves, thirds = np.ones(12), np.repeat([0, 1], 6), np.repeat([0, 1, 2], 4)
    for estimate, freedom in ((mean(ones), 11), (mean(ones, thirds), 2), (mean(ones, strata=halves), 10)):
        assert (estimate.variance, estimate.freedom) == (0, pytest.approx(freedom))


def test_an_average_treats_its_tasks_as_fixed() -> None:
    whole = average([Estimate(0.1, 0.04, 10.0), Estimate(0.3, 0.01, 99.0)])
    assert (whole.value, whole.stderr) == pytest.approx((0.2, math.sqrt(0.05) / 2))
    assert whole.freedom == pytest.approx(0.05**2 / (0.04**2 / 10 + 0.01**2 / 99))
    assert average([Estimate(0.0, 0.0, 7.0)] * 2).freedom == 14
    # Of one sample, they may vary together: errors add (0.2 + 0.1) / 3, beside an independent one
    common = average([Estimate(0.1, 0.04, 10.0), Estimate(0.3, 0.01, 99.0), Estimate(0.0, 0.09, 50.0)], ["a", "a", "b"])
    assert common.variance == pytest.approx(0.1**2 + 0.1**2)
    assert error_of_average([0.2, 0.1, 0.3], ["a", "a", "b"]) == pytest.approx(common.stderr)
    # The average of copies of one task is that task, also where no source differs and two are added
    task = Estimate(0.0, 0.0, 49.0)
    alone = adjusted_average(task, [with_one_won_and_one_lost(task, 50)], [50], [1.0])
    copies = [with_one_won_and_one_lost(task, 50)] * 3
    several = adjusted_average(average([task] * 3, ["a"] * 3), copies, [50] * 3, [1.0] * 3, samples=["a"] * 3)
    assert several == pytest.approx(alone)
    assert pooled([50, 50, 20], [0.5, 0.5, 1.0], ["a", "a", "b"]) == pytest.approx((
        9 / (4 / 50 + 1 / 20), math.sqrt((4 / 50 * 0.25 + 1 / 20) / (4 / 50 + 1 / 20))))  # fmt: skip


@settings(max_examples=50)
@given(st.integers(0, 30), st.integers(0, 30), st.integers(2, 200))
def test_the_interval_is_bonett_and_prices(won: int, lost: int, same: int) -> None:
    """Half a document added to each cell, as published; but for n / (n - 1), a t quantile and not a normal one."""
    n = won + lost + same
    adjusted = with_one_won_and_one_lost(mean(np.array([1.0] * won + [-1.0] * lost + [0.0] * same)), n)
    p, q = (won + 1) / (n + 2), (lost + 1) / (n + 2)
    published = (p + q - (p - q) ** 2) / (n + 2)
    assert (adjusted.value, adjusted.freedom) == pytest.approx((p - q, n - 1), abs=1e-12)
    assert published <= adjusted.variance * (1 + 1e-12) and adjusted.variance <= published * n / (n - 1) * (1 + 1e-12)


def test_adjusted_differences() -> None:
    """Where all documents are won, the t says what the exact test says; sizes are shares of whole sources."""
    for n in range(2, 8):
        adjusted = with_one_won_and_one_lost(mean(np.ones(n)), n)
        assert t_test(adjusted) == pytest.approx(mcnemar(n, 0), rel=0.4)
        assert (t_test(adjusted) <= 0.05) == (mcnemar(n, 0) <= 0.05)
        assert interval(adjusted).low < 1
    assert pooled([100, 900], [1, 1]) == pytest.approx((360, 1))
    for sums, weights, size in (
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], 1),
        ([1.0, -1.0, 0.0], [1.0, 1.0, 1.0], 1),
        ([30.0, 2.0, 0.0], [30.0, 2.0, 9.0], 1),
        ([0.3, -0.4, 0.0], [1.0, 1.0, 1.0], math.sqrt(0.125)),
    ):
        assert size_of_differences(np.array(sums), np.array(weights)) == pytest.approx(size)


def test_errors_by_other_formulas() -> None:
    """Each against the definition that it shortens."""
    right = np.array([1.0] * 7 + [0.0] * 4)
    assert error_of_share(7 / 11, 11) == pytest.approx(stats.sem(right), rel=1e-12)
    assert error_of_mean(np.array([0.25, 0.5, 1.0])) == pytest.approx(stats.sem([0.25, 0.5, 1.0]), rel=1e-12)
    assert error_of_share(1.0, 1) is error_of_mean(np.array([1.0])) is None
    parts = [np.array([1.0, 0.0, 0.5]), np.array([0.2, 0.4, 0.9, 0.3])]
    errors = [mean(part).stderr for part in parts]
    assert error_of_average(errors) == pytest.approx(average([mean(part) for part in parts]).stderr, rel=1e-12)
    assert error_of_average([*errors, None]) is None
    squares = sum(float(((part - part.mean()) ** 2).sum()) for part in parts)
    assert pooled_error(errors, [3, 4]) == pytest.approx(np.sqrt(squares / (7 - 2) / 7), rel=1e-12)
    assert pooled_error([0.1, None], [3, 1]) is pooled_error([0.0, 0.0], [1, 1]) is None


def test_resampled_means_keep_clusters_together() -> None:
    values = np.random.default_rng(0).normal(size=400)
    twice, both = np.repeat(values, 2), np.repeat(np.arange(400), 2)
    alone = resampled_means(values, np.arange(400), 4000, [1])
    assert resampled_means(twice, both, 4000, [1]) == pytest.approx(alone, abs=1e-12)
    assert alone.std() == pytest.approx(stats.sem(values), rel=0.05)
    low, high = percentile_interval(alone)
    assert ((alone < low).mean(), (alone > high).mean()) == pytest.approx((0.025, 0.025), abs=1e-3)
    # Treated as independent, the same values would have a smaller error
    assert resampled_means(twice, np.arange(800), 4000, [1]).std() < 0.8 * alone.std()
