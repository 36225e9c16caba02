"""Plans of seeds and documents: closed forms where one component is alone, and the power found by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from evalkit.stats.estimates import Estimate, mean
from evalkit.stats.power import MOST_SEEDS, expected_spread, seeds_detectable, seeds_needed, t_detectable
from evalkit.stats.significance import Spread, crossed, crossed_p_value, spread


def simulated(
    generator: np.random.Generator, seeds: int, documents: int, effect: float, deviations: tuple[float, float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of two sides, [seeds, documents] each: deviations between seeds, documents' differences, interaction."""
    between, difference, interaction = deviations
    shape = (seeds, documents)
    a, b = (generator.normal(0, between, (seeds, 1)) + generator.normal(0, interaction, shape) for _ in range(2))
    return a, b + effect + generator.normal(0, difference, documents)


@pytest.mark.parametrize("documents", [0.5, 1.0, 4.0])
def test_the_components_are_those_of_the_simulated_scores(documents: float) -> None:
    generator, deviations = np.random.default_rng(0), (0.3, 2.0, 1.5)
    seen = [spread(*simulated(generator, 3, 200, 0.0, deviations)) for _ in range(400)]
    parts = Spread(*(float(np.mean([getattr(one, name) for one in seen])) for name in Spread._fields[:4]), 3, 3)
    found = expected_spread(parts, 5, documents)
    n = 200 * documents
    interaction = 1.5**2 / n
    # 400 simulations of variances with 2 degrees of freedom: their mean's own error is 5 %, the others' below 2 %
    assert found.seeds_a == pytest.approx((0.3**2 + interaction) / 5, rel=0.15)
    assert found.seeds_b == pytest.approx((0.3**2 + interaction) / 5, rel=0.15)
    assert found.shared == pytest.approx(2 * interaction / 5, rel=0.05)
    assert found.documents == pytest.approx(2.0**2 / n + 2 * interaction / 5, rel=0.05)
    assert (found.runs_a, found.runs_b) == (5, 5)


def test_the_same_numbers_give_the_same_components() -> None:
    parts = Spread(0.3, 0.5, 0.4, 0.1, 3, 3)
    assert expected_spread(parts, 3) == pytest.approx(parts._replace(seeds_a=0.4, seeds_b=0.4))


def test_the_same_numbers_show_what_the_comparison_could() -> None:
    """Also where one side's seeds vary less than the interaction alone would make them."""
    parts = Spread(0.3, 0.01, 0.4, 0.1, 3, 3)
    estimate = crossed(Estimate(0.0, parts.documents, 1e6), parts)
    assert seeds_detectable(parts, 3) == pytest.approx(t_detectable(estimate.stderr, estimate.freedom, math.inf))


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


def test_without_variance_two_seeds_find_every_difference() -> None:
    parts = Spread(0.0, 0.0, 0.0, 0.0, 3, 3)
    assert seeds_detectable(parts, 3) == 0
    assert seeds_needed(parts, 0.1) == 2


def test_two_seeds_find_nothing_at_a_strict_level() -> None:
    """The critical difference is above 38 standard errors."""
    parts = Spread(0.02, 0.02, 0.0, 0.0, 2, 2)
    assert seeds_detectable(parts, 2, level=0.05 / 3) is None
    needed = seeds_needed(parts, 1.0, level=0.05 / 3)
    assert needed is not None and needed > 2


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


@pytest.mark.parametrize(("seeds", "documents", "level"), [(3, 60, 0.05), (5, 60, 0.05 / 3), (8, 200, 0.05)])
def test_the_planned_difference_is_found_with_a_power_of_80_percent(seeds: int, documents: int, level: float) -> None:
    deviations = (0.3, 1.0, 1.0)
    between, difference, interaction = deviations
    own, shared = between**2 + interaction**2 / documents, 2 * interaction**2 / documents
    parts = Spread(own / seeds, own / seeds, difference**2 / documents + shared / seeds, shared / seeds, seeds, seeds)
    effect = seeds_detectable(parts, seeds, level=level)
    assert effect is not None
    generator = np.random.default_rng(seeds)
    times = 1000
    won = 0
    for _ in range(times):
        a, b = simulated(generator, seeds, documents, effect, deviations)
        paired = mean(b.mean(axis=0) - a.mean(axis=0))
        won += crossed_p_value(Estimate(paired.value, paired.variance, paired.freedom), spread(a, b)) < level
    # Simulation's own error 1.3 points; the t of the same interval is an approximation, within 5 points here
    assert 0.75 <= won / times <= 0.87
