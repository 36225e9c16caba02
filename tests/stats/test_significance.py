"""Tests and corrections compared with scipy and statsmodels; several runs of a side with closed forms."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from statsmodels.stats.contingency_tables import mcnemar as their_mcnemar
from statsmodels.stats.multitest import multipletests

from evalkit.stats.estimates import Estimate, interval, mean
from evalkit.stats.significance import (
    DRAWS,
    Spread,
    cluster_sums,
    crossed,
    crossed_p_value,
    holm,
    mcnemar,
    sign_flip,
    spread,
    t_test,
)

EXACT = {"rel": 1e-10, "abs": 1e-14}
COUNTS = st.integers(0, 400)


@given(COUNTS, COUNTS)
def test_mcnemar_is_scipys_and_statsmodels(won: int, lost: int) -> None:
    theirs = their_mcnemar([[7, won], [lost, 11]], exact=True).pvalue
    assert mcnemar(won, lost) == pytest.approx(min(1.0, theirs), **EXACT)
    if won + lost:
        assert mcnemar(won, lost) == pytest.approx(stats.binomtest(won, won + lost).pvalue, **EXACT)


def test_mcnemar_with_nothing_to_tell() -> None:
    assert mcnemar(0, 0) == mcnemar(5, 5) == 1.0
    assert mcnemar(0, 5) == 2 / 2**5


@given(COUNTS, COUNTS)
def test_sign_flips_of_single_documents_are_mcnemar(won: int, lost: int) -> None:
    found = sign_flip(np.array([1.0] * won + [-1.0] * lost + [0.0] * 9))
    assert found == pytest.approx(mcnemar(won, lost), rel=1e-10)


def by_scipy(sums: np.ndarray) -> float:
    """Every pattern of signs, by scipy."""
    result = stats.permutation_test(
        (sums, np.zeros_like(sums)),
        lambda a, b, axis: np.sum(a - b, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
        alternative="two-sided",
    )
    return float(result.pvalue)


@settings(max_examples=30)
@given(st.lists(st.integers(-4, 4), min_size=2, max_size=11))
def test_sign_flips_of_whole_numbers_are_scipys(sums: list[int]) -> None:
    assert sign_flip(np.array(sums, float)) == pytest.approx(by_scipy(np.array(sums, float)), **EXACT)


@settings(max_examples=30)
@given(st.lists(st.floats(-1, 1).map(lambda value: round(value, 4)), min_size=2, max_size=11))
def test_sign_flips_of_few_fractions_are_scipys(sums: list[float]) -> None:
    found = sign_flip(np.array(sums))
    assert found == pytest.approx(by_scipy(np.array(sums)), **EXACT)


def test_drawn_signs_come_near_the_exact_answer_and_are_the_same_every_time() -> None:
    sums = np.random.default_rng(5).integers(-3, 5, 60).astype(float)
    exact = sign_flip(sums)
    drawn = sign_flip(sums * 0.1)  # no longer whole numbers
    assert 0.001 < exact < 0.5
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / DRAWS))
    assert sign_flip(sums * 0.1) == drawn
    assert sign_flip(sums * 0.1, seed=1) != drawn


def test_clusters_are_summed_before_they_are_flipped() -> None:
    differences, clusters = np.array([1.0, 1.0, -1.0, 0.0, 1.0]), np.array([9, 9, 4, 4, 2])
    assert sorted(cluster_sums(differences, clusters)) == [-1.0, 1.0, 2.0]
    assert cluster_sums(differences, None) is differences
    # Four copies of each document add no information
    copied = cluster_sums(np.repeat(differences, 4), np.repeat(np.arange(5), 4))
    assert sign_flip(copied) == sign_flip(differences)


@settings(max_examples=10)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_statsmodels(ps: list[float]) -> None:
    adjusted = holm(ps)
    assert adjusted == pytest.approx(list(multipletests(ps, method="holm")[1]), **EXACT)
    assert all(p <= corrected <= 1 for p, corrected in zip(ps, adjusted, strict=True))
    ranked = sorted(zip(ps, adjusted, strict=True))
    assert all(one[1] <= other[1] for one, other in pairwise(ranked))


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=30).filter(lambda values: np.std(values) > 1e-3))
def test_t_is_scipys(values: list[float]) -> None:
    assert t_test(mean(np.array(values))) == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-9)


def test_t_where_there_is_no_error() -> None:
    assert t_test(mean(np.zeros(5))) == 1.0
    assert math.isnan(t_test(mean(np.ones(5))))
    assert math.isnan(t_test(mean(np.ones(1))))


# Several runs of a side


PARTS = st.builds(
    Spread,
    seeds_a=st.floats(0, 4),
    seeds_b=st.floats(0, 4),
    documents=st.floats(0.1, 4),
    shared=st.floats(0, 1),
    runs_a=st.integers(2, 12),
    runs_b=st.integers(2, 12),
)


def banerjee(difference: float, parts: Spread, freedom: float) -> float:
    """The level at which the difference reaches the root of the sum of the parts, each times its t squared."""

    def excess(level: float) -> float:
        sides = [(parts.seeds_a, parts.runs_a - 1), (parts.seeds_b, parts.runs_b - 1)]
        sides.append((max(0.0, parts.documents - parts.shared), freedom))
        whole = sum(variance * stats.t.isf(level / 2, df) ** 2 for variance, df in sides if variance)
        return max(whole, parts.documents * stats.t.isf(level / 2, freedom) ** 2) - difference**2

    return float(optimize.brentq(excess, 1e-100, 1 - 1e-12, xtol=1e-14))


@settings(max_examples=25)
@given(PARTS, st.floats(0.1, 5), st.floats(5, 1000))
def test_the_p_value_is_banerjees(parts: Spread, difference: float, freedom: float) -> None:
    documents = Estimate(difference, parts.documents, freedom)
    expected = banerjee(difference, parts, freedom)
    assert crossed_p_value(documents, parts) == pytest.approx(expected, rel=1e-6, abs=1e-11)


@settings(max_examples=60)
@given(PARTS, st.floats(-20, 20), st.floats(1.5, 1000))
def test_the_interval_holds_zero_where_the_p_value_is_above_5_percent(
    parts: Spread, difference: float, freedom: float
) -> None:
    documents = Estimate(difference, parts.documents, freedom)
    low, high = interval(crossed(documents, parts))
    p = crossed_p_value(documents, parts)
    assert p == pytest.approx(0.05, abs=1e-6) or (p > 0.05) == (low < 0 < high)


def test_single_runs_have_no_spread_and_the_documents_error() -> None:
    dice = np.random.default_rng(1)
    a, b = dice.integers(0, 2, (1, 50)).astype(float), dice.integers(0, 2, (1, 50)).astype(float)
    parts, paired = spread(a, b), mean((b - a)[0])
    assert (parts.seeds, parts.shared) == (0, 0)
    assert all(map(math.isnan, parts.deviations))
    assert crossed(paired, parts) == pytest.approx(paired)


def test_the_parts_are_those_of_a_two_way_analysis_of_variance() -> None:
    """Balanced runs x documents within a side: the residual mean square is what both spreads share."""
    dice = np.random.default_rng(2)
    a, b = dice.normal(size=(3, 40)), dice.normal(size=(4, 40))
    residual = 0.0
    for side in (a, b):
        runs, n = side.shape
        rest = side - side.mean(0) - side.mean(1, keepdims=True) + side.mean()
        residual += (rest**2).sum() / ((runs - 1) * (n - 1)) / (n * runs)
    parts = spread(a, b)
    assert parts.shared == pytest.approx(residual, **EXACT)
    assert (parts.seeds_a, parts.seeds_b) == pytest.approx((a.mean(1).var(ddof=1) / 3, b.mean(1).var(ddof=1) / 4))
    assert parts.documents == pytest.approx((b.mean(0) - a.mean(0)).var(ddof=1) / 40, **EXACT)
    assert parts.deviations == pytest.approx((a.mean(1).std(ddof=1), b.mean(1).std(ddof=1)))


def test_a_small_spread_between_two_runs_is_not_a_well_known_one() -> None:
    """The twelve times of a t with one degree of freedom stay, however many runs the other side has."""
    parts = Spread(seeds_a=1.0, seeds_b=0.0, documents=1e-9, shared=0.0, runs_a=2, runs_b=10)
    assert interval(crossed(Estimate(0.0, 1e-9, 999.0), parts)) == pytest.approx((-12.706, 12.706), rel=1e-4)


def test_a_difference_without_any_error_has_no_p_value() -> None:
    parts = Spread(0.0, 0.0, 0.0, 0.0, 3, 3)
    assert math.isnan(crossed_p_value(Estimate(0.5, 0.0, 9.0), parts))
    # A single document has no error over documents, whatever the spread between runs
    alone, parts = Estimate(0.5, math.nan, math.nan), Spread(0.01, 0.01, math.nan, math.nan, 3, 3)
    assert math.isnan(crossed_p_value(alone, parts))
    assert math.isnan(interval(crossed(alone, parts)).low)


def test_clusters_and_strata_reach_every_part() -> None:
    dice = np.random.default_rng(4)
    a, b = dice.normal(size=(3, 20)), dice.normal(size=(3, 20))
    clusters = np.repeat(np.arange(20), 5)
    # Five copies of each document, declared as one source, are worth one
    copied = spread(np.repeat(a, 5, axis=1), np.repeat(b, 5, axis=1), clusters)
    assert copied == pytest.approx(spread(a, b))
    assert spread(a, b, strata=np.repeat([0, 1], 10)).documents != spread(a, b).documents
