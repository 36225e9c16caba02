"""Error rates, coverage and power on simulated scores: a test at 5 % rejects 5 %, an interval at 95 % covers 95 %.

Exact tests of whole numbers may reject less than 5 %, since p values come in steps. Rates are allowed four standard
errors of the simulation. Skewed differences and clusters that are ignored show that the simulations have power.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

from evalkit.benchmarks.outcomes import Measure
from evalkit.comparison.line import ScoredLine, average_difference, by_task, efficiency
from evalkit.comparison.pairing import PairedTask, pair
from evalkit.comparison.planning import OutcomePlan
from evalkit.comparison.sides import Side
from evalkit.runs.continuous import OUTCOMES
from evalkit.runs.folder import load_run
from evalkit.runs.scales import CORRECT
from evalkit.stats.estimates import Codes, Estimate, Floats, interval, mean
from evalkit.stats.power import mcnemar_power, seeds_detectable, sign_flip_detectable, t_detectable, t_power
from evalkit.stats.significance import Spread, crossed, crossed_p_value, holm, sign_flip, spread

SAMPLES = Path(__file__).parents[2] / "results" / "samples"
Dice = np.random.Generator
Draw = Callable[[Dice], Sequence[ScoredLine]]
RIGHT = Measure(CORRECT, "right", False)
BITS = Measure(OUTCOMES["bits_per_byte"].scale, "bits per byte", True)


def allowed(rate: float, times: int) -> float:
    """Four standard errors of a simulated rate."""
    return 4 * math.sqrt(rate * (1 - rate) / times)


def line(
    a: Floats, b: Floats, clusters: Codes | None = None, strata: Codes | None = None, measure: Measure = RIGHT
) -> ScoredLine:
    """A line of a comparison, of [runs, n] scores."""
    return ScoredLine(PairedTask("t", clusters, strata, (np.arange(a.shape[1]),) * 2, 0, True), a, b, measure)


def alone(differences: Floats, clusters: Codes | None = None, measure: Measure = RIGHT) -> ScoredLine:
    return line(np.zeros((1, len(differences))), differences[None], clusters, measure=measure)


def toss(n: int, discordant: float, difference: float, lean: float | Floats, dice: Dice) -> Floats:
    drawn = dice.random(n)
    return np.where(drawn < (discordant + difference) / 2 + lean, 1.0, np.where(drawn < discordant, -1.0, 0.0))


def independent(n: int, difference: float, dice: Dice) -> ScoredLine:
    return alone(toss(n, 0.3, difference, 0.0, dice))


def small_sources(n: int, dice: Dice) -> Codes:
    """[n] sources of one to six documents."""
    return np.repeat(np.arange(n), dice.integers(1, 7, n))[:n]


def clustered(n: int, difference: float, dice: Dice, ignored: bool = False) -> ScoredLine:
    """Documents whose differences lean the same way within a source, to either side alike."""
    clusters = small_sources(n, dice)
    lean = dice.choice([-0.1, 0.1], clusters.max() + 1)[clusters]
    return alone(toss(n, 0.3, difference, lean, dice), None if ignored else clusters)


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


def leaning(name: str, lean: float, difference: float, dice: Dice) -> ScoredLine:
    clusters = SOURCES[name]
    leans = dice.choice([-lean, lean], clusters.max() + 1)[clusters]
    return alone(toss(len(clusters), 0.4, difference, leans, dice), clusters)


def subjects(dice: Dice) -> ScoredLine:
    """Four subjects, each with Zipf's sources, of unlike difficulty."""
    clusters = np.concatenate([zipf(75, 15) + 15 * subject for subject in range(4)])
    strata = np.repeat(np.arange(4), 75)
    values = toss(300, 0.4, 0.0, dice.choice([-0.05, 0.05], 60)[clusters], dice)
    offsets = np.array([-0.15, -0.05, 0.05, 0.15])[strata]
    return line(np.zeros((1, 300)), (values + offsets)[None], clusters, strata)


def graded(differing: float, deviation: float, dice: Dice) -> ScoredLine:
    """200 graded scores, of which a share differs."""
    values = np.where(dice.random(200) < differing, dice.normal(0, deviation, 200), 0.0)
    return alone(values, measure=Measure(CORRECT, "score", True))


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

    def draw(self, dice: Dice) -> list[ScoredLine]:
        shifts = [(deviation if count > 1 else 0.0) * dice.normal(size=(count, 1))
                  for count, deviation in zip(self.runs, self.deviations, strict=True)]  # fmt: skip
        shifts[1] += self.shift
        lines = []
        for n in self.tasks:
            common = dice.normal(0, 1.5, n)
            a, b = (
                (common + dice.normal(0, 0.5, n) + shift + dice.normal(0, 0.7, (len(shift), n)) > 0).astype(float)
                for shift in shifts
            )
            lines.append(line(a, b))
        return lines


def rates(draw: Draw, difference: float, times: int) -> tuple[float, float]:
    """Return the rate of p at most 5 %, and that of intervals with the true difference, of the average over lines."""
    dice, rejected, covered = np.random.default_rng(times), 0, 0
    for _ in range(times):
        average = average_difference("average", draw(dice))
        rejected += average.p is not None and average.p <= 0.05
        covered += average.low <= difference <= average.high
    return rejected / times, covered / times


@pytest.mark.parametrize("times", [300, pytest.param(4000, marks=pytest.mark.simulation)])
def test_size_is_that_of_the_exact_test(times: int) -> None:
    """A sample of this file runs by default."""
    exact = mcnemar_power(200, 0.3, 0.0)
    rejected, covered = rates(lambda dice: [independent(200, 0.0, dice)], 0.0, times)
    assert exact <= 0.05 and rejected == pytest.approx(exact, abs=allowed(exact, times))
    assert covered >= 0.95 - allowed(0.05, times)


class Study(NamedTuple):
    """What is drawn how often; the test rejects at most 5 % without a difference, and intervals cover 95 %."""

    draw: Draw
    difference: float = 0.0
    times: int = 800


STUDIES = {
    f"{kind.__name__}, {n} documents, {difference}": Study(
        lambda dice, kind=kind, n=n, difference=difference: [kind(n, difference, dice)], difference, 1500
    )
    for kind in (independent, clustered)
    for n, difference in ((100, 0.0), (1000, 0.0), (1000, 0.08), (100, 0.08))
}
# Liang and Zeger's error with G - 1 degrees of freedom finds something in 9 to 17 %, Satterthwaite's in 20 %
STUDIES |= {
    f"sources of unequal size: {', '.join(names)}, effect {lean}": Study(
        lambda dice, names=names, lean=lean: [leaning(name, lean, 0.0, dice) for name in names]
    )
    for names in (("zipf",), ("zipf",) * 3, ("giant", "zipf", "equal", "equal"), ("giant",) * 3,
                  ("zipf of 150",) * 2, ("three", *("zipf",) * 7))
    for lean in (0.0, 0.05, 0.2)
}  # fmt: skip
STUDIES |= {
    f"average of {len(sizes)} tasks, {difference}": Study(
        lambda dice, sizes=sizes, difference=difference: [independent(n, difference, dice) for n in sizes],
        difference,
    )
    for sizes, difference in (((500, 1267, 300, 800, 100, 250, 400, 600), 0.0), ((10,) * 57, 0.0), ((10,) * 57, 0.25))
}
STUDIES |= {
    "subjects": Study(lambda dice: [subjects(dice)]),
    "F1, of which half differ": Study(lambda dice: [graded(0.5, 0.3, dice)]),
    "ROUGE-L, of which all differ by little": Study(lambda dice: [graded(1.0, 0.08, dice)]),
}
STUDIES |= {
    str(world): Study(world.draw, world.gain())
    for world in (World((2, 10), (0.4, 0.05)), World((5, 2), (0.05, 0.4)), World((3, 3), (0.1, 0.1), (200, 100)),
                  World((1, 3), (0.0, 0.4)), World((1, 5), (0.0, 0.4)),
                  World((3, 10), (0.1, 0.1), (300, 200, 400), 0.4))
}  # fmt: skip


@pytest.mark.simulation
@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_size_and_coverage(study: Study) -> None:
    rejected, covered = rates(study.draw, study.difference, study.times)
    # Intervals are extended to zero where the exact test shows nothing, so they may cover more
    assert covered >= 0.945 - allowed(0.05, study.times) / 2
    if study.difference:
        assert rejected > 0.05
    else:
        assert rejected <= 0.055 + allowed(0.05, study.times) / 2


@pytest.mark.simulation
def test_clusters_that_are_ignored_find_differences_that_are_not_there() -> None:
    dice = np.random.default_rng(1000)
    ps = [clustered(1000, 0.0, dice, ignored=True).p for _ in range(1000)]
    assert np.mean(np.array(ps, float) <= 0.05) > 0.08


@pytest.mark.simulation
@pytest.mark.parametrize(("kind", "n", "difference"), [
    (independent, 100, 0.15), (independent, 1000, 0.05), (independent, 5000, 0.02), (clustered, 500, 0.08),
    (clustered, 1000, 0.06), (clustered, 3000, 0.03),
])  # fmt: skip
def test_power(kind: Callable[..., ScoredLine], n: int, difference: float) -> None:
    """That of the exact test; of documents that share sources, of the noncentral t with the error of many draws."""
    dice = np.random.default_rng(n)
    lines = [kind(n, difference, dice) for _ in range(2000)]
    reference, steps = mcnemar_power(n, 0.3, difference), 0.03
    if kind is clustered:  # the steps of its exact test cost up to four points, which the t does not know
        reference, steps = t_power(difference / float(np.std([each.documents.value for each in lines])), n / 3.5), 0.045
    assert np.mean([(each.p or 0) <= 0.05 for each in lines]) == pytest.approx(reference, abs=steps)


@pytest.mark.simulation
@pytest.mark.parametrize("name", ["equal", "zipf", "giant"])
def test_the_standard_error_is_right_on_average_and_sign_flips_hold(name: str) -> None:
    dice, times = np.random.default_rng(3), 1500
    lines = [leaning(name, 0.1, 0.0, dice) for _ in range(times)]
    deviation = np.std([each.documents.value for each in lines])
    assert np.sqrt(np.mean([each.documents.variance for each in lines])) == pytest.approx(deviation, rel=0.06)
    rejected = np.mean([sign_flip(each.sums) <= 0.05 for each in lines])
    assert 0.03 <= rejected <= 0.05 + allowed(0.05, times) / 2


@pytest.mark.simulation
@pytest.mark.parametrize("name", ["equal", "zipf", "large"])
def test_what_sign_flips_can_show(name: str) -> None:
    dice = np.random.default_rng(6)
    lines = [leaning(name, 0.05, 0.0, dice) for _ in range(100)]
    smallest = [sign_flip_detectable(each.sums, each.weights, each.documents.stderr) or 1.0 for each in lines]
    difference = float(np.median(smallest))
    power = np.mean([sign_flip(leaning(name, 0.05, difference, dice).sums) <= 0.05 for _ in range(500)])
    assert power == pytest.approx(0.8, abs=0.1)


TAILS: dict[str, Callable[[int, Dice], Floats]] = {
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


# Several runs of a side

SHARES = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.2, 0.2, 0.6), (0.75, 0.05, 0.2), (0.05, 0.75, 0.2), (0.5, 0.5, 0.0)]
"""Of A's seeds, B's seeds and the documents in the variance of the difference."""


def rejections(
    runs: tuple[int, int], shares: tuple[float, ...], difference: float, deviation: float, times: int
) -> float:
    """How often an interval lies beside zero, where scores are normal; 1,000 documents. A single run has no share."""
    dice, count = np.random.default_rng(1), 0
    for _ in range(times):
        seeds = [share * float(dice.chisquare(n - 1)) / (n - 1) if n > 1 else 0.0
                 for share, n in zip(shares, runs, strict=False)]  # fmt: skip
        parts = Spread(*seeds, shares[2] * float(dice.chisquare(999)) / 999, 0.0, *runs)
        value = difference + deviation * float(dice.normal())
        low, high = interval(crossed(Estimate(value, parts.documents, 999.0), parts))
        count += not low <= 0 <= high
    return count / times


@pytest.mark.simulation
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("runs", [(2, 10), (2, 5), (3, 3), (1, 3), (5, 1)])
def test_no_share_of_the_parts_makes_the_test_reject_too_often(
    runs: tuple[int, int], shares: tuple[float, ...]
) -> None:
    """Satterthwaite's degrees of freedom reject 13 % with two runs a side, 8 % with three, in the worst of these."""
    deviation = sum(share for share, n in zip(shares, (*runs, 2), strict=True) if n > 1) ** 0.5
    assert rejections(runs, shares, 0.0, deviation, 2000) <= 0.05 + allowed(0.05, 2000)


@pytest.mark.simulation
@pytest.mark.parametrize("runs", [(2, 10), (3, 3), (5, 5), (1, 5)])
def test_power_is_that_of_the_t_with_the_same_interval(runs: tuple[int, int]) -> None:
    seeds = (0.2 if count > 1 else 0.0 for count in runs)
    error = crossed(Estimate(0.0, 0.6, 999.0), Spread(*seeds, 0.6, 0.0, *runs))
    difference = t_detectable(error.stderr, error.freedom, math.inf) or 0.0
    power = rejections(runs, (0.2, 0.2, 0.6), difference, error.stderr, 1000)
    assert 0.8 - allowed(0.8, 1000) <= power <= 0.83 + allowed(0.8, 1000)


@pytest.mark.simulation
@pytest.mark.parametrize(("seeds", "documents", "level"), [(3, 60, 0.05), (5, 60, 0.05 / 3), (8, 200, 0.05)])
def test_the_planned_difference_is_found_with_a_power_of_80_percent(seeds: int, documents: int, level: float) -> None:
    own, shared = (0.3**2 + 1 / documents) / seeds, 2 / documents / seeds
    parts = Spread(own, own, 1 / documents + shared, shared, seeds, seeds)
    effect, dice, count = seeds_detectable(parts, seeds, level=level) or 0.0, np.random.default_rng(seeds), 0
    for _ in range(1000):
        a, b = (dice.normal(0, 0.3, (seeds, 1)) + dice.normal(0, 1.0, (seeds, documents)) for _ in range(2))
        b = b + effect + dice.normal(0, 1.0, documents)
        count += crossed_p_value(mean(b.mean(axis=0) - a.mean(axis=0)), spread(a, b)) < level
    # The t of the same interval is an approximation, within 5 points here
    assert 0.75 <= count / 1000 <= 0.87


# Plans of numbers of documents and seeds: the planned comparison finds the expected difference in 80 %


def steep(n: int, difference: float, dice: Dice) -> ScoredLine:
    """Bits per byte, whose differences have heavy tails."""
    return alone(dice.laplace(difference, 1.0, n), measure=BITS)


def detected(draw: Callable[[int], Sequence[ScoredLine]], documents: int, times: int) -> tuple[float, float]:
    """Return the rates at which the average, at 5 %, and the first task, after Holm's correction, are significant."""
    average, alone = 0, 0
    for _ in range(times):
        lines = draw(documents)
        ps = [1.0 if each.p is None else each.p for each in lines]
        average += (average_difference("average", lines).p or 0.0) <= 0.05
        alone += holm(ps)[0] <= 0.05
    return average / times, alone / times


@pytest.mark.parametrize(("kind", "difference", "times"), [
    (independent, 0.1, 200),
    *(pytest.param(*study, marks=pytest.mark.simulation)
      for study in ((independent, 0.1, 2000), (independent, 0.03, 1000), (steep, 0.3, 1000))),
])  # fmt: skip
def test_the_planned_documents_find_the_difference(
    kind: Callable[..., ScoredLine], difference: float, times: int
) -> None:
    """Of three tasks: all of them have the difference, or the first one alone has it; 30 % are discordant."""
    dice, tasks = np.random.default_rng(times), 3
    pilot = [kind(20_000, 0.0, dice) for _ in range(tasks)]
    plan = OutcomePlan("", pilot, [10**5] * tasks, difference)
    on_average, of_one = (plan.fewest(of, seeds=1) or 0 for of in (0, 1))
    assert 2 * on_average < of_one
    power, _ = detected(lambda n: [kind(n, difference, dice) for _ in range(tasks)], on_average, times)
    assert power == pytest.approx(0.8, abs=allowed(0.8, times) + 0.02)
    others = [0.0] * (tasks - 1)
    _, power = detected(lambda n: [kind(n, of, dice) for of in (difference, *others)], of_one, times)
    assert power == pytest.approx(0.8, abs=allowed(0.8, times) + 0.02)


@pytest.mark.simulation
def test_the_planned_documents_find_a_real_difference() -> None:
    """The sample runs' bits per byte on two tasks, drawn with replacement, moved to an expected difference."""
    inst, plain = (load_run(next(SAMPLES.glob(f"demo-zeroshot8-{template}-*"))) for template in ("inst", "plain"))
    pairing = pair(Side("inst", (inst,)), Side("plain", (plain,)), {})
    pilot = [each for each in by_task(pairing, "bits_per_byte") if each.paired.task in ("arc_easy", "hellaswag")]
    plan = OutcomePlan("", pilot, [10**5] * 2, 0.05)
    dice, times = np.random.default_rng(2), 1000

    def drawn(n: int) -> list[ScoredLine]:
        shifted = (each.differences - each.differences.mean() + plan.expected for each in pilot)
        return [alone(dice.choice(values, n), measure=BITS) for values in shifted]

    power, _ = detected(drawn, plan.fewest(0, seeds=1) or 0, times)
    # The plan is of t alone: with few documents the skewness of real differences costs up to ten points
    assert 0.7 - allowed(0.7, times) <= power <= 0.8 + allowed(0.8, times)


def seeded(seeds: int, documents: int, effect: float, dice: Dice) -> ScoredLine:
    """Two sides of so many runs: seeds differ with a deviation of 0.3, documents' differences with one of 1."""
    a, b = (dice.normal(0, 0.3, (seeds, 1)) + dice.normal(0, 1.0, (seeds, documents)) for _ in range(2))
    return line(a, b + effect + dice.normal(0, 1.0, documents), measure=BITS)


@pytest.mark.simulation
@pytest.mark.parametrize("effect", [0.7, 0.4])
def test_the_planned_seeds_find_the_difference(effect: float) -> None:
    """Of two tasks, from a pilot of 40 seeds, so that the plan's variances are nearly true."""
    dice, documents, times = np.random.default_rng(4), 200, 1000
    plan = OutcomePlan("", [seeded(40, documents, 0.0, dice) for _ in range(2)], [documents] * 2, effect)
    seeds = plan.fewest(0, documents=documents) or 0
    smallest = plan.smallest(documents, seeds, 0)
    assert smallest <= effect < plan.smallest(documents, seeds - 1, 0)
    power, _ = detected(lambda n: [seeded(seeds, n, smallest, dice) for _ in range(2)], documents, times)
    # The t of the same interval is an approximation, within 5 points here
    assert 0.75 <= power <= 0.87


# How many times fewer documents a continuous outcome needs


def seen_coarsely_and_finely(n: int, shift: float, dice: Dice) -> tuple[Floats, Floats]:
    """Right or wrong, and a value that leads to it: the same ability."""
    value = dice.normal(shift, 1.0, n)
    return np.where(value > 1.0, 1.0, np.where(value < -1.0, -1.0, 0.0)), value


def expected_ratio(shift: float) -> float:
    """Squared ratio of signal to noise of both, from the normal distribution."""
    up, down = stats.norm.sf(1 - shift), stats.norm.cdf(-1 - shift)
    return float(shift**2 / ((up - down) ** 2 / (up + down - (up - down) ** 2)))


def test_the_ratio_is_that_of_squared_signal_to_noise() -> None:
    dice = np.random.default_rng(1)
    right, value = seen_coarsely_and_finely(200_000, 0.2, dice)
    times, low, high = efficiency([alone(right)], [alone(value, measure=BITS)]) or (0.0, 0.0, 0.0)
    fine, coarse = (abs(stats.ttest_1samp(scores, 0).statistic) for scores in (value, right))
    assert times == pytest.approx((fine / coarse) ** 2) == pytest.approx(expected_ratio(0.2), rel=0.05)
    assert low < times < high
    # Without a difference every ratio is possible; where accuracy shows nothing there is a lower bound only
    right, value = right[:400], value[:400] - value[:400].mean()
    even = alone(right - right.mean(), measure=BITS)
    none = efficiency([even], [alone(value + 1e-6, measure=BITS)])
    assert none is not None and none[1:] == (0.0, math.inf)
    assert efficiency([alone(np.zeros(50))], [alone(value[:50], measure=BITS)]) is None
    noisy = np.where(dice.random(400) < 0.3, right, dice.choice([-1.0, 1.0], 400))
    bound = efficiency([alone(noisy)], [alone(value + 0.3, measure=BITS)])
    assert bound is not None and bound[1] > 1 and bound[2] == math.inf


@pytest.mark.simulation
@pytest.mark.parametrize(("n", "doubled"), [(300, False), (300, True), (1500, False)])
def test_intervals_contain_the_ratio(n: int, doubled: bool) -> None:
    """95 % of them, of two tasks, whatever they say. Four standard errors of 1,000 simulations are 2.8 points."""
    dice, truth, inside, known = np.random.default_rng(n), expected_ratio(0.25), 0, 0
    clusters = np.repeat(np.arange(n // 2), 2) if doubled else None
    for _ in range(1000):
        pairs = [seen_coarsely_and_finely(n, 0.25, dice) for _ in range(2)]
        if doubled:  # both documents of a source are the same, which halves what they say of either outcome
            pairs = [(np.repeat(right[::2], 2), np.repeat(value[::2], 2)) for right, value in pairs]
        coarse, fine = ([alone(pair[side], clusters, measure) for pair in pairs]
                        for side, measure in ((0, RIGHT), (1, BITS)))  # fmt: skip
        if (ratio := efficiency(coarse, fine)) is not None:
            known += 1
            inside += ratio[1] <= truth <= ratio[2]
    assert known == 1000 and inside / known == pytest.approx(0.95, abs=0.028)
