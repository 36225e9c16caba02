"""Error rates of verdicts: of the primary one with several sides, on a margin, of seeds in pairs, on likelihoods;
and the power at the difference that a comparison says it could show.

Rates may exceed their level by three standard errors of the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evalkit import Comparison
from evalkit.benchmarks.outcomes import Measure
from evalkit.comparison.comparison import decided_together, margin_verdict
from evalkit.comparison.differences import BETTER, EQUIVALENT, NOT_WORSE, UNDECIDED, WORSE, on_margin
from evalkit.comparison.line import ScoredLine, average_difference, by_task
from evalkit.comparison.pairing import PairedTask, pair
from evalkit.comparison.sides import Side
from evalkit.runs.continuous import OUTCOMES
from evalkit.runs.folder import load_run
from evalkit.stats.estimates import interval
from evalkit.stats.significance import holm
from tests.comparison.made import compared, three_tasks
from tests.stats.test_simulation import BITS, RIGHT, alone, clustered, independent, line, toss, zipf

SAMPLES = Path(__file__).parents[2] / "results" / "samples"
Dice = np.random.Generator
TIMES = 10_000


def most(level: float, times: int) -> float:
    """The level and three standard errors of its simulated rate."""
    return level + 3 * math.sqrt(level * (1 - level) / times)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """A comparison whose averages are replaced by simulated ones."""
    root = tmp_path_factory.mktemp("runs")
    return compared(three_tasks(root, "a"), three_tasks(root, "b", seed=2))


def sides_of_one_baseline(gains: Sequence[float], dice: Dice) -> list[list[ScoredLine]]:
    """Two tasks of 150 right or wrong answers, of A and of sides that are better by `gains`."""
    sides = [list[ScoredLine]() for _ in gains]
    for task in "ab":
        ability = dice.normal(0, 1, 150)
        a = (ability + dice.normal(0, 1, 150) > 0).astype(float)[None]
        for lines, gain in zip(sides, gains, strict=True):
            b = (ability + dice.normal(0, 1, 150) > 0).astype(float)[None]
            b = np.where(dice.random(150) < gain, 1.0, b)  # a right answer in place of half of the wrong ones
            lines.append(ScoredLine(PairedTask(task, None, None, (np.arange(150),) * 2, 0, True), a, b, RIGHT))
    return sides


@pytest.mark.simulation
@pytest.mark.parametrize("gains", [(0.0,), (0.0,) * 3, (0.0,) * 7, (0.0, 0.0, 0.4), (0.0,) * 4 + (0.3,) * 3])
def test_the_primary_verdict_errs_in_five_percent_over_all_sides(
    template: Comparison, gains: tuple[float, ...]
) -> None:
    """Also where some sides are better; their intervals hold together, and so what they say about a margin."""
    dice, errors, missed, margin = np.random.default_rng(len(gains)), 0, 0, 0
    for _ in range(TIMES):
        averages = [average_difference("Average", lines, 0.05 / len(gains)) for lines in
                    sides_of_one_baseline(gains, dice)]  # fmt: skip
        of = [replace(template, averages=(average,), sides=len(gains)) for average in averages]
        decided = [each.average for each in decided_together(of)]
        false = [average.verdict != UNDECIDED for average, gain in zip(decided, gains, strict=True) if not gain]
        errors += any(false)
        outside = [not average.low <= gain / 2 <= average.high for average, gain in zip(decided, gains, strict=True)]
        missed += any(outside)
        margin += any(on_margin(average, gain / 2, -1) in (EQUIVALENT, NOT_WORSE)
                      for average, gain in zip(decided, gains, strict=True) if gain)  # fmt: skip
    assert errors / TIMES <= most(0.05, TIMES)
    assert missed / TIMES <= most(0.05, TIMES)
    assert margin / TIMES <= most(0.05, TIMES)


@pytest.mark.simulation
@pytest.mark.parametrize("loss", [-0.08, 0.08])
def test_verdicts_on_a_margin_at_its_boundary(loss: float) -> None:
    """Eight tasks whose true loss, or gain, is the margin: neither "not worse" nor "worse" is true of a loss."""
    dice, times, margin = np.random.default_rng(4), TIMES, 0.08
    counts = dict.fromkeys((EQUIVALENT, NOT_WORSE, WORSE, UNDECIDED), 0)
    false_tasks = 0
    for _ in range(times):
        lines = [independent(100, loss, dice) for _ in range(8)]
        counts[on_margin(average_difference("Average", lines), margin, 1)] += 1
        on_tasks = margin_verdict(lines, margin)
        false_tasks += bool(on_tasks.worse or (on_tasks.not_worse if loss < 0 else ()))
    assert counts[EQUIVALENT] / times <= most(0.05, times)
    assert counts[WORSE] / times <= most(0.05, times)
    if loss < 0:
        assert (counts[NOT_WORSE] + counts[EQUIVALENT]) / times <= most(0.05, times)
    else:
        assert (counts[NOT_WORSE] + counts[EQUIVALENT]) / times > 0.99
    assert false_tasks / times <= most(0.05, times)


@pytest.mark.simulation
@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("correlation", [-0.5, 0.0, 0.5, 0.98, 1.0])
def test_pairs_of_seeds_hold_their_level(correlation: float, seeds: int) -> None:
    """Seeds have the deviation of documents' means, or ten times as much, and a correlation between both sides."""
    dice, n, times = np.random.default_rng(seeds), 40, TIMES
    covariance = np.array([[1.0, correlation], [correlation, 1.0]])
    for size in (1 / math.sqrt(n), 10 / math.sqrt(n)):
        rejected = covered = 0
        for _ in range(times):
            shifts = size * dice.multivariate_normal([0, 0], covariance, seeds, method="eigh")
            common = dice.normal(0, 0.7, n)
            a, b = (shifts[:, side : side + 1] + common * side + dice.normal(0, 0.5, (seeds, n)) for side in (0, 1))
            pairs = ScoredLine(PairedTask("t", None, None, (np.arange(n),) * 2, 0, True), a, b, BITS, in_pairs=True)
            average = average_difference("Average", [pairs])
            rejected += average.p is not None and average.p <= 0.05
            covered += average.low <= 0 <= average.high
        assert rejected / times <= most(0.05, times)
        assert 1 - covered / times <= most(0.05, times)


LIKELIHOODS = Measure(OUTCOMES["bits_per_byte"].scale, "bits per byte", True, least_documents=200)


@pytest.mark.simulation
@pytest.mark.parametrize("n", [50, 100, 200, 500])
def test_real_differences_of_bits_per_byte(n: int) -> None:
    """Drawn from tasks of 500 documents or more: too few at 50 and 100; else the interval covers the mean."""
    inst, plain = (load_run(next(SAMPLES.glob(f"demo-zeroshot8-{name}-*"))) for name in ("inst", "plain"))
    pairing, dice = pair(Side("inst", (inst,)), Side("plain", (plain,)), {}), np.random.default_rng(n)
    for task in by_task(pairing, "bits_per_byte"):
        values, times = task.differences, TIMES if n >= 200 else 100
        lines = (alone(values[dice.integers(0, len(values), n)], measure=LIKELIHOODS) for _ in range(times))
        if n < 200:
            assert {each.difference(1.0, None).verdict for each in lines} == {"too few"}
            continue
        intervals = [interval(each.adjusted) for each in lines]
        missed = np.mean([not low <= values.mean() <= high for low, high in intervals])
        assert missed <= most(0.05, times), (task.name, missed)


# The power at the difference that a comparison could show


UNEQUAL = zipf(1000, 300)


def unequal(difference: float, dice: Dice) -> ScoredLine:
    """1,000 documents of 300 sources by Zipf's law, of which the largest has 159."""
    lean = dice.choice([-0.03, 0.03], UNEQUAL.max() + 1)[UNEQUAL]
    return alone(toss(1000, 0.4, difference, lean, dice), UNEQUAL)


def seeded(runs: int, difference: float, dice: Dice) -> ScoredLine:
    a, b = (dice.normal(0, 0.1, (runs, 1)) + dice.normal(0, 1.0, (runs, 200)) for _ in range(2))
    return line(a, b + difference + dice.normal(0, 0.7, 200), measure=BITS)


KINDS: dict[str, Callable[[float, Dice], ScoredLine]] = {
    "independent": lambda difference, dice: independent(300, difference, dice),
    "sharing sources": lambda difference, dice: clustered(1000, difference, dice),
    "sources of unequal size": unequal,
    "2 seeds": lambda difference, dice: seeded(2, difference, dice),
    "3 seeds": lambda difference, dice: seeded(3, difference, dice),
}


@pytest.mark.simulation
@pytest.mark.parametrize("tasks", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_comparison_could_show(kind: str, tasks: int) -> None:
    """Of a first comparison, in a repetition of it: one of its tasks alone, after Holm's correction."""
    dice, times, found, known = np.random.default_rng(tasks), 1500, 0, 0
    for _ in range(times):
        difference = KINDS[kind](0.0, dice).detectable(0.05 / tasks)
        if difference is None:
            continue
        known += 1
        lines = [KINDS[kind](difference if not task else 0.0, dice) for task in range(tasks)]
        found += holm([1.0 if each.p is None else each.p for each in lines])[0] <= 0.05
    assert known > 0.95 * times
    # Of sources of unequal size the degrees of freedom vary, too: a limit that the documentation states
    least = 0.65 if kind == "sources of unequal size" else 0.76
    assert least <= found / known <= 0.85, found / known


@pytest.mark.simulation
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_average_could_show(kind: str) -> None:
    dice, times, found = np.random.default_rng(5), 1500, 0
    for _ in range(times):
        pilot = average_difference("Average", [KINDS[kind](0.0, dice) for _ in range(3)], 0.05 / 3, with_power=True)
        assert pilot.detectable is not None
        of = average_difference("Average", [KINDS[kind](pilot.detectable, dice) for _ in range(3)])
        found += (of.p or 0) <= 0.05 / 3
    assert (0.7 if kind == "sources of unequal size" else 0.76) <= found / times <= 0.85, found / times


def test_the_primary_verdict_of_a_few_simulations(template: Comparison) -> None:
    """A sample of this file runs by default."""
    dice, errors, times = np.random.default_rng(1), 0, 200
    for _ in range(times):
        averages = [average_difference("Average", lines, 0.05 / 3) for lines in sides_of_one_baseline((0.0,) * 3, dice)]
        of = [replace(template, averages=(average,), sides=3) for average in averages]
        errors += any(each.average.verdict in (BETTER, WORSE) for each in decided_together(of))
    assert errors / times <= most(0.05, times)
