"""Noise on simulated scores: components are the planted ones, and 95 % intervals cover them in 95 % of studies.

Scores of models × seeds × checkpoints × documents are sums of normal effects. Checkpoints of a training are a process
of first order, with an autocorrelation from 0 to 0.95; models of a seed may share it and the seed's effect. Rates are
allowed three standard errors of the simulation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from evalkit.benchmarks.outcomes import Measure
from evalkit.comparison.line import ScoredLine
from evalkit.comparison.noise import NoiseLine, noise_line, reduced
from evalkit.comparison.pairing import PairedTask
from evalkit.runs.scales import Scale
from evalkit.stats.estimates import Floats
from evalkit.stats.noise import (
    Bounded,
    autocorrelation,
    decided_alike,
    decision_accuracy,
    document_error,
    independent_checkpoints,
    variance_interval,
)

Dice = np.random.Generator
AUTOCORRELATIONS = (0.0, 0.5, 0.8, 0.95)


def process(shape: tuple[int, ...], correlation: float, dice: Dice) -> Floats:
    """Stationary autoregressive processes of variance 1 along the last axis."""
    steps = dice.normal(size=shape)
    for step in range(1, shape[-1]):
        steps[..., step] = correlation * steps[..., step - 1] + math.sqrt(1 - correlation**2) * steps[..., step]
    return steps


@dataclass(frozen=True)
class Planted:
    """Standard deviations of effects on a score."""

    correlation: float
    models: int = 4
    seeds: int = 3
    last: int = 5
    n: int = 60
    common: float = 0.0
    """Share of the variance of checkpoints and seeds that models of a seed have in common."""
    gap: float = 0.05
    """Between neighbouring models."""
    checkpoint: float = 0.03
    seed: float = 0.05
    document: float = 1.0
    model_document: float = 0.2
    seed_document: float = 0.1
    checkpoint_document: float = 0.1

    def draw(self, dice: Dice) -> tuple[NoiseLine, float]:
        """The noise of one study, and the largest difference of its models over all documents."""
        shape = self.models, self.seeds, self.last
        own, shared = math.sqrt(1 - self.common), math.sqrt(self.common)
        checkpoints = own * process(shape, self.correlation, dice) + shared * process(shape[1:], self.correlation, dice)
        seeds = own * dice.normal(size=shape[:2]) + shared * dice.normal(size=self.seeds)
        level = 5 + self.gap * np.arange(self.models)
        scores = level[:, None, None] + self.checkpoint * checkpoints + self.seed * seeds[..., None]
        noise = self.document * dice.normal(size=self.n)
        noise = noise + self.model_document * dice.normal(size=(self.models, 1, 1, self.n))
        noise = noise + self.seed_document * dice.normal(size=(*shape[:2], 1, self.n))
        noise = noise + self.checkpoint_document * dice.normal(size=(*shape, self.n))
        of = reduced(scores[..., None] + noise, self.last)
        return noise_line("score", "task", of, self.last, range(self.last)), float(np.ptp(scores.mean(axis=(1, 2))))

    def truth(self) -> dict[str, float]:
        """What is expected of each component's variance."""
        lags = np.abs(np.subtract.outer(range(self.last), range(self.last)))
        pairs = self.last * (self.last - 1)
        mean = float(((self.correlation + (self.correlation == 0) * 1e-300) ** lags).sum() - self.last) / pairs
        within, between = self.checkpoint**2 * (1 - mean), self.seed**2 + self.checkpoint**2 * mean
        runs = self.seed_document**2 / self.seeds + self.checkpoint_document**2 / (self.seeds * self.last)
        paired = (self.model_document**2 + runs) / self.n
        once = (self.seed_document**2 + self.checkpoint_document**2) / self.n
        return {
            "checkpoints": within,
            "seeds": between,
            "documents": self.document**2 / self.n + paired,
            "paired": paired,
            "signal_to_noise": within + self.checkpoint_document**2 / self.n,
            "signal_to_seeds": (1 - self.common) * (within + between) + once,
        }


def missed(number: Bounded, truth: float) -> bool:
    return not number.low <= truth <= number.high


def allowed(times: int, rate: float = 0.05) -> float:
    return rate + 3 * math.sqrt(rate * (1 - rate) / times)


@pytest.mark.simulation
@pytest.mark.parametrize("correlation", AUTOCORRELATIONS)
@pytest.mark.parametrize(
    "design", [{}, {"common": 0.98}, {"models": 2, "last": 10}, {"seeds": 1, "models": 3}, {"gap": 0.0}]
)
def test_intervals_cover_the_planted_components(design: dict[str, float], correlation: float) -> None:
    """10,000 studies each. Signal to noise is of these checkpoints and seeds, over other documents."""
    planted, times = Planted(correlation, **design), 10_000  # type: ignore[arg-type]
    dice, truth = np.random.default_rng(1), planted.truth()
    misses = dict.fromkeys(truth, 0)
    for _ in range(times):
        line, largest = planted.draw(dice)
        for name, variance in truth.items():
            expected = largest / math.sqrt(variance) if name.startswith("signal") else math.sqrt(variance)
            misses[name] += missed(getattr(line, name), expected)
    if planted.seeds == 1:  # unknown, and not zero
        assert misses.pop("seeds") == misses.pop("signal_to_seeds") == times
        assert math.isnan(line.seeds.value)
    assert max(misses.values()) / times <= allowed(times), misses


@pytest.mark.simulation
@pytest.mark.parametrize("correlation", AUTOCORRELATIONS)
def test_components_are_the_planted_ones(correlation: float) -> None:
    """Mean variances over 400 studies, within four of their standard errors; components so large that all are > 0."""
    planted = Planted(correlation, n=200, checkpoint=0.2, seed=0.4)
    dice, truth = np.random.default_rng(2), planted.truth()
    lines = [planted.draw(dice)[0] for _ in range(400)]
    for name in ("checkpoints", "seeds", "documents", "paired"):
        variances = np.array([getattr(line, name).value ** 2 for line in lines])
        assert variances.min() > 0
        assert abs(variances.mean() - truth[name]) < 4 * variances.std() / 20, name


@pytest.mark.simulation
def test_the_error_over_documents_covers_skewed_values() -> None:
    """2,000 samples each of 50 and 200 values."""
    dice, times = np.random.default_rng(3), 2_000
    draws = {
        0.21: lambda n: (dice.random(n) < 0.3).astype(float),
        2.0: lambda n: dice.laplace(size=n),
        0.5: lambda n: dice.gamma(0.5, size=n),
        (math.e - 1) * math.e: lambda n: dice.lognormal(size=n),
    }
    for variance, draw in draws.items():
        for n in (50, 200):
            errors = (document_error(draw(n), None, None) for _ in range(times))
            misses = sum(missed(variance_interval(each.variance, each.freedom), variance / n) for each in errors)
            assert misses / times <= allowed(times), (variance, n)


@pytest.mark.simulation
@pytest.mark.parametrize("models", [3, 4, 8, 20])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.95])
def test_decision_accuracy_covers_the_share_of_all_pairs(models: int, correlation: float) -> None:
    """Of pairs of normal scores the share is 1/2 + arcsin(ρ) / π (Sheppard 1899); 2,000 samples of models each."""
    dice, truth, times = np.random.default_rng(4), 0.5 + math.asin(correlation) / math.pi, 2_000
    misses, shares = 0, []
    for _ in range(times):
        early = dice.normal(size=models)
        late = correlation * early + math.sqrt(1 - correlation**2) * dice.normal(size=models)
        shares.append(decided_alike(early, late))
        misses += missed(decision_accuracy(shares[-1], models), truth)
    assert misses / times <= allowed(times)
    assert np.mean(shares) == pytest.approx(truth, abs=4 * np.std(shares) / math.sqrt(times))


@pytest.mark.simulation
@pytest.mark.parametrize("correlation", AUTOCORRELATIONS)
def test_autocorrelation_of_short_windows(correlation: float) -> None:
    """Windows of 5 of 2,000 trainings; the usual coefficient is -0.2 without autocorrelation. Intervals of a few."""
    windows = process((2_000, 5), correlation, np.random.default_rng(5))
    assert autocorrelation(windows, 2_000).value == pytest.approx(correlation, abs=0.04)
    for trainings, count in ((1, 10), (2, 5), (4, 20)):
        few = process((500, trainings, count), correlation, np.random.default_rng(6))
        misses = sum(missed(autocorrelation(each, trainings), correlation) for each in few)
        assert misses / 500 <= allowed(500)
    variance = windows.mean(axis=1).var()
    assert 1 / independent_checkpoints(5, correlation) == pytest.approx(variance, rel=4 * math.sqrt(2 / 2_000))


@pytest.mark.simulation
@pytest.mark.parametrize("correlation", AUTOCORRELATIONS)
def test_means_over_checkpoints_are_about_these_checkpoints(correlation: float) -> None:
    """`compare --last 5`: 2,000 pairs of equal models with one training each, on 200 documents.

    The interval covers the difference of these checkpoints over other documents, whatever their autocorrelation, and
    misses that of the models, which is zero, far more often than in 5 %: the more, the higher the autocorrelation.
    """
    dice, times, measure = np.random.default_rng(6), 2_000, Measure(Scale("score", "points"), "score", True)
    of_these, of_models = 0, 0
    for _ in range(times):
        level = 0.1 * process((2, 5), correlation, dice)
        scores = level[..., None] + dice.normal(size=200) + 0.3 * dice.normal(size=(2, 1, 200))
        scores = (scores + 0.3 * dice.normal(size=(2, 5, 200))).mean(axis=1)
        task = PairedTask("t", None, None, (np.arange(200),) * 2, 0, True)
        line = ScoredLine(task, scores[:1], scores[1:], measure)
        half = stats.t.ppf(0.975, line.documents.freedom) * line.documents.stderr
        of_these += abs(line.documents.value - float(np.diff(level.mean(axis=1))[0])) > half
        of_models += abs(line.documents.value) > half
    assert of_these / times <= allowed(times)
    assert of_models / times > 0.25 + 0.3 * correlation
