"""Several runs of each side: parts of the variance against closed forms and scipy's Welch test."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from evalkit.stats.estimates import Estimate, mean
from evalkit.stats.seeds import Spread, between, crossed, spread
from evalkit.stats.significance import t_test

EXACT = {"rel": 1e-10, "abs": 1e-14}


def test_between_runs_is_scipys_welch() -> None:
    a, b = np.array([0.41, 0.43, 0.40, 0.44]), np.array([0.46, 0.44, 0.49])
    variance, freedom = between([a, b])
    theirs = stats.ttest_ind(b, a, equal_var=False)
    found = Estimate(float(b.mean() - a.mean()), variance, freedom)
    assert found.value / found.stderr == pytest.approx(theirs.statistic, **EXACT)
    assert freedom == pytest.approx(theirs.df, **EXACT)
    assert t_test(found) == pytest.approx(theirs.pvalue, **EXACT)


def test_single_runs_have_no_spread_and_the_documents_error() -> None:
    dice = np.random.default_rng(1)
    a, b = dice.integers(0, 2, (1, 50)).astype(float), dice.integers(0, 2, (1, 50)).astype(float)
    parts, paired = spread(a, b), mean((b - a)[0])
    assert (parts.seeds, parts.shared) == (0, 0)
    assert math.isnan(parts.stderr_a)
    assert crossed(paired.value, parts, paired.freedom) == pytest.approx(paired)


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
    assert parts.seeds == pytest.approx(a.mean(1).var(ddof=1) / 3 + b.mean(1).var(ddof=1) / 4, **EXACT)
    assert parts.documents == pytest.approx((b.mean(0) - a.mean(0)).var(ddof=1) / 40, **EXACT)
    assert (parts.stderr_a, parts.stderr_b) == pytest.approx((a.mean(1).std(ddof=1), b.mean(1).std(ddof=1)))


def test_the_spread_between_runs_is_in_the_error() -> None:
    """Runs that differ by a constant on every document: all of it is seeds, and documents add their own."""
    dice = np.random.default_rng(3)
    difficulty = dice.normal(size=200)
    a = difficulty + np.array([[0.0], [0.1], [0.2]])
    b = difficulty + np.array([[0.3], [0.5], [0.4]])
    parts = spread(a, b)
    assert parts.shared == pytest.approx(0, abs=1e-20)
    assert parts.documents == pytest.approx(0, abs=1e-20)
    found = crossed(0.3, parts, 199.0)
    assert found.variance == pytest.approx(0.01 / 3 + 0.01 / 3)
    assert found.freedom == pytest.approx(4)


def test_what_both_spreads_hold_counts_once_and_neither_is_undercut() -> None:
    parts = Spread(seeds=3.0, documents=2.0, shared=1.5, seeds_freedom=4.0, stderr_a=1.0, stderr_b=1.0)
    found = crossed(0.5, parts, 100.0)
    assert found.variance == 3.5
    assert found.freedom == pytest.approx(3.5**2 / (3.0**2 / 4 + 2.0**2 / 100))
    assert crossed(0.5, parts._replace(shared=2.5), 100.0).variance == 3.0
    assert crossed(0.5, parts._replace(seeds=1.0, shared=2.5), 100.0).variance == 2.0


def test_clusters_and_strata_reach_every_part() -> None:
    dice = np.random.default_rng(4)
    a, b = dice.normal(size=(3, 20)), dice.normal(size=(3, 20))
    clusters = np.repeat(np.arange(20), 5)
    # Five copies of each document, told to be copies, are worth one
    copied = spread(np.repeat(a, 5, axis=1), np.repeat(b, 5, axis=1), clusters)
    assert copied == pytest.approx(spread(a, b))
    assert spread(a, b, strata=np.repeat([0, 1], 10)).documents != spread(a, b).documents
