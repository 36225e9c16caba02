"""Size and coverage on continuous outcomes: heavy tails, and documents that share sources, as `compare` tests them.

Rates are those of p values and 95 % intervals of a line of a comparison, with an unbounded measure. Skewed differences
are simulated too, to know what the tests do not achieve.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from evalkit.benchmarks.outcomes import Measure
from evalkit.comparison.line import ScoredLine
from evalkit.comparison.pairing import PairedTask
from evalkit.stats.estimates import Codes, Floats, interval
from evalkit.stats.significance import t_test

BITS = Measure("bits per byte", True, "bits per byte", None, False)
Draw = Callable[[int, np.random.Generator], Floats]

SYMMETRIC: dict[str, Draw] = {
    "t with 3 degrees of freedom": lambda n, dice: dice.standard_t(3, n),
    "Laplace": lambda n, dice: dice.laplace(size=n),
    # A tenth of the documents move by ten times as much as the others
    "contaminated": lambda n, dice: dice.normal(size=n) * np.where(dice.random(n) < 0.1, 10, 1),
}
SKEWED: dict[str, Draw] = {
    "exponential": lambda n, dice: dice.exponential(size=n) - 1,
    "lognormal": lambda n, dice: dice.lognormal(0, 1, n) - math.exp(0.5),
}


def sources(n: int, dice: np.random.Generator) -> Codes:
    """Sources of one to six documents."""
    sizes = dice.integers(1, 7, n)
    return np.repeat(np.arange(n), sizes)[:n]


def rates(draw: Draw, n: int, shared: float, difference: float, times: int) -> tuple[float, float]:
    """Return the rate of p at most 5 % and that of intervals that contain the difference.

    Args:
        draw: values of so many documents or sources, of mean zero.
        n: documents.
        shared: deviation of what documents of a source share, over that of a document; 0: each is its own source.
        difference: the true one.
        times: simulations.
    """
    dice = np.random.default_rng([n, int(10 * shared), times])
    rejected = covered = 0
    for _ in range(times):
        clusters = sources(n, dice) if shared else None
        values = draw(n, dice)
        if clusters is not None:
            values = values + shared * draw(int(clusters.max()) + 1, dice)[clusters]
        paired = PairedTask("t", clusters, None, (np.arange(n),) * 2, 0, True)
        line = ScoredLine(paired, np.zeros((1, n)), (values + difference)[None], BITS)
        low, high = interval(line.adjusted)
        covered += low <= difference <= high
        # p is the larger of both tests', so the slow one counts only where the other rejects
        rejected += t_test(line.adjusted) <= 0.05 and not difference and (line.p or 0.0) <= 0.05
    return rejected / times, covered / times


@pytest.mark.parametrize("shared", [0.0, 0.5])
@pytest.mark.parametrize("kind", SYMMETRIC)
def test_size_and_coverage_with_heavy_tails(kind: str, shared: float) -> None:
    """Few simulations of few documents; the slow test has the figures of docs/measurements/statistics.md."""
    rejected, covered = rates(SYMMETRIC[kind], 150, shared, 0.0, 300)
    # Four standard errors of 300 simulations, and a point for tails that the t test finds too heavy
    allowed = 4 * math.sqrt(0.05 * 0.95 / 300)
    assert 0.05 - allowed - 0.01 <= rejected <= 0.05 + allowed
    assert 0.95 - allowed <= covered <= 0.95 + allowed + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0.0, 0.5])
@pytest.mark.parametrize("kind", SYMMETRIC)
def test_size_and_coverage_within_seven_tenths_of_a_point(kind: str, shared: float) -> None:
    rejected, covered = rates(SYMMETRIC[kind], 1000, shared, 0.0, 4000)
    print(f"\n{kind}, shared {shared}: rejected {rejected:.2%}, covered {covered:.2%}")
    assert abs(rejected - 0.05) <= 0.007 + 0.0034  # a standard error of 4,000 simulations
    assert abs(covered - 0.95) <= 0.007 + 0.0034


@pytest.mark.slow
@pytest.mark.parametrize("kind", SKEWED)
def test_skewed_differences_cost_some_coverage(kind: str) -> None:
    """A limit that the documentation states: intervals are too short on the side of the tail."""
    _, covered = rates(SKEWED[kind], 1000, 0.5, 1.0, 4000)
    print(f"\n{kind}: covered {covered:.2%}")
    assert 0.92 <= covered <= 0.955
