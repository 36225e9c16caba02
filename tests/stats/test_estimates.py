"""Means, errors and intervals, compared with statsmodels, scipy and closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.weightstats import DescrStatsW

from evalkit.stats.adjusted import pooled, size_of_differences, with_one_won_and_one_lost
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
_SCORES = st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=40)


def random_differences(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).choice([-1.0, 0.0, 1.0], n, p=[0.15, 0.6, 0.25])


@given(_SCORES)
def test_independent_documents_are_a_one_sample_t_interval(values: list[float]) -> None:
    found = mean(np.array(values))
    assert found.value == pytest.approx(np.mean(values), abs=1e-12)
    assert found.stderr == pytest.approx(stats.sem(values), **EXACT)
    assert found.freedom == pytest.approx(len(values) - 1)
    if found.variance:
        assert interval(found) == pytest.approx(DescrStatsW(values).tconfint_mean(), **EXACT)


@pytest.mark.parametrize(("size", "groups"), [(3, 30), (5, 400), (100, 9), (1, 50)])
def test_clusters_of_equal_size_are_statsmodels_sandwich(size: int, groups: int) -> None:
    n = size * groups
    clusters = np.random.default_rng(n).permutation(np.repeat(np.arange(groups), size))
    values = random_differences(n, n) + np.random.default_rng(n).normal(0, 0.2, groups)[clusters]
    theirs = sm.OLS(values, np.ones(n)).fit(cov_type="cluster", cov_kwds={"groups": clusters}, use_t=True)
    ours = mean(values, clusters * 7 - 3)  # arbitrary labels
    assert ours.value == pytest.approx(theirs.params[0], **EXACT)
    assert ours.stderr == pytest.approx(theirs.bse[0], **EXACT)
    assert ours.freedom == pytest.approx(groups - 1)
    assert interval(ours) == pytest.approx(theirs.conf_int()[0], **EXACT)


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


def test_clusters_of_very_unequal_size_have_few_degrees_of_freedom() -> None:
    """Independent documents: closed forms of Bell and McCaffrey's. A source with half of the documents leaves few."""
    sizes = np.array([50] + [5] * 10)
    clusters, values = np.repeat(np.arange(11), sizes), random_differences(100, 1)
    # Maximum variation within sources, so the estimated shared effect is zero
    values[:50], values[50:] = np.tile([1, -1], 25), np.tile([1, -1, 0, 1, -1], 10)
    share = sizes / 100
    whole = (share**2).sum() + ((share**2 / (1 - share)).sum() ** 2 - (share**4 / (1 - share) ** 2).sum())
    assert mean(values, clusters).freedom == pytest.approx(1 / whole)
    assert mean(values, clusters).freedom < 4


@settings(max_examples=50)
@given(st.data())
def test_strata_are_cochrans_sum_of_variances(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=6))
    parts = [np.array(data.draw(st.lists(st.floats(-1, 1), min_size=size, max_size=size))) for size in sizes]
    strata = np.repeat(np.arange(len(sizes)), sizes)
    n = sum(sizes)
    expected = sum((size / n) ** 2 * part.var(ddof=1) / size for size, part in zip(sizes, parts, strict=True))
    found = mean(np.concatenate(parts), strata=strata)
    assert found.variance == pytest.approx(expected, **EXACT)
    # Satterthwaite's, if the strata's documents vary alike
    assert found.freedom == pytest.approx(n**2 / sum(size**2 / (size - 1) for size in sizes))


def test_strata_of_one_document_are_taken_together() -> None:
    values = random_differences(12, 4)
    alone = mean(values, strata=np.arange(12))
    assert alone.variance == pytest.approx(mean(values).variance, **EXACT)
    # One that is alone joins the smallest other
    mixed = np.array([0] * 6 + [1] * 5 + [2])
    assert mean(values, strata=mixed) == mean(values, strata=np.minimum(mixed, 1))


def test_a_single_document_has_no_error() -> None:
    assert math.isnan(mean(np.array([1.0])).variance)
    with pytest.raises(ValueError, match="no values"):
        mean(np.array([]))


@pytest.mark.parametrize("place", [{}, {"clusters": np.repeat([0, 1, 2], 4)}, {"strata": np.repeat([0, 1], 6)}])
def test_values_that_are_all_equal_keep_their_degrees_of_freedom(place: dict[str, Any]) -> None:
    found = mean(np.ones(12), **place)
    assert found.variance == 0
    assert found.freedom == pytest.approx({"clusters": 2, "strata": 10}.get(next(iter(place), ""), 11))


def test_an_average_treats_its_tasks_as_fixed() -> None:
    found = average([Estimate(0.1, 0.04, 10.0), Estimate(0.3, 0.01, 99.0)])
    assert found.value == pytest.approx(0.2)
    assert found.stderr == pytest.approx(math.sqrt(0.05) / 2)
    assert found.freedom == pytest.approx(0.05**2 / (0.04**2 / 10 + 0.01**2 / 99))
    assert average([Estimate(0.0, 0.0, 7.0)] * 2).freedom == 14


@settings(max_examples=50)
@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 200))
def test_the_interval_is_bonett_and_prices(won: int, lost: int, same: int) -> None:
    """Half a document added to each cell, as published; but for n / (n - 1), a t quantile and not a normal one."""
    n = won + lost + same
    values = np.array([1.0] * won + [-1.0] * lost + [0.0] * same)
    if n < 2:
        return
    found = with_one_won_and_one_lost(mean(values), n)
    p, q = (won + 1) / (n + 2), (lost + 1) / (n + 2)
    assert found.value == pytest.approx(p - q, abs=1e-12)
    published = (p + q - (p - q) ** 2) / (n + 2)
    assert published <= found.variance * (1 + 1e-12)
    assert found.variance <= published * n / (n - 1) * (1 + 1e-12)
    assert found.freedom == pytest.approx(n - 1)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7])
def test_where_all_documents_are_won_the_t_says_what_the_exact_test_says(n: int) -> None:
    found = with_one_won_and_one_lost(mean(np.ones(n)), n)
    assert t_test(found) == pytest.approx(mcnemar(n, 0), rel=0.4)
    assert (t_test(found) <= 0.05) == (mcnemar(n, 0) <= 0.05)
    assert interval(found).low < 1


def test_the_size_of_differences_is_a_share_of_whole_sources() -> None:
    assert pooled([100, 900], [1, 1]) == pytest.approx((360, 1))
    assert size_of_differences(np.zeros(3), np.ones(3)) == 1
    assert size_of_differences(np.array([1.0, -1.0, 0.0]), np.ones(3)) == 1
    assert size_of_differences(np.array([30.0, 2.0, 0.0]), np.array([30.0, 2.0, 9.0])) == 1
    assert size_of_differences(np.array([0.3, -0.4, 0.0]), np.ones(3)) == pytest.approx(math.sqrt(0.125))


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
