"""Several runs per side: variance components compared with closed forms, Banerjee's test with scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from evalkit.stats.adjusted import with_one_won_and_one_lost
from evalkit.stats.estimates import Estimate, Interval, interval, mean
from evalkit.stats.significance import Spread, between, crossed, crossed_p_value, spread

EXACT = {"rel": 1e-10, "abs": 1e-14}

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


def test_one_run_beside_several_that_differ_alike_on_all_documents_is_the_one_sample_t() -> None:
    b = np.array([0.46, 0.44, 0.49, 0.43])
    parts = Spread(0.0, between(b), 1e-12, 0.0, 1, 4)
    documents = Estimate(float(b.mean()) - 0.4, 1e-12, 99.0)
    theirs = stats.ttest_1samp(b, 0.4)
    assert crossed_p_value(documents, parts) == pytest.approx(theirs.pvalue, rel=1e-5)
    assert interval(crossed(documents, parts)) == pytest.approx(
        tuple(np.array(theirs.confidence_interval()) - 0.4), rel=1e-5
    )


@settings(max_examples=60)
@given(PARTS, st.floats(1.5, 1000))
def test_the_t_lies_between_those_of_the_parts(parts: Spread, freedom: float) -> None:
    found = crossed(Estimate(0.3, parts.documents, freedom), parts)
    each = [parts.runs_a - 1, parts.runs_b - 1, freedom]
    assert min(each) * (1 - 1e-6) <= found.freedom <= max(each) * (1 + 1e-6)
    assert math.sqrt(found.variance) == pytest.approx(found.stderr)


def test_between_runs_is_the_variance_of_their_mean() -> None:
    scores = np.array([0.41, 0.43, 0.40, 0.44])
    assert between(scores) == pytest.approx(stats.sem(scores) ** 2, **EXACT)
    assert between(scores[:1]) == 0


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


def test_the_spread_between_runs_is_in_the_error() -> None:
    """Runs that differ by a constant on every document: all of it is seeds, and documents add their own."""
    dice = np.random.default_rng(3)
    difficulty = dice.normal(size=200)
    a = difficulty + np.array([[0.0], [0.1], [0.2]])
    b = difficulty + np.array([[0.3], [0.5], [0.4]])
    parts = spread(a, b)
    assert parts.shared == pytest.approx(0, abs=1e-20)
    assert parts.documents == pytest.approx(0, abs=1e-20)
    found = crossed(Estimate(0.3, parts.documents, 199.0), parts)
    assert found.variance == pytest.approx(0.01 / 3 + 0.01 / 3)
    assert found.freedom == pytest.approx(2)


def test_what_both_spreads_hold_counts_once_and_neither_is_undercut() -> None:
    parts = Spread(seeds_a=2.0, seeds_b=1.0, documents=2.0, shared=1.5, runs_a=3, runs_b=4)
    documents = Estimate(0.5, 2.0, 100.0)
    assert crossed(documents, parts).variance == 3.5
    assert crossed(documents, parts._replace(shared=2.5)).variance == 3.0
    alike = parts._replace(seeds_a=0.0, seeds_b=0.0, shared=1.9)
    # Seeds that seem not to differ leave the interval that documents alone have
    assert interval(crossed(documents, alike)) == pytest.approx(interval(documents), rel=1e-6)


def test_a_small_spread_between_two_runs_is_not_a_well_known_one() -> None:
    """The twelve times of a t with one degree of freedom stay, however many runs the other side has."""
    parts = Spread(seeds_a=1.0, seeds_b=0.0, documents=1e-9, shared=0.0, runs_a=2, runs_b=10)
    assert interval(crossed(Estimate(0.0, 1e-9, 999.0), parts)) == pytest.approx((-12.706, 12.706), rel=1e-4)


def test_runs_that_all_agree_leave_the_doubt_about_documents() -> None:
    same = np.tile(np.tile([0.0, 1.0], 100), (3, 1))
    parts, documents = spread(same, same), mean(np.zeros(200))
    assert crossed_p_value(documents, parts) == 1
    found = interval(crossed(with_one_won_and_one_lost(documents, 200), parts))
    assert found == pytest.approx(interval(with_one_won_and_one_lost(documents, 200)), rel=1e-6)
    assert isinstance(found, Interval) and found.high > 0.01


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
