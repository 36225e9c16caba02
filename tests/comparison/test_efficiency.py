"""How many times fewer documents an outcome needs: against definitions, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evalkit.benchmarks.outcomes import Measure
from evalkit.comparison.line import ScoredLine, efficiency
from evalkit.comparison.pairing import PairedTask
from evalkit.stats.estimates import Codes, Floats

RIGHT = Measure("right", False, "accuracy")
VALUE = Measure("value", True, "value", None, None)


def line(differences: Floats, measure: Measure, task: str = "t", clusters: Codes | None = None) -> ScoredLine:
    rows = (np.arange(len(differences)),) * 2
    paired = PairedTask(task, clusters, None, rows, 0, True)
    return ScoredLine(paired, np.zeros((1, len(differences))), differences[None], measure)


def drawn(n: int, shift: float, dice: np.random.Generator) -> tuple[Floats, Floats]:
    """Right or wrong, and a value that leads to it: the same ability seen coarsely and finely."""
    value = dice.normal(shift, 1.0, n)
    return np.where(value > 1.0, 1.0, np.where(value < -1.0, -1.0, 0.0)), value


def expected_ratio(shift: float) -> float:
    """Squared ratio of signal to noise of both, from the normal distribution."""
    from scipy.stats import norm

    up, down = norm.sf(1 - shift), norm.cdf(-1 - shift)
    return float(shift**2 / ((up - down) ** 2 / (up + down - (up - down) ** 2)))


def test_the_ratio_is_that_of_squared_signal_to_noise() -> None:
    dice = np.random.default_rng(1)
    right, value = drawn(200_000, 0.2, dice)
    found = efficiency([line(right, RIGHT)], [line(value, VALUE)])
    assert found is not None
    z = [one.mean() / (one.std(ddof=1) / math.sqrt(len(one))) for one in (right, value)]
    assert found[0] == pytest.approx((z[1] / z[0]) ** 2)
    assert found[0] == pytest.approx(expected_ratio(0.2), rel=0.05)
    assert found[1] < found[0] < found[2]


def test_without_a_difference_there_is_no_ratio() -> None:
    dice = np.random.default_rng(4)
    right, value = drawn(1000, 0.0, dice)
    value -= value.mean()
    assert efficiency([line(right, RIGHT)], [line(value + 1e-6, VALUE)]) is None
    assert efficiency([line(np.zeros(50), RIGHT)], [line(value[:50], VALUE)]) is None


def test_where_accuracy_shows_nothing_there_is_a_lower_bound_only() -> None:
    dice = np.random.default_rng(5)
    right, value = drawn(400, 0.3, dice)
    right = np.where(dice.random(400) < 0.3, right, dice.choice([-1.0, 1.0], 400))
    found = efficiency([line(right, RIGHT)], [line(value, VALUE)])
    assert found is not None and found[1] > 1 and found[2] == math.inf


@pytest.mark.simulation
@pytest.mark.parametrize(("n", "clustered"), [(300, False), (300, True), (1500, False)])
def test_intervals_contain_the_ratio(n: int, clustered: bool) -> None:
    """95 % of them, of two tasks; where they exist. Four standard errors of 1,000 simulations are 2.8 points."""
    dice, shift, times = np.random.default_rng(n), 0.25, 1000
    truth, inside, known = expected_ratio(shift), 0, 0
    clusters = np.repeat(np.arange(n // 2), 2) if clustered else None
    for _ in range(times):
        pairs = [drawn(n, shift, dice) for _ in range(2)]
        if clustered:  # both documents of a source are the same, which halves what they say of either outcome
            pairs = [(np.repeat(right[::2], 2), np.repeat(value[::2], 2)) for right, value in pairs]
        lines = [[line(pair[side], measure, clusters=clusters) for pair in pairs]
                 for side, measure in ((0, RIGHT), (1, VALUE))]  # fmt: skip
        if (found := efficiency(*lines)) is not None:
            known += 1
            inside += found[1] <= truth <= found[2]
    assert known > 0.9 * times
    assert inside / known == pytest.approx(0.95, abs=0.028)


@pytest.mark.simulation
def test_so_many_documents_have_the_same_power() -> None:
    """The claim itself: the outcome on n documents finds as often as accuracy on `times` n."""
    dice, shift, n, repeats = np.random.default_rng(9), 0.12, 300, 1500
    ratio = expected_ratio(shift)

    def power(count: int, side: int) -> float:
        hits = 0
        for _ in range(repeats):
            one = drawn(count, shift, dice)[side]
            hits += abs(one.mean()) > 1.96 * one.std(ddof=1) / math.sqrt(count)
        return hits / repeats

    fine, coarse = power(n, 1), power(round(ratio * n), 0)
    assert 0.3 < fine < 0.9 and ratio > 1.2
    assert fine == pytest.approx(coarse, abs=4 * math.sqrt(0.5 / repeats))
