"""Error rates, coverage and power on simulated scores: a test at 5 % rejects 5 %, an interval at 95 % covers 95 %.

Exact tests of whole numbers may reject less than 5 %, since p values come in steps. Rates are allowed four standard
errors of the simulation. Skewed differences and clusters that are ignored show that the simulations have power.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

from evalkit.benchmarks.outcomes import Measure
from evalkit.comparison.line import ScoredLine, average_difference
from evalkit.comparison.pairing import PairedTask
from evalkit.stats.estimates import Codes, Estimate, Floats, interval, mean
from evalkit.stats.power import mcnemar_power, seeds_detectable, sign_flip_detectable, t_detectable, t_power
from evalkit.stats.significance import Spread, cluster_sums, crossed, crossed_p_value, mcnemar, sign_flip, spread

Drawn = tuple[Floats, Codes | None]
Draw = Callable[[int, float, np.random.Generator], Drawn]
RIGHT = Measure("right", False, "accuracy")
BITS = Measure("bits per byte", True, "bits per byte", None, False)


def allowed(rate: float, times: int) -> float:
    """Four standard errors of a simulated rate."""
    return 4 * math.sqrt(rate * (1 - rate) / times)


def line(
    a: Floats, b: Floats, clusters: Codes | None = None, strata: Codes | None = None, measure: Measure = RIGHT
) -> ScoredLine:
    """A line of a comparison, of [runs, n] scores."""
    paired = PairedTask("t", clusters, strata, (np.arange(a.shape[1]),) * 2, 0, True)
    return ScoredLine(paired, a, b, measure)


def alone(differences: Floats, clusters: Codes | None = None, measure: Measure = RIGHT) -> ScoredLine:
    return line(np.zeros((1, len(differences))), differences[None], clusters, measure=measure)


def toss(n: int, discordant: float, difference: float, lean: float | Floats, dice: np.random.Generator) -> Floats:
    drawn = dice.random(n)
    return np.where(drawn < (discordant + difference) / 2 + lean, 1.0, np.where(drawn < discordant, -1.0, 0.0))


def independent(n: int, difference: float, dice: np.random.Generator) -> Drawn:
    return toss(n, 0.3, difference, 0.0, dice), None


def small_sources(n: int, dice: np.random.Generator) -> Codes:
    """[n] sources of one to six documents."""
    return np.repeat(np.arange(n), dice.integers(1, 7, n))[:n]


def clustered(n: int, difference: float, dice: np.random.Generator) -> Drawn:
    """Documents whose differences lean the same way within a source, to either side alike."""
    clusters = small_sources(n, dice)
    return toss(n, 0.3, difference, dice.choice([-0.1, 0.1], clusters.max() + 1)[clusters], dice), clusters


def rates(
    draw: Callable[[np.random.Generator], Sequence[ScoredLine]], difference: float, times: int
) -> tuple[float, float]:
    """Return the rate of p at most 5 %, and that of intervals with the true difference, of the average over lines."""
    dice, found, covered = np.random.default_rng(times), 0, 0
    for _ in range(times):
        average = average_difference("average", draw(dice))
        found += average.p is not None and average.p <= 0.05
        covered += average.low <= difference <= average.high
    return found / times, covered / times


@pytest.mark.parametrize("times", [300, pytest.param(4000, marks=pytest.mark.simulation)])
def test_size_is_that_of_the_exact_test(times: int) -> None:
    """A sample of this file runs by default."""
    exact = mcnemar_power(200, 0.3, 0.0)
    found, covered = rates(lambda dice: [alone(*independent(200, 0.0, dice))], 0.0, times)
    assert exact <= 0.05 and found == pytest.approx(exact, abs=allowed(exact, times))
    assert covered >= 0.95 - allowed(0.05, times)


@pytest.mark.simulation
@pytest.mark.parametrize("draw", [independent, clustered])
@pytest.mark.parametrize(("n", "difference"), [(100, 0.0), (1000, 0.0), (1000, 0.08), (100, 0.08)])
def test_size_and_coverage(draw: Draw, n: int, difference: float) -> None:
    times = 1500
    found, covered = rates(lambda dice: [alone(*draw(n, difference, dice))], difference, times)
    # Intervals are extended to zero where the exact test shows nothing, so they may cover more
    assert covered >= 0.95 - allowed(0.05, times)
    assert difference or 0.02 <= found <= 0.05 + allowed(0.05, times)


@pytest.mark.simulation
def test_clusters_that_are_ignored_find_differences_that_are_not_there() -> None:
    dice = np.random.default_rng(1000)
    ps = [alone(clustered(1000, 0.0, dice)[0]).p for _ in range(1000)]
    assert np.mean(np.array(ps, float) <= 0.05) > 0.08


@pytest.mark.simulation
@pytest.mark.parametrize(("n", "difference"), [(100, 0.15), (1000, 0.05), (5000, 0.02)])
def test_power_on_independent_documents(n: int, difference: float) -> None:
    dice, reference = np.random.default_rng(n), mcnemar_power(n, 0.3, difference)
    drawn = [independent(n, difference, dice)[0] for _ in range(3000)]
    found = np.mean([mcnemar(int((one > 0).sum()), int((one < 0).sum())) <= 0.05 for one in drawn])
    assert found == pytest.approx(reference, abs=0.03)


@pytest.mark.simulation
@pytest.mark.parametrize(("n", "difference"), [(500, 0.08), (1000, 0.06), (3000, 0.03)])
def test_power_on_documents_that_share_sources(n: int, difference: float) -> None:
    """Against the noncentral t with the error that many draws have."""
    dice = np.random.default_rng(n)
    lines = [alone(*clustered(n, difference, dice)) for _ in range(1500)]
    reference = t_power(difference / float(np.std([one.documents.value for one in lines])), n / 3.5)
    assert np.mean([one.p <= 0.05 for one in lines if one.p is not None]) == pytest.approx(reference, abs=0.045)


def zipf(n: int, count: int) -> Codes:
    """[n] the source of each document; the k-th has 1 / k as many as the first."""
    shares = 1 / np.arange(1, count + 1)
    sizes = np.maximum(1, np.floor(n * shares / shares.sum()).astype(int))
    sizes[0] += n - sizes.sum()
    return np.repeat(np.arange(count), sizes)


SOURCES = {
    "equal": np.repeat(np.arange(40), 7),
    "zipf": zipf(300, 40),
    "zipf of 150": zipf(300, 150),
    "giant": np.concatenate([np.zeros(150, int), 1 + np.arange(150) % 19]),
    "large": np.concatenate([np.zeros(90, int), 1 + np.arange(210) % 39]),
    "three": np.repeat(np.arange(3), 100),
}


def leaning(name: str, lean: float, difference: float, dice: np.random.Generator) -> Drawn:
    clusters = SOURCES[name]
    return toss(
        len(clusters), 0.4, difference, dice.choice([-lean, lean], clusters.max() + 1)[clusters], dice
    ), clusters


@pytest.mark.simulation
@pytest.mark.parametrize("lean", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("names", [["zipf"], ["zipf"] * 3, ["giant", "zipf", "equal", "equal"], ["giant"] * 3,
                                   ["zipf of 150"] * 2, ["three", *["zipf"] * 7]], ids=", ".join)  # fmt: skip
def test_sources_of_very_unequal_size(names: list[str], lean: float) -> None:
    """Liang and Zeger's error with G - 1 degrees of freedom finds something in 9 to 17 %, Satterthwaite's in 20 %."""
    times = 800
    found, covered = rates(lambda dice: [alone(*leaning(name, lean, 0.0, dice)) for name in names], 0.0, times)
    assert found <= 0.055 + allowed(0.05, times) / 2
    assert covered >= 0.945 - allowed(0.05, times) / 2


@pytest.mark.simulation
@pytest.mark.parametrize("name", ["equal", "zipf", "giant"])
def test_the_standard_error_is_right_on_average_and_sign_flips_hold(name: str) -> None:
    dice, times = np.random.default_rng(3), 1500
    drawn = [leaning(name, 0.1, 0.0, dice) for _ in range(times)]
    estimates = [mean(*one) for one in drawn]
    deviation = np.std([one.value for one in estimates])
    assert np.sqrt(np.mean([one.variance for one in estimates])) == pytest.approx(deviation, rel=0.06)
    found = np.mean([sign_flip(cluster_sums(*one)) <= 0.05 for one in drawn])
    assert 0.03 <= found <= 0.05 + allowed(0.05, times) / 2


@pytest.mark.simulation
@pytest.mark.parametrize("name", ["equal", "zipf", "large"])
def test_what_sign_flips_can_show(name: str) -> None:
    dice, weights = np.random.default_rng(6), np.bincount(SOURCES[name]).astype(float)
    drawn = [leaning(name, 0.05, 0.0, dice) for _ in range(100)]
    smallest = [sign_flip_detectable(cluster_sums(*one), weights, mean(*one).stderr) or 1.0 for one in drawn]
    difference = float(np.median(smallest))
    found = np.mean([sign_flip(cluster_sums(*leaning(name, 0.05, difference, dice))) <= 0.05 for _ in range(500)])
    assert found == pytest.approx(0.8, abs=0.1)


@pytest.mark.simulation
def test_strata_of_unequal_sources() -> None:
    """Four subjects, each with Zipf's sources, of unlike difficulty."""
    clusters = np.concatenate([zipf(75, 15) + 15 * place for place in range(4)])
    strata, times = np.repeat(np.arange(4), 75), 500

    def draw(dice: np.random.Generator) -> list[ScoredLine]:
        values = toss(300, 0.4, 0.0, dice.choice([-0.05, 0.05], 60)[clusters], dice)
        offsets = np.array([-0.15, -0.05, 0.05, 0.15])[strata]
        return [line(np.zeros((1, 300)), (values + offsets)[None], clusters, strata)]

    assert rates(draw, 0.0, times)[1] >= 0.95 - allowed(0.05, times) / 2


@pytest.mark.simulation
@pytest.mark.parametrize(("sizes", "difference"), [((500, 1267, 300, 800, 100, 250, 400, 600), 0.0),
                                                   ((10,) * 57, 0.0), ((10,) * 57, 0.25)])  # fmt: skip
def test_averages(sizes: tuple[int, ...], difference: float) -> None:
    """Tasks of several sizes; many small ones, whose average the two added documents may not pull to zero."""
    times = 500
    _, covered = rates(lambda dice: [alone(*independent(n, difference, dice)) for n in sizes], difference, times)
    assert covered == pytest.approx(0.95, abs=allowed(0.05, times))


TAILS: dict[str, Callable[[int, np.random.Generator], Floats]] = {
    "t with 3 degrees of freedom": lambda n, dice: dice.standard_t(3, n),
    "Laplace": lambda n, dice: dice.laplace(size=n),
    # A tenth of the documents move by ten times as much as the others
    "contaminated": lambda n, dice: dice.normal(size=n) * np.where(dice.random(n) < 0.1, 10, 1),
    # Limits that the documentation states: intervals are too short on the side of the tail
    "exponential": lambda n, dice: dice.exponential(size=n) - 1,
    "lognormal": lambda n, dice: dice.lognormal(0, 1, n) - math.exp(0.5),
}


@pytest.mark.simulation
@pytest.mark.parametrize("shared", [0.0, 0.5])
@pytest.mark.parametrize("kind", TAILS)
def test_continuous_outcomes(kind: str, shared: float) -> None:
    """Heavy tails and skewed differences of an unbounded measure, also of documents that share sources."""
    times, n, dice, covered = 2000, 1000, np.random.default_rng(1), 0
    for _ in range(times):
        clusters, values = small_sources(n, dice), TAILS[kind](n, dice)
        if shared:
            values = values + shared * TAILS[kind](int(clusters.max()) + 1, dice)[clusters]
        low, high = interval(alone(values, clusters if shared else None, BITS).adjusted)
        covered += low <= 0 <= high
    least = 0.92 if kind in ("exponential", "lognormal") else 0.95 - 0.007 - allowed(0.05, times) / 2
    assert least <= covered / times <= 0.957 + allowed(0.05, times) / 2


@pytest.mark.simulation
@pytest.mark.parametrize(("differing", "deviation"), [(0.5, 0.3), (1.0, 0.08)])
def test_graded_scores(differing: float, deviation: float) -> None:
    """F1 of which half differ, ROUGE-L of which all differ by little; 200 documents, no difference."""
    measure, times = Measure("score", True), 400

    def draw(dice: np.random.Generator) -> list[ScoredLine]:
        values = np.where(dice.random(200) < differing, dice.normal(0, deviation, 200), 0.0)
        return [alone(values, measure=measure)]

    found, covered = rates(draw, 0.0, times)
    assert covered >= 0.95 - allowed(0.05, times) and found <= 0.05 + allowed(0.05, times)


SHARES = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.2, 0.2, 0.6), (0.75, 0.05, 0.2), (0.05, 0.75, 0.2), (0.5, 0.5, 0.0)]
"""Of A's seeds, B's seeds and the documents in the variance of the difference."""
RUNS = [(2, 10), (2, 5), (3, 3), (1, 3), (5, 1)]


def drawn_parts(runs: tuple[int, int], shares: tuple[float, ...], dice: np.random.Generator) -> Spread:
    """Parts as they are estimated where scores are normal; 1,000 documents. A single run has no share."""
    seeds = [share * float(dice.chisquare(count - 1)) / (count - 1) if count > 1 else 0.0
             for share, count in zip(shares, runs, strict=False)]  # fmt: skip
    return Spread(*seeds, shares[2] * float(dice.chisquare(999)) / 999, 0.0, *runs)


@pytest.mark.simulation
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("runs", RUNS)
def test_no_share_of_the_parts_makes_the_test_reject_too_often(
    runs: tuple[int, int], shares: tuple[float, ...]
) -> None:
    """Satterthwaite's degrees of freedom reject 13 % with two runs a side, 8 % with three, in the worst of these."""
    dice, times, found = np.random.default_rng(1), 2000, 0
    deviation = sum(share for share, count in zip(shares, (*runs, 2), strict=True) if count > 1) ** 0.5
    for _ in range(times):
        parts = drawn_parts(runs, shares, dice)
        low, high = interval(crossed(Estimate(deviation * float(dice.normal()), parts.documents, 999.0), parts))
        found += not low <= 0 <= high
    assert found / times <= 0.05 + allowed(0.05, times)


@pytest.mark.simulation
@pytest.mark.parametrize("runs", [(2, 10), (3, 3), (5, 5), (1, 5)])
def test_power_is_that_of_the_t_with_the_same_interval(runs: tuple[int, int]) -> None:
    dice, times, found = np.random.default_rng(2), 1000, 0
    seeds = (0.2 if count > 1 else 0.0 for count in runs)
    error = crossed(Estimate(0.0, 0.6, 999.0), Spread(*seeds, 0.6, 0.0, *runs))
    difference = t_detectable(error.stderr, error.freedom, math.inf) or 0.0
    for _ in range(times):
        parts = drawn_parts(runs, (0.2, 0.2, 0.6), dice)
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
    shift: float = 0.0
    """B's on the latent scale."""

    def gain(self) -> float:
        """B's expected accuracy less A's, over seeds and documents."""
        deviation = self.deviations[1] if self.runs[1] > 1 else 0.0
        return float(stats.norm.cdf(self.shift / np.sqrt(1.5**2 + 0.5**2 + 0.7**2 + deviation**2))) - 0.5

    def draw(self, dice: np.random.Generator) -> list[ScoredLine]:
        shifts = [(deviation if count > 1 else 0.0) * dice.normal(size=(count, 1))
                  for count, deviation in zip(self.runs, self.deviations, strict=True)]  # fmt: skip
        shifts[1] += self.shift
        lines = []
        for n in self.tasks:
            difficulty = dice.normal(0, 1.5, n)
            latent = (
                difficulty + dice.normal(0, 0.5, n) + shift + dice.normal(0, 0.7, (len(shift), n)) for shift in shifts
            )
            a, b = ((scores > 0).astype(float) for scores in latent)
            lines.append(line(a, b))
        return lines


@pytest.mark.simulation
@pytest.mark.parametrize("world", [
    World((2, 10), (0.4, 0.05)), World((5, 2), (0.05, 0.4)), World((3, 3), (0.1, 0.1), (200, 100)),
    World((1, 3), (0.0, 0.4)), World((1, 5), (0.0, 0.4)), World((3, 10), (0.1, 0.1), (300, 200, 400), 0.4),
])  # fmt: skip
def test_right_answers_of_crossed_runs_and_documents(world: World) -> None:
    times = 600
    found, covered = rates(world.draw, world.gain(), times)
    assert covered >= 0.95 - allowed(0.05, times) / 2
    assert found > 0.05 if world.shift else found <= 0.05 + allowed(0.05, times) / 2


@pytest.mark.simulation
@pytest.mark.parametrize(("seeds", "documents", "level"), [(3, 60, 0.05), (5, 60, 0.05 / 3), (8, 200, 0.05)])
def test_the_planned_difference_is_found_with_a_power_of_80_percent(seeds: int, documents: int, level: float) -> None:
    between, difference, interaction = 0.3, 1.0, 1.0
    own, shared = (between**2 + interaction**2 / documents) / seeds, 2 * interaction**2 / documents / seeds
    parts = Spread(own, own, difference**2 / documents + shared, shared, seeds, seeds)
    effect, dice, times, found = (
        seeds_detectable(parts, seeds, level=level) or 0.0,
        np.random.default_rng(seeds),
        1000,
        0,
    )
    for _ in range(times):
        shape = (seeds, documents)
        a, b = (dice.normal(0, between, (seeds, 1)) + dice.normal(0, interaction, shape) for _ in range(2))
        b = b + effect + dice.normal(0, difference, documents)
        found += crossed_p_value(mean(b.mean(axis=0) - a.mean(axis=0)), spread(a, b)) < level
    # The t of the same interval is an approximation, within 5 points here
    assert 0.75 <= found / times <= 0.87
