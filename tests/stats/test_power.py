"""Detectable differences, compared with statsmodels, enumeration and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.power import TTestPower

from evalkit.stats.power import (
    MOST_SEEDS,
    POWER,
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


@pytest.mark.parametrize("n", [5, 30, 100, 5000])
@pytest.mark.parametrize("shift", [0.0, 0.5, 1.96, 2.8, 4.0])
def test_power_of_t_is_statsmodels(n: int, shift: float) -> None:
    assert t_power(shift, n - 1) == pytest.approx(TTestPower().power(shift / math.sqrt(n), n, 0.05), abs=1e-10)


def test_the_normal_limit_is_the_textbooks() -> None:
    expected = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    assert t_detectable(0.01, 1e9) == pytest.approx(0.01 * expected, rel=1e-5)
    assert t_detectable(0.0, 1e9) is None
    assert t_detectable(0.5, 1e9) is None  # 1.4, more than scores can differ by


def enumerated(n: int, discordance: float, difference: float) -> float:
    """Over every outcome of the three-cell table."""
    won, lost = (discordance + difference) / 2, (discordance - difference) / 2
    total = 0.0
    for wins in range(n + 1):
        for losses in range(n + 1 - wins):
            if mcnemar(wins, losses) <= 0.05:
                total += float(stats.multinomial.pmf([wins, losses, n - wins - losses], n, [won, lost, 1 - won - lost]))
    return total


@pytest.mark.parametrize(("n", "discordance", "difference"), [(20, 0.4, 0.0), (30, 0.5, 0.3), (25, 0.3, 0.3)])
def test_power_of_mcnemar_is_that_of_every_outcome(n: int, discordance: float, difference: float) -> None:
    assert mcnemar_power(n, discordance, difference) == pytest.approx(enumerated(n, discordance, difference), abs=1e-8)


def test_exact_mcnemar_rejects_no_more_than_it_says() -> None:
    """Its size without a difference: at most 5 %, and less where few documents are discordant."""
    sizes = {n: mcnemar_power(n, 0.3, 0.0) for n in (100, 1000, 10_000)}
    assert all(size <= 0.05 for size in sizes.values())
    assert sizes[100] < sizes[1000] < sizes[10_000]
    assert sizes[10_000] > 0.047
    assert mcnemar_power(100, 0.05, 0.0) < 0.02


@settings(max_examples=25)
@given(st.integers(50, 3000), st.floats(0.02, 0.9))
def test_the_smallest_difference_has_the_power_that_is_promised(n: int, share: float) -> None:
    discordant = round(share * n)
    found = mcnemar_detectable(n, discordant)
    assert found is not None
    assert mcnemar_power(n, max(found, discordant / n), found) == pytest.approx(POWER, abs=1e-6)


def test_documents_that_can_show_nothing() -> None:
    assert mcnemar_detectable(5, 5) is None  # five of five is still p = 0.06
    assert mcnemar_detectable(1, 0) is None
    # If the runs agree everywhere, at least six documents would have to be won
    assert mcnemar_detectable(200, 0) == pytest.approx(_six_of(200), rel=1e-4)


def test_few_sources_that_differ_can_show_only_what_an_exact_test_allows() -> None:
    """Two passages of ten documents: five more would have to go the same way for p to reach 5 %."""
    sums = np.array([1.0, 1.0, *[0.0] * 38])
    found = sign_flip_detectable(sums, np.full(40, 10.0), math.sqrt(2) / 400)
    assert found == pytest.approx((mcnemar_detectable(40, 2) or 0) * 40 / 400)


def _six_of(n: int) -> float:
    shares = np.linspace(0.001, 0.2, 200_000)
    return float(shares[np.argmax(stats.binom.sf(5, n, shares) >= POWER)])


# Seeds that are needed


def test_the_same_numbers_give_the_same_components() -> None:
    parts = Spread(0.3, 0.5, 0.4, 0.1, 3, 3)
    assert expected_spread(parts, 3) == pytest.approx(parts._replace(seeds_a=0.4, seeds_b=0.4))


@pytest.mark.parametrize("level", [0.05, 0.05 / 3])
def test_documents_alone_need_the_normal_difference(level: float) -> None:
    found = seeds_detectable(Spread(0.0, 0.0, 0.04, 0.0, 3, 3), 3, level=level)
    assert found == pytest.approx((stats.norm.ppf(1 - level / 2) + stats.norm.ppf(0.8)) * 0.2, rel=1e-3)


def test_seeds_alone_need_banerjees_quantile() -> None:
    # Two equal components: the critical difference is t(0.975, 4) times the root of their sum
    found = seeds_detectable(Spread(0.1, 0.1, 0.0, 0.0, 5, 5), 5)
    freedom, error = 4, math.sqrt(0.2)
    assert found is not None
    assert 1 - stats.nct.cdf(stats.t.ppf(0.975, freedom), freedom, found / error) == pytest.approx(0.8, abs=0.002)


@pytest.mark.parametrize("difference", [0.2, -0.5])
def test_the_seeds_needed_are_the_fewest(difference: float) -> None:
    parts = Spread(0.02, 0.03, 0.001, 0.0005, 3, 3)
    needed = seeds_needed(parts, difference)
    assert needed is not None and needed > 2
    smallest, before = seeds_detectable(parts, needed), seeds_detectable(parts, needed - 1)
    assert smallest is not None and before is not None and smallest <= abs(difference) < before


def test_a_difference_that_no_number_of_seeds_shows() -> None:
    parts = Spread(0.02, 0.03, 0.5, 0.0005, 3, 3)
    assert seeds_needed(parts, 0.05) is None
    needed = seeds_needed(parts, 0.05, documents=1e6)
    assert needed is not None and 400 < needed < MOST_SEEDS
