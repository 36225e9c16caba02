"""Error rates and coverage where a comparison is looked at more than once, and what an early end saves.

Real differences are those of the sample runs' two prompts of one checkpoint on all documents, drawn anew for each
replication; a true difference is planted by drawing documents of one side more often. An interval that holds at all
looks together holds under every rule for stopping, so rates are of a miss at any look. Rates may exceed their level by
three standard errors of the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq

from evalkit.comparison.differences import BETTER, EQUIVALENT, UNDECIDED, WORSE, AverageDifference
from evalkit.comparison.line import ScoredLine, average_difference, by_task
from evalkit.comparison.pairing import PairedTask, pair
from evalkit.comparison.sides import Side
from evalkit.runs.folder import load_run
from evalkit.stats.estimates import Floats
from evalkit.stats.sequential import ONCE, Look, Looks, planned_levels
from evalkit.studies.deciding import level_of, samples, verdict_on
from tests.stats.test_simulation import RIGHT
from tests.stats.test_verdicts import LIKELIHOODS, TIMES, most

SAMPLES = Path(__file__).parents[2] / "results" / "samples"
TASKS = ("winogrande", "arc_challenge", "piqa", "openbookqa")
DOUBLING = (50, 100, 200, 400, 800, 1600, 3200)
FOUR = (100, 200, 400, 800)
Dice = np.random.Generator
Draw = Callable[[Dice], list[Floats]]


def real_differences(outcome: str) -> dict[str, list[Floats]]:
    """Task → the differences of each source's documents."""
    inst, plain = (load_run(next(SAMPLES.glob(f"demo-zeroshot8-{name}-*"))) for name in ("inst", "plain"))
    by_source = {}
    for line in by_task(pair(Side("inst", (inst,)), Side("plain", (plain,)), {}), outcome):
        if (name := line.paired.task) in TASKS:
            clusters = line.paired.clusters
            codes = np.arange(line.paired.n) if clusters is None else np.unique(clusters, return_inverse=True)[1]
            order = np.argsort(codes, kind="stable")
            ends = np.flatnonzero(np.diff(codes[order])) + 1
            by_source[name] = np.split(line.differences[order], ends)
    return by_source


class World:
    """Real differences whose average has a planted value."""

    def __init__(self, outcome: str, target: float = 0.0) -> None:
        self.measure = RIGHT if outcome == "acc" else LIKELIHOODS
        self.sources = [*real_differences(outcome).values()]
        sums = [np.array([source.sum() for source in task]) for task in self.sources]
        sizes = [np.array([len(source) for source in task]) for task in self.sources]
        unit = max(float(np.abs(of_task).max()) for of_task in sums)

        def weights(tilt: float) -> list[Floats]:
            tilted = [np.exp(np.clip(tilt * of_task / unit, -50, 50)) for of_task in sums]
            return [each / each.sum() for each in tilted]

        def average(tilt: float) -> float:
            drawn = zip(weights(tilt), sums, sizes, strict=True)
            return float(np.mean([(p * total).sum() / (p * size).sum() for p, total, size in drawn]))

        self.weights = weights(brentq(lambda tilt: average(tilt) - target, -30, 30))
        self.truth = target

    def documents(self, dice: Dice) -> list[tuple[Floats, Floats]]:
        """Draw each task's differences and their sources, as many documents as it has."""
        drawn = []
        for task, weights in zip(self.sources, self.weights, strict=True):
            count = len(task)
            chosen = [task[number] for number in dice.choice(count, count, p=weights)]
            codes = np.repeat(np.arange(count), list(map(len, chosen)))
            drawn.append((np.concatenate(chosen), codes))
        return drawn

    @property
    def sizes(self) -> list[int]:
        return [sum(map(len, task)) for task in self.sources]

    def looks(self, at: Sequence[int], dice: Dice, looks: Looks = ONCE) -> Iterator[list[ScoredLine]]:
        """Yield the lines at nested samples."""
        tasks = self.documents(dice)
        for n in at:
            lines = []
            for values, codes in tasks:
                some, of = values[:n], codes[:n]
                clusters = of if of[-1] + 1 < len(of) else None
                paired = PairedTask("t", clusters, None, (np.arange(len(some)),) * 2, 0, True, len(values))
                lines.append(ScoredLine(paired, np.zeros((1, len(some))), some[None], self.measure, looks=looks))
            yield lines

    def error(self) -> float:
        """Standard error of the average over all documents."""
        dice = np.random.default_rng(0)
        errors = [average_difference("", lines).stderr or 0 for _ in range(20) for lines in self.looks([10**6], dice)]
        return float(np.mean(errors))


def planted(outcome: str, difference: float) -> tuple[World, float]:
    """A world with a true difference of so many of its standard errors, and its standard error."""
    error = World(outcome).error()
    for _ in range(5):  # which depends on the difference
        error = World(outcome, difference * error).error()
    return World(outcome, difference * error), error


def decided(world: World, at: Sequence[int], margin: float, dice: Dice) -> tuple[str, int]:
    """The verdict of `evalkit decide`, and the documents of a task at which it ended."""
    for number, (n, lines) in enumerate(zip(at, world.looks(at, dice), strict=True)):
        level = level_of(world.sizes, at, number, lines)
        verdict = verdict_on(average_difference("Average", lines, level), margin, 1)
        if verdict != UNDECIDED:
            return verdict, n
    return verdict, at[-1]


def misses_planned(looks: Iterator[list[ScoredLine]], sizes: Sequence[int], at: Sequence[int], truth: float) -> bool:
    """Whether the interval of any planned look misses."""
    levels = ((lines, level_of(sizes, at, number, lines)) for number, lines in enumerate(looks))
    return not all(covers(average_difference("", lines, level), truth) for lines, level in levels)


def covers(average: AverageDifference, truth: float) -> bool:
    return average.low <= truth <= average.high


# Levels


def test_planned_levels_equal_the_integral_of_a_normal_distribution() -> None:
    """The error that is spent until each look, by scipy's multivariate normal probabilities, to 1e-5."""
    times = np.array([0.2, 0.3, 0.7, 1.0])
    limits = stats.norm.isf(np.array(planned_levels(8 * times, 0.05)) / 2)
    covariance = np.sqrt(np.minimum.outer(times, times) / np.maximum.outer(times, times))
    for count in range(1, 5):
        part = stats.multivariate_normal(cov=covariance[:count, :count], abseps=1e-8, maxpts=2_000_000, seed=1)
        inside = part.cdf(limits[:count], lower_limit=-limits[:count])
        assert 1 - inside == pytest.approx(0.05 * times[count - 1], abs=1e-5)


def test_one_planned_look_has_the_whole_level() -> None:
    assert planned_levels([3.0], 0.05) == pytest.approx([0.05])
    assert Look(ONCE, 1.0).level(0.05) == 0.05
    assert Look(ONCE, 1.0).p(0.03) == 0.03


@pytest.mark.parametrize("growth", [0.2, 1.0, 8.0, 70.0])
def test_p_is_the_level_whose_interval_ends_at_the_hypothesis(growth: float) -> None:
    look = Look(Looks(anytime=True, checkpoints=3), growth)
    for level in (0.05, 0.001):
        assert look.p(look.level(level)) == pytest.approx(level)
    assert look.p(1.0) == 1.0
    assert look.p(0.0) == 0.0


def test_a_random_walk_leaves_the_confidence_sequence_in_less_than_five_percent() -> None:
    """A path of normal draws that is looked at 400 times; it may leave in 5 % only if it were infinite."""
    dice, looks = np.random.default_rng(0), Looks(anytime=True)
    times = np.geomspace(0.02, 400, 400)
    limits = [stats.norm.isf(Look(looks, growth).level(0.05) / 2) for growth in times]
    steps = np.sqrt(np.diff(times, prepend=0.0)) * dice.standard_normal((4000, 400))
    left = (np.abs(np.cumsum(steps, axis=1) / np.sqrt(times)) > limits).any(axis=1)
    assert 0.02 < left.mean() <= most(0.05, 4000)


def test_samples_grow_to_the_largest() -> None:
    assert samples([500, 3270], 800) == [200, 283, 400, 566, 800]
    assert samples([500, 3270], None)[-1] == 3270
    assert samples([60, 40], None) == [60]
    assert samples([500], 20) == [20]


# Error rates


@pytest.fixture(scope="module", params=["acc", "bits_per_byte"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def missed_anytime(world: World, at: Sequence[int], times: int) -> float:
    dice, missed = np.random.default_rng(len(at)), 0
    for _ in range(times):
        averages = (average_difference("", lines) for lines in world.looks(at, dice, Looks(anytime=True)))
        missed += not all(covers(average, world.truth) for average in averages)
    return missed / times


def test_a_few_replications(world: World) -> None:
    """A sample of this file runs by default."""
    assert missed_anytime(world, FOUR, 50) <= most(0.05, 50)


@pytest.mark.simulation
@pytest.mark.parametrize("at", [FOUR, DOUBLING, tuple(range(50, 1000, 50))], ids=["four", "doubling", "every 50"])
def test_anytime_intervals_hold_at_all_looks(world: World, at: Sequence[int]) -> None:
    assert missed_anytime(world, at, TIMES) <= most(0.05, TIMES)


@pytest.mark.simulation
def test_planned_looks_hold_together(world: World) -> None:
    """Each with its interval; so the first verdict errs in 5 %, and the interval at the end covers in 95 %."""
    at, dice = samples(world.sizes, None), np.random.default_rng(3)
    missed = sum(misses_planned(world.looks(at, dice), world.sizes, at, world.truth) for _ in range(TIMES))
    assert missed / TIMES <= most(0.05, TIMES)


@pytest.mark.simulation
@pytest.mark.parametrize("deviations", [(0.2, 1.0), (1.0, 0.2), (0.01, 1.0)])
def test_planned_looks_hold_where_tasks_vary_unlike(deviations: tuple[float, float]) -> None:
    """A task of 500 documents beside one of 5,000, as OpenBookQA beside MMLU."""
    sizes, dice, missed = [500, 5000], np.random.default_rng(8), 0
    at = samples(sizes, None)

    def looks(tasks: list[Floats]) -> Iterator[list[ScoredLine]]:
        for n in at:
            parts = [values[:n] for values in tasks]
            paired = [PairedTask("t", None, None, (np.arange(len(part)),) * 2, 0, True) for part in parts]
            yield [ScoredLine(task, np.zeros((1, task.n)), part[None], LIKELIHOODS)
                   for task, part in zip(paired, parts, strict=True)]  # fmt: skip

    for _ in range(TIMES):
        drawn = [dice.normal(0, deviation, size) for size, deviation in zip(sizes, deviations, strict=True)]
        missed += misses_planned(looks(drawn), sizes, at, 0.0)
    assert missed / TIMES <= most(0.05, TIMES)


@pytest.mark.simulation
@pytest.mark.parametrize("outcome", ["acc", "bits_per_byte"])
def test_a_true_difference_of_the_margin_is_rarely_called_equivalent(outcome: str) -> None:
    """Two one-sided tests at 2.5 %; a wrong direction is an error, too."""
    world, error = planted(outcome, 4)
    dice = np.random.default_rng(4)
    at = samples(world.sizes, None)
    verdicts = [decided(world, at, 4 * error, dice)[0] for _ in range(TIMES)]
    wrong = sum(verdict in (EQUIVALENT, WORSE) for verdict in verdicts) / len(verdicts)
    assert wrong <= most(0.025, len(verdicts))


@pytest.mark.simulation
@pytest.mark.parametrize("correlation", [0.0, 0.9, 0.99])
def test_twenty_checkpoints_watched(correlation: float) -> None:
    """Two trainings that differ nowhere, on the same 200 documents at 20 steps, whose differences are an AR(1)."""
    dice, looks, wrong = np.random.default_rng(5), Looks(checkpoints=20), 0
    for _ in range(TIMES):
        latent = dice.standard_normal(200)
        for step in range(20):
            noise = dice.standard_normal(200)
            latent = noise if not step else correlation * latent + math.sqrt(1 - correlation**2) * noise
            values = np.where(np.abs(latent) > 1.0, np.sign(latent), 0.0)
            paired = PairedTask("t", None, None, (np.arange(200),) * 2, 0, True)
            line = ScoredLine(paired, np.zeros((1, 200)), values[None], RIGHT, looks=looks)
            average = average_difference("Average", [line])
            if not covers(average, 0.0) or (average.p is not None and average.p <= 0.05):
                wrong += 1
                break
    assert wrong / TIMES <= most(0.05, TIMES)


# Savings


def wald(difference: float, power: float) -> float:
    """Share of the documents that Wald's sequential test needs on average, for a difference in standard errors of all.

    Of two simple hypotheses, with the error of one side of a two-sided test at 5 %, and this power: no test with these
    errors needs fewer (Wald and Wolfowitz 1948).
    """
    alpha, beta = 0.025, max(1 - power, 1e-9)
    return ((1 - beta) * math.log((1 - beta) / alpha) + beta * math.log(beta / (1 - alpha))) / (difference**2 / 2)


@pytest.mark.simulation
@pytest.mark.parametrize("outcome", ["acc", "bits_per_byte"])
@pytest.mark.parametrize(("difference", "share"), [(3, 0.80), (5, 0.45)])
def test_documents_saved(outcome: str, difference: int, share: float) -> None:
    """A true difference of so many standard errors of the full run; the margin of equivalence is 1."""
    world, error = planted(outcome, difference)
    dice = np.random.default_rng(6)
    at, sizes = samples(world.sizes, None), world.sizes
    ended = [decided(world, at, error, dice) for _ in range(1000)]
    used = np.mean([sum(min(size, n) for size in sizes) for _, n in ended]) / sum(sizes)
    power = np.mean([verdict == BETTER for verdict, _ in ended])
    bound = wald(difference, float(power))
    print(f"{outcome}, {difference} SE: {used:.1%} of the documents, power {power:.1%}; Wald's bound {bound:.1%}")
    assert used <= share
