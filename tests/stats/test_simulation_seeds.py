"""Size, coverage and power over seeds and documents: groups of unequal size and spread, and one run beside several.

Rates are allowed four standard errors of the simulation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

from evalkit.stats.adjusted import with_one_won_and_one_lost
from evalkit.stats.estimates import Estimate, Floats, average, interval, mean
from evalkit.stats.power import t_detectable
from evalkit.stats.significance import Spread, between, crossed, crossed_p_value, spread
from tests.stats.test_simulation import adjusted, allowed

GROUPS = [(2, 10), (10, 2), (2, 5), (3, 3), (1, 3), (1, 5), (5, 1), (3, 10)]
SHARES = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.2, 0.2, 0.6), (0.75, 0.05, 0.2), (0.05, 0.75, 0.2), (0.5, 0.5, 0.0)]
"""Of A's seeds, B's seeds and the documents in the variance of the difference."""


def drawn_parts(runs: tuple[int, int], shares: tuple[float, float, float], dice: np.random.Generator) -> Spread:
    """Parts as they are estimated where scores are normal; 1,000 documents. A single run has no share."""
    seeds = [
        share * float(dice.chisquare(count - 1)) / (count - 1) if count > 1 else 0.0
        for share, count in zip(shares[:2], runs, strict=True)
    ]
    return Spread(*seeds, shares[2] * float(dice.chisquare(999)) / 999, 0.0, *runs)


def shares_of(runs: tuple[int, int], shares: tuple[float, float, float]) -> float:
    """The variance that is in the error: a single run's share is not."""
    return sum(share for share, count in zip(shares, (*runs, 2), strict=True) if count > 1)


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("runs", [(2, 10), (2, 5), (3, 3), (1, 3)])
def test_no_share_of_the_parts_makes_the_test_reject_too_often(
    runs: tuple[int, int], shares: tuple[float, float, float]
) -> None:
    """Satterthwaite's degrees of freedom reject 13 % with two runs a side, 8 % with three, in the worst of these."""
    dice, times = np.random.default_rng(1), 2000
    deviation = shares_of(runs, shares) ** 0.5
    found = 0
    for _ in range(times):
        parts = drawn_parts(runs, shares, dice)
        low, high = interval(crossed(Estimate(deviation * float(dice.normal()), parts.documents, 999.0), parts))
        found += not low <= 0 <= high
    assert found / times <= 0.05 + allowed(0.05, times)


@pytest.mark.parametrize("runs", [(2, 10), (3, 3), (5, 5), (1, 5)])
def test_power_is_that_of_the_t_with_the_same_interval(runs: tuple[int, int]) -> None:
    """Of the parts that were found: four times in five, or a little more."""
    dice, times, shares = np.random.default_rng(2), 1000, (0.2, 0.2, 0.6)
    true = Spread(*(share if count > 1 else 0.0 for share, count in zip(shares, runs, strict=False)), 0.6, 0.0, *runs)
    error = crossed(Estimate(0.0, 0.6, 999.0), true)
    scale = 100.0  # of a difference that may be 1 at most
    difference = scale * (t_detectable(error.stderr / scale, error.freedom) or 0.0)
    found = 0
    for _ in range(times):
        parts = drawn_parts(runs, shares, dice)
        value = difference + error.stderr * float(dice.normal())
        low, high = interval(crossed(Estimate(value, parts.documents, 999.0), parts))
        found += not low <= 0 <= high
    assert 0.8 - allowed(0.8, times) <= found / times <= 0.83 + allowed(0.8, times)


class World(NamedTuple):
    """Two architectures that answer documents by latent normal scores."""

    runs: tuple[int, int]
    deviations: tuple[float, float]
    """Of a seed's shift on the latent scale; 0.05 are about 1 point of accuracy. Ignored for a single run."""
    tasks: tuple[int, ...] = (300,)
    """Documents."""
    shift: float = 0.0
    """B's on the latent scale."""

    def accuracy_gain(self) -> float:
        """B's expected accuracy less A's, over seeds and documents."""
        deviation = self.deviations[1] if self.runs[1] > 1 else 0.0
        return float(stats.norm.cdf(self.shift / np.sqrt(1.5**2 + 0.5**2 + 0.7**2 + deviation**2))) - 0.5

    def draw(self, dice: np.random.Generator, times: int = 1) -> list[tuple[Floats, Floats]]:
        """For each task [times, runs of A, n] and [times, runs of B, n] right answers."""
        shifts = [
            (deviation if count > 1 else 0.0) * dice.normal(size=(times, count, 1))
            for count, deviation in zip(self.runs, self.deviations, strict=True)
        ]
        shifts[1] += self.shift
        found = []
        for n in self.tasks:
            difficulty = dice.normal(0, 1.5, (times, 1, n))
            a, b = (
                difficulty
                + dice.normal(0, 0.5, (times, 1, n))
                + shift
                + dice.normal(0, 0.7, (times, shift.shape[1], n))
                > 0
                for shift in shifts
            )
            found.append((a.astype(float), b.astype(float)))
        return found


def analysed(tasks: list[tuple[Floats, Floats]]) -> tuple[Estimate, Spread]:
    """(the documents' estimate, the parts) of the average, as `compare` has them."""
    differences = [b.mean(axis=0) - a.mean(axis=0) for a, b in tasks]
    documents = average([mean(one) for one in differences])
    shared = sum(spread(a, b).shared for a, b in tasks) / len(tasks) ** 2
    a, b = (np.mean([task[side].mean(axis=1) for task in tasks], axis=0) for side in (0, 1))
    parts = Spread(between(a), between(b), documents.variance, shared, len(a), len(b))
    return adjusted([(one, None) for one in differences]), parts


def simulated(world: World, times: int) -> tuple[float, float]:
    """(how often a difference is found, how often the interval covers the true one)."""
    dice, true = np.random.default_rng(world.runs), world.accuracy_gain()
    finds = covers = 0
    for _ in range(times):
        documents, parts = analysed([(a[0], b[0]) for a, b in world.draw(dice)])
        low, high = interval(crossed(documents, parts))
        finds += not low <= 0 <= high
        covers += low <= true <= high
    return finds / times, covers / times


@pytest.mark.parametrize(
    "world",
    [
        World((2, 10), (0.4, 0.05)),
        World((5, 2), (0.05, 0.4)),
        World((3, 3), (0.1, 0.1), (200, 100)),
        World((1, 3), (0.0, 0.4)),
        World((1, 5), (0.0, 0.4)),
    ],
)
def test_right_answers_of_crossed_runs_and_documents(world: World) -> None:
    times = 300
    found, covered = simulated(world, times)
    assert found <= 0.05 + allowed(0.05, times) / 2
    assert covered == pytest.approx(1 - found)


def many_analysed(a: Floats, b: Floats) -> list[tuple[Estimate, Spread]]:
    """As `analysed` one task of independent documents, for all repetitions at once."""
    n, seeds, shared = a.shape[2], [], np.zeros(len(a))
    for side in (a, b):
        count = side.shape[1]
        seeds.append(side.mean(axis=2).var(axis=1, ddof=1) / count if count > 1 else np.zeros(len(a)))
        if count > 1:
            residuals = side - side.mean(axis=1, keepdims=True)
            shared += residuals.var(axis=2, ddof=1).sum(axis=1) / n / (count * (count - 1))
    differences = b.mean(axis=1) - a.mean(axis=1)
    values, variances = differences.mean(axis=1), differences.var(axis=1, ddof=1) / n
    sizes = np.sqrt((differences**2).sum(axis=1) / (differences != 0).sum(axis=1))
    return [
        (
            with_one_won_and_one_lost(Estimate(float(values[i]), float(variances[i]), n - 1.0), n, float(sizes[i])),
            Spread(
                float(seeds[0][i]),
                float(seeds[1][i]),
                float(variances[i]),
                float(shared[i]),
                *a.shape[1:2],
                *b.shape[1:2],
            ),
        )
        for i in range(len(a))
    ]


def p_values(world: World, times: int) -> Floats:
    """[times] p values; 1 where documents alone leave the difference in doubt, so that the p value is above 5 %."""
    dice, found = np.random.default_rng(world.runs), []
    for _ in range(times // 100):
        for documents, parts in many_analysed(*world.draw(dice, 100)[0]):
            low, high = interval(documents)
            found.append(1.0 if low < 0 < high else crossed_p_value(documents, parts))
    return np.array(found)


def test_many_are_analysed_like_one() -> None:
    a, b = World((3, 2), (0.1, 0.1)).draw(np.random.default_rng(1), 3)[0]
    for one, (documents, parts) in enumerate(many_analysed(a, b)):
        expected = analysed([(a[one], b[one])])
        assert documents == pytest.approx(expected[0])
        assert parts == pytest.approx(expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("deviations", [(0.0, 0.0), (0.1, 0.1), (0.4, 0.05), (0.05, 0.4)])
@pytest.mark.parametrize("runs", GROUPS)
def test_right_answers_often_simulated(runs: tuple[int, int], deviations: tuple[float, float]) -> None:
    """At most 5 %, as Banerjee proved for normal parts; also at the levels that Holm's correction asks for."""
    times = 4000
    ps = p_values(World(runs, deviations), times)
    assert np.mean(ps <= 0.05) <= 0.05 + allowed(0.05, times) / 2
    assert np.mean(ps <= 0.05 / 8) <= 0.05 / 8 + allowed(0.05 / 8, times) / 2


@pytest.mark.slow
@pytest.mark.parametrize("runs", [(2, 10), (3, 3), (1, 5)])
def test_intervals_cover_a_true_difference_over_tasks(runs: tuple[int, int]) -> None:
    times = 1000
    found, covered = simulated(World(runs, (0.1, 0.1), (300, 200, 400), shift=0.4), times)
    assert covered >= 0.95 - allowed(0.05, times) / 2
    assert found > 0.05
