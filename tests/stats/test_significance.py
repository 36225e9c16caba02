"""Tests and corrections compared with scipy and statsmodels; several runs of a side with closed forms."""

from __future__ import annotations

import math

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


@settings(max_examples=40)
@given(st.integers(0, 400), st.integers(0, 400))
def test_mcnemar_is_scipys_and_statsmodels(won: int, lost: int) -> None:
    theirs = min(1.0, their_mcnemar([[7, won], [lost, 11]], exact=True).pvalue)
    assert mcnemar(won, lost) == pytest.approx(theirs, **EXACT)
    if won + lost:
        assert theirs == pytest.approx(stats.binomtest(won, won + lost).pvalue, **EXACT)
    # As the signs of single documents, flipped
    assert sign_flip(np.array([1.0] * won + [-1.0] * lost + [0.0] * 9)) == pytest.approx(theirs, rel=1e-10)


@settings(max_examples=30)
@given(st.lists(st.integers(-4, 4), min_size=2, max_size=11), st.sampled_from([1.0, 0.2317]))
def test_sign_flips_are_scipys(whole: list[int], unit: float) -> None:
    """Of whole numbers, and of few fractions: every pattern of signs."""
    sums = unit * np.array(whole, float)
    theirs = stats.permutation_test(
        (sums, np.zeros_like(sums)),
        lambda a, b, axis: np.sum(a - b, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
        alternative="two-sided",
    )
    assert sign_flip(sums) == pytest.approx(theirs.pvalue, **EXACT)


def test_drawn_signs_come_near_the_exact_answer_and_are_the_same_every_time() -> None:
    sums = np.random.default_rng(5).integers(-3, 5, 60).astype(float)
    exact = sign_flip(sums)
    drawn = sign_flip(sums * 0.1)  # no longer whole numbers
    assert 0.001 < exact < 0.5
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / DRAWS))
    assert sign_flip(sums * 0.1) == drawn != sign_flip(sums * 0.1, seed=1)


def test_clusters_are_summed_before_they_are_flipped() -> None:
    differences, clusters = np.array([1.0, 1.0, -1.0, 0.0, 1.0]), np.array([9, 9, 4, 4, 2])
    assert sorted(cluster_sums(differences, clusters)) == [-1.0, 1.0, 2.0]
    # Four copies of each document add no information
    copied = cluster_sums(np.repeat(differences, 4), np.repeat(np.arange(5), 4))
    assert sign_flip(copied) == sign_flip(differences)


@settings(max_examples=10)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.lists(st.integers(-4, 4), min_size=3, max_size=20))
def test_holm_and_t(ps: list[float], values: list[int]) -> None:
    assert holm(ps) == pytest.approx(list(multipletests(ps, method="holm")[1]), **EXACT)
    if len(set(values)) > 1:
        assert t_test(mean(np.array(values, float))) == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-9)
    assert t_test(mean(np.zeros(5))) == 1.0
    assert math.isnan(t_test(mean(np.ones(5)))) and math.isnan(t_test(mean(np.ones(1))))


# Several runs of a side

PARTS = st.builds(Spread, seeds_a=st.floats(0, 4), seeds_b=st.floats(0, 4), documents=st.floats(0.1, 4),
                  shared=st.floats(0, 1), runs_a=st.integers(2, 12), runs_b=st.integers(2, 12))  # fmt: skip


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
    """The interval holds zero if and only if the p value is above 5 %."""
    documents = Estimate(difference, parts.documents, freedom)
    p = crossed_p_value(documents, parts)
    assert p == pytest.approx(banerjee(difference, parts, freedom), rel=1e-6, abs=1e-11)
    low, high = interval(crossed(documents, parts))
    assert p == pytest.approx(0.05, abs=1e-6) or (p > 0.05) == (low < 0 < high)


def test_the_parts_are_those_of_a_two_way_analysis_of_variance() -> None:
    """Balanced runs x documents within a side: the residual mean square is what both spreads share."""
    dice = np.random.default_rng(2)
    a, b = dice.normal(size=(3, 40)), dice.normal(size=(4, 40))
    residual = 0.0
    for side in (a, b):
        runs, n = side.shape
        rest = side - side.mean(0) - side.mean(1, keepdims=True) + side.mean()
        residual += (rest**2).sum() / ((runs - 1) * (n - 1)) / (n * runs)
    parts, documents = spread(a, b), (b.mean(0) - a.mean(0)).var(ddof=1) / 40
    expected = (a.mean(1).var(ddof=1) / 3, b.mean(1).var(ddof=1) / 4, documents, residual, 3, 4)
    assert parts == pytest.approx(expected, **EXACT)
    assert parts.deviations == pytest.approx((a.mean(1).std(ddof=1), b.mean(1).std(ddof=1)))
    # Five copies of each document, declared as one source, are worth one; strata count
    copied = spread(np.repeat(a, 5, axis=1), np.repeat(b, 5, axis=1), np.repeat(np.arange(40), 5))
    assert copied == pytest.approx(parts)
    assert spread(a, b, strata=np.repeat([0, 1], 20)).documents != parts.documents
    # Single runs have no spread, and the documents' error
    single, paired = spread(a[:1], b[:1]), mean(b[0] - a[0])
    assert (single.seeds, single.shared) == (0, 0) and all(map(math.isnan, single.deviations))
    assert crossed(paired, single) == pytest.approx(paired)


def test_spreads_that_tell_little() -> None:
    """The twelve times of a t with one degree of freedom stay, however many runs the other side has."""
    parts = Spread(seeds_a=1.0, seeds_b=0.0, documents=1e-9, shared=0.0, runs_a=2, runs_b=10)
    assert interval(crossed(Estimate(0.0, 1e-9, 999.0), parts)) == pytest.approx((-12.706, 12.706), rel=1e-4)
    assert math.isnan(crossed_p_value(Estimate(0.5, 0.0, 9.0), Spread(0.0, 0.0, 0.0, 0.0, 3, 3)))
    # A single document has no error over documents, whatever the spread between runs
    alone, parts = Estimate(0.5, math.nan, math.nan), Spread(0.01, 0.01, math.nan, math.nan, 3, 3)
    assert math.isnan(crossed_p_value(alone, parts)) and math.isnan(interval(crossed(alone, parts)).low)
