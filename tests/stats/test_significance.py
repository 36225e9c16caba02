"""Tests and corrections, compared with scipy and statsmodels."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar as their_mcnemar
from statsmodels.stats.multitest import multipletests

from evalkit.stats import significance
from evalkit.stats.estimates import mean
from evalkit.stats.significance import DRAWS, cluster_sums, holm, mcnemar, sign_flip, t_test

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


def test_drawn_signs_never_give_zero_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clear = sign_flip(np.full(50, 0.1))
    assert clear == 1 / (DRAWS + 1)
    values = np.random.default_rng(6).normal(0.05, 1, 500)
    whole = sign_flip(values)
    monkeypatch.setattr(significance, "_CHUNK", 10_000)
    assert sign_flip(values) == pytest.approx(whole, abs=0.02)


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


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60))
def test_the_order_of_the_sides_does_not_matter(sums: list[int]) -> None:
    assert sign_flip(np.array(sums, float)) == sign_flip(-np.array(sums, float))
