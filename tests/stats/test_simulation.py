"""Size, coverage and power on simulated pairs: a test at 5 % rejects 5 %, an interval at 95 % covers 95 %.

Exact tests of whole numbers may reject less than 5 %, since p values come in steps; by how much less is known too, and
is what the simulation must find. Rates are allowed four standard errors of the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from evalkit.stats.adjusted import adjusted_average, size_of_differences, with_one_won_and_one_lost
from evalkit.stats.estimates import Codes, Estimate, Floats, average, interval, mean
from evalkit.stats.power import mcnemar_power, t_power
from evalkit.stats.significance import cluster_sums, mcnemar, sign_flip, t_test

Drawn = tuple[Floats, Codes | None]
DISCORDANT = 0.3


def allowed(rate: float, times: int) -> float:
    """Four standard errors of a simulated rate."""
    return 4 * math.sqrt(rate * (1 - rate) / times)


def independent(n: int, difference: float, dice: np.random.Generator) -> Drawn:
    toss = dice.random(n)
    won = toss < (DISCORDANT + difference) / 2
    return np.where(won, 1.0, np.where(toss < DISCORDANT, -1.0, 0.0)), None


def clustered(n: int, difference: float, dice: np.random.Generator) -> Drawn:
    """Sources of one to six documents, whose differences lean the same way within a source, to either side alike."""
    sizes = dice.integers(1, 7, n)
    sizes = sizes[: int(np.searchsorted(np.cumsum(sizes), n)) + 1]
    clusters = np.repeat(np.arange(len(sizes)), sizes)[:n]
    lean = dice.choice([-0.1, 0.1], len(sizes))[clusters]
    toss = dice.random(n)
    won = toss < (DISCORDANT + difference) / 2 + lean
    return np.where(won, 1.0, np.where(toss < DISCORDANT, -1.0, 0.0)), clusters


def draws(
    make: Callable[[int, float, np.random.Generator], Drawn], n: int, difference: float, times: int
) -> Iterator[Drawn]:
    dice = np.random.default_rng(n)
    for _ in range(times):
        yield make(n, difference, dice)


def p_of(differences: Floats, clusters: Codes | None) -> float:
    """Return the p value of a task, as in `compare`."""
    if clusters is None:
        return mcnemar(int((differences > 0).sum()), int((differences < 0).sum()))
    return max(sign_flip(cluster_sums(differences, clusters)), t_test(adjusted([(differences, clusters)])))


def adjusted(tasks: Sequence[Drawn]) -> Estimate:
    """As `compare` estimates the mean over tasks, or one task."""
    sums = [cluster_sums(*task) for task in tasks]
    weights = [cluster_sums(np.ones(len(differences)), clusters) for differences, clusters in tasks]
    sizes = [size_of_differences(*both) for both in zip(sums, weights, strict=True)]
    found, counts = [mean(*task) for task in tasks], [len(one) for one in sums]
    alone = [with_one_won_and_one_lost(*one) for one in zip(found, counts, sizes, strict=True)]
    return adjusted_average(average(found), alone, counts, sizes)


def rejected(make: Callable[..., Drawn], n: int, difference: float, times: int) -> float:
    return sum(p_of(*drawn) <= 0.05 for drawn in draws(make, n, difference, times)) / times


def covered(make: Callable[..., Drawn], n: int, difference: float, times: int) -> float:
    hits = 0
    for drawn in draws(make, n, difference, times):
        low, high = interval(adjusted([drawn]))
        hits += low <= difference <= high
    return hits / times


LARGE = pytest.param(10_000, 4_000, marks=pytest.mark.slow)


@pytest.mark.parametrize(("n", "times"), [(100, 4000), (1000, 4000), LARGE])
def test_size_on_independent_documents(n: int, times: int) -> None:
    exact = mcnemar_power(n, DISCORDANT, 0.0)
    assert exact <= 0.05
    assert rejected(independent, n, 0.0, times) == pytest.approx(exact, abs=allowed(exact, times))


@pytest.mark.parametrize(("n", "times"), [(100, 2000), (1000, 1000), LARGE])
def test_size_on_documents_that_share_sources(n: int, times: int) -> None:
    found = rejected(clustered, n, 0.0, times)
    # At 100 documents the steps of the exact test cost up to a point
    assert 0.04 - allowed(0.04, times) <= found <= 0.05 + allowed(0.05, times)


def test_what_would_happen_without_clusters() -> None:
    """The simulation has power: McNemar that ignores shared sources finds differences that are not there."""
    alone = [p_of(differences, None) <= 0.05 for differences, _ in draws(clustered, 1000, 0.0, 1000)]
    assert np.mean(alone) > 0.08


@pytest.mark.parametrize("make", [independent, clustered])
@pytest.mark.parametrize("difference", [0.0, 0.08])
@pytest.mark.parametrize(("n", "times"), [(100, 2000), (1000, 1000), LARGE])
def test_intervals_cover(make: Callable[..., Drawn], difference: float, n: int, times: int) -> None:
    # With one won and one lost they cover a little more where documents are few
    assert -allowed(0.05, times) <= covered(make, n, difference, times) - 0.95 <= allowed(0.05, times) + 2 / n


@pytest.mark.parametrize(("n", "difference"), [(100, 0.15), (1000, 0.05), (5000, 0.02)])
def test_power_on_independent_documents(n: int, difference: float) -> None:
    reference = mcnemar_power(n, DISCORDANT, difference)
    assert 0.2 < reference < 0.95
    assert rejected(independent, n, difference, 3000) == pytest.approx(reference, abs=0.03)


@pytest.mark.parametrize(("n", "difference"), [(500, 0.08), (1000, 0.06), (3000, 0.03)])
def test_power_on_documents_that_share_sources(n: int, difference: float) -> None:
    """Against the noncentral t with the error that many draws have. (At 300 documents, which come from 86 sources, the
    steps of the exact test cost four points.)"""
    drawn = list(draws(clustered, n, difference, 1500))
    error = float(np.std([differences.mean() for differences, _ in drawn]))
    reference = t_power(difference / error, n / 3.5)
    assert 0.2 < reference < 0.95
    assert np.mean([p_of(*one) <= 0.05 for one in drawn]) == pytest.approx(reference, abs=0.03 + allowed(0.5, 1500) / 4)


@pytest.mark.parametrize(("differing", "deviation"), [(0.5, 0.3), (1.0, 0.08)])
def test_graded_scores(differing: float, deviation: float) -> None:
    """F1 of which half differ, ROUGE-L of which all differ by little; 200 documents, no difference."""
    dice, times = np.random.default_rng(7), 400
    covers = rejects = 0
    for _ in range(times):
        values = np.where(dice.random(200) < differing, dice.normal(0, deviation, 200), 0.0)
        size = math.sqrt(float((values[values != 0] ** 2).mean()))
        low, high = interval(with_one_won_and_one_lost(mean(values), 200, size))
        covers += low <= 0 <= high
        rejects += sign_flip(values) <= 0.05
    assert covers / times == pytest.approx(0.955, abs=allowed(0.05, times))
    assert rejects / times == pytest.approx(0.05, abs=allowed(0.05, times))


def test_size_and_coverage_of_the_average() -> None:
    """Eight tasks of several sizes, two of them clustered, no difference in any."""
    dice, times, hits = np.random.default_rng(8), 1500, 0
    sizes = (500, 1267, 300, 800, 100, 250, 400, 600)
    for _ in range(times):
        found = adjusted([(clustered if place < 2 else independent)(n, 0.0, dice) for place, n in enumerate(sizes)])
        low, high = interval(found)
        assert (t_test(found) <= 0.05) == (not low <= 0 <= high)
        hits += low <= 0 <= high
    assert hits / times == pytest.approx(0.95, abs=allowed(0.05, times))


@pytest.mark.parametrize("difference", [0.0, 0.25])
def test_coverage_of_the_average_over_many_small_tasks(difference: float) -> None:
    """57 subjects of ten documents: the two documents that are added may not pull the average to zero."""
    dice, times = np.random.default_rng(9), 250
    hits = 0
    for _ in range(times):
        low, high = interval(adjusted([independent(10, difference, dice) for _ in range(57)]))
        hits += low <= difference <= high
    assert hits / times == pytest.approx(0.95, abs=allowed(0.05, times))
