"""Detectable differences and the seeds that they need, compared with statsmodels, enumeration and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.power import TTestPower

from evalkit.stats.estimates import Estimate
from evalkit.stats.power import (
    MOST_SEEDS,
    POWER,
    detectable,
    expected_spread,
    mcnemar_detectable,
    mcnemar_power,
    seeds_detectable,
    seeds_needed,
    sign_flip_detectable,
    t_detectable,
    t_power,
)
from evalkit.stats.significance import Spread, mcnemar


def test_power_of_t_is_statsmodels() -> None:
    for n in (5, 30, 5000):
        for shift in (0.0, 0.5, 1.96, 2.8, 4.0):
            theirs = TTestPower().power(shift / math.sqrt(n), n, 0.05)
            assert t_power(shift, n - 1) == pytest.approx(theirs, abs=1e-10)
    normal = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    assert t_detectable(0.01, 1e9) == pytest.approx(0.01 * normal, rel=1e-5)
    assert t_detectable(0.0, 1e9) is None
    assert t_detectable(0.5, 1e9) is None  # 1.4, more than scores can differ by


@pytest.mark.parametrize(("n", "discordance", "difference"), [(20, 0.4, 0.0), (30, 0.5, 0.3), (25, 0.3, 0.3)])
def test_power_of_mcnemar_is_that_of_every_outcome(n: int, discordance: float, difference: float) -> None:
    """By enumeration of the three-cell table."""
    won, lost = (discordance + difference) / 2, (discordance - difference) / 2
    outcomes = [(wins, losses) for wins in range(n + 1) for losses in range(n + 1 - wins)]
    significant = np.array([(*outcome, n - sum(outcome)) for outcome in outcomes if mcnemar(*outcome) <= 0.05])
    expected = stats.multinomial.pmf(significant, n, [won, lost, 1 - won - lost]).sum()
    assert mcnemar_power(n, discordance, difference) == pytest.approx(expected, abs=1e-8)


@settings(max_examples=15)
@given(st.integers(50, 3000), st.floats(0.02, 0.9))
def test_the_smallest_difference_has_the_power_that_is_promised(n: int, share: float) -> None:
    discordant = round(share * n)
    smallest = mcnemar_detectable(n, discordant) or 0.0
    assert mcnemar_power(n, max(smallest, discordant / n), smallest) == pytest.approx(POWER, abs=1e-6)


def test_documents_and_sources_that_can_show_little() -> None:
    assert mcnemar_detectable(5, 5) is mcnemar_detectable(1, 0) is None  # five of five is still p = 0.06
    # If the runs agree everywhere, at least six documents would have to be won
    shares = np.linspace(0.001, 0.2, 200_000)
    six_of_200 = shares[np.argmax(stats.binom.sf(5, 200, shares) >= POWER)]
    assert mcnemar_detectable(200, 0) == pytest.approx(six_of_200, rel=1e-4)
    # Two passages of ten documents: five more would have to go the same way for p to reach 5 %
    smallest = sign_flip_detectable(np.array([1.0, 1.0, *[0.0] * 38]), np.full(40, 10.0), math.sqrt(2) / 400)
    assert smallest == pytest.approx((mcnemar_detectable(40, 2) or 0) * 40 / 400)


def test_the_difference_that_seeds_detect() -> None:
    parts = Spread(0.3, 0.5, 0.4, 0.1, 3, 3)
    assert expected_spread(parts, 3) == pytest.approx(parts._replace(seeds_a=0.4, seeds_b=0.4))
    for level in (0.05, 0.05 / 3):  # documents alone need the normal difference
        normal = stats.norm.ppf(1 - level / 2) + stats.norm.ppf(0.8)
        detected = seeds_detectable(Spread(0.0, 0.0, 0.04, 0.0, 3, 3), 3, level=level)
        assert detected == pytest.approx(normal * 0.2, rel=1e-3)
    # Two equal components of seeds alone: the critical difference is t(0.975, 4) times the root of their sum
    dice, effect, times = np.random.default_rng(1), seeds_detectable(Spread(0.1, 0.1, 0.0, 0.0, 5, 5), 5), 400_000
    assert effect is not None
    critical = stats.t.ppf(0.975, 4) * np.sqrt(0.1 * dice.chisquare(4, (2, times)).sum(axis=0) / 4)
    assert (np.abs(dice.normal(effect, math.sqrt(0.2), times)) > critical).mean() == pytest.approx(0.8, abs=0.003)
    # Pairs have one component of seeds: the noncentral t, exactly
    shift = (seeds_detectable(Spread(0.0, 0.1, 0.0, 0.0, 1, 5), 5) or 0) / math.sqrt(0.1)
    assert 1 - stats.nct.cdf(stats.t.ppf(0.975, 4), 4, shift) == pytest.approx(0.8, abs=0.002)


@pytest.mark.parametrize(("freedom", "level"), [(1, 0.05), (4, 0.05), (4, 0.05 / 8), (30, 0.05)])
def test_the_detectable_difference_of_an_estimated_variance(freedom: int, level: float) -> None:
    """Detected in 80 % of pairs of a comparison, from which it is computed, and its repetition."""
    dice, times = np.random.default_rng(freedom), 400_000
    factor = detectable(Estimate(0.0, 1.0, freedom), level=level)
    assert factor is not None
    first, second = (np.sqrt(dice.chisquare(freedom, times) / freedom) for _ in range(2))
    found = np.abs(dice.normal(factor * first, 1.0)) > stats.t.ppf(1 - level / 2, freedom) * second
    assert found.mean() == pytest.approx(0.8, abs=0.01)
    known = detectable(Estimate(0.0, 1.0, freedom), level=level, is_known=True)
    assert known == pytest.approx(t_detectable(1.0, freedom, math.inf, level), rel=0.005)


def test_the_seeds_needed_are_the_fewest() -> None:
    parts = Spread(0.02, 0.03, 0.001, 0.0005, 3, 3)
    for difference in (0.2, -0.5):
        needed = seeds_needed(parts, difference)
        assert needed is not None and needed > 2
        smallest, before = seeds_detectable(parts, needed), seeds_detectable(parts, needed - 1)
        assert smallest is not None and before is not None and smallest <= abs(difference) < before
    # A difference that no number of seeds shows, but for more documents
    noisy = parts._replace(documents=0.5)
    assert seeds_needed(noisy, 0.05) is None
    assert 400 < (seeds_needed(noisy, 0.05, documents=1e6) or 0) < MOST_SEEDS
