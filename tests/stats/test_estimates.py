"""Means, errors and intervals against statsmodels, scipy and closed forms."""

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

from evalkit.stats.estimates import Estimate, average, interval, mean, with_one_won_and_one_lost

EXACT = {"rel": 1e-10, "abs": 1e-12}
_SCORES = st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=40)


def random_differences(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).choice([-1.0, 0.0, 1.0], n, p=[0.15, 0.6, 0.25])


@given(_SCORES)
def test_independent_documents_are_a_one_sample_t_interval(values: list[float]) -> None:
    found = mean(np.array(values))
    assert found.value == pytest.approx(np.mean(values), abs=1e-12)
    assert found.stderr == pytest.approx(stats.sem(values), **EXACT)
    assert found.freedom == (pytest.approx(len(values) - 1) if found.variance else math.inf)
    if found.variance:
        assert interval(found) == pytest.approx(DescrStatsW(values).tconfint_mean(), **EXACT)


@pytest.mark.parametrize(("n", "groups"), [(100, 30), (1000, 400), (997, 9)])
def test_clusters_are_statsmodels_sandwich(n: int, groups: int) -> None:
    values, clusters = random_differences(n, n), np.random.default_rng(n).integers(0, groups, n)
    theirs = sm.OLS(values, np.ones(n)).fit(cov_type="cluster", cov_kwds={"groups": clusters}, use_t=True)
    ours = mean(values, clusters * 7 - 3)  # the numbers themselves mean nothing
    assert ours.value == pytest.approx(theirs.params[0], **EXACT)
    assert ours.stderr == pytest.approx(theirs.bse[0], **EXACT)
    assert ours.freedom == pytest.approx(len(set(clusters)) - 1)
    assert interval(ours) == pytest.approx(theirs.conf_int()[0], **EXACT)


@settings(max_examples=50)
@given(st.data())
def test_strata_are_cochrans_sum_of_variances(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=6))
    parts = [np.array(data.draw(st.lists(st.floats(-1, 1), min_size=size, max_size=size))) for size in sizes]
    strata = np.repeat(np.arange(len(sizes)), sizes)
    n = sum(sizes)
    expected = sum((size / n) ** 2 * part.var(ddof=1) / size for size, part in zip(sizes, parts, strict=True))
    assert mean(np.concatenate(parts), strata=strata).variance == pytest.approx(expected, **EXACT)


def test_two_strata_have_welchs_degrees_of_freedom() -> None:
    """With equal sizes the stratified mean is half the sum of two means, whose freedom is Welch's."""
    a, b = random_differences(30, 1), 2 * random_differences(30, 2)
    ours = mean(np.concatenate([a, b]), strata=np.repeat([0, 1], 30))
    assert ours.freedom == pytest.approx(stats.ttest_ind(a, -b, equal_var=False).df, **EXACT)


def test_clusters_lie_within_strata() -> None:
    values, clusters, strata = random_differences(60, 3), np.repeat(np.arange(20), 3), np.repeat([0, 1], 30)
    ours = mean(values, clusters, strata)
    halves = [mean(values[strata == s], clusters[strata == s]) for s in (0, 1)]
    assert ours.variance == pytest.approx(sum(half.variance for half in halves) / 4, **EXACT)
    # The same numbers in another stratum are other clusters
    assert mean(values, clusters % 10, strata).variance == pytest.approx(ours.variance, **EXACT)


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


def test_an_average_treats_its_tasks_as_fixed() -> None:
    found = average([Estimate(0.1, 0.04, 10.0), Estimate(0.3, 0.01, 99.0)])
    assert found.value == pytest.approx(0.2)
    assert found.stderr == pytest.approx(math.sqrt(0.05) / 2)
    assert found.freedom == pytest.approx(0.05**2 / (0.04**2 / 10 + 0.01**2 / 99))
    assert math.isinf(average([Estimate(0.0, 0.0, math.inf)] * 2).freedom)


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
    assert found.freedom >= n - 1.001


def test_graded_scores_are_won_and_lost_by_as_much_as_they_differ() -> None:
    values = np.random.default_rng(2).normal(0.02, 0.08, 60)
    found = with_one_won_and_one_lost(mean(values), 60, 0.1)
    more = np.append(values, [0.1, -0.1])
    assert found.value == pytest.approx(more.mean(), abs=1e-12)
    # But for the n / (n - 1) of each
    assert found.variance == pytest.approx(more.var(ddof=1) / 62, rel=2 / 60)
    assert with_one_won_and_one_lost(mean(values), 60).stderr > 1.5 * found.stderr


def test_runs_that_agree_everywhere_still_have_an_interval() -> None:
    low, high = interval(with_one_won_and_one_lost(mean(np.zeros(198)), 198))
    assert (low, high) == pytest.approx((-1.96 * math.sqrt(2) / 200, 1.96 * math.sqrt(2) / 200), rel=1e-4)


@given(_SCORES, st.data())
def test_b_less_a_is_the_mirror_of_a_less_b(values: list[float], data: st.DataObject) -> None:
    one = np.array(values)
    codes = np.array(data.draw(st.lists(st.integers(0, 5), min_size=len(one), max_size=len(one))))
    place: dict[str, Any] = data.draw(st.sampled_from([{}, {"clusters": codes}, {"strata": codes}]))
    there, back = mean(one, **place), mean(-one, **place)
    assert back.value == -there.value
    assert back.variance == pytest.approx(there.variance, nan_ok=True)
