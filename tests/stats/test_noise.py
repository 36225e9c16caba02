"""Noise of scores: intervals, published formulas, and what is unknown."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from evalkit.comparison.noise import noise_line, reduced
from evalkit.stats.estimates import Floats
from evalkit.stats.noise import (
    Bounded,
    autocorrelation,
    decided_alike,
    decision_accuracy,
    independent_checkpoints,
    largest_difference,
    rank_correlation,
    seed_variance,
    variance_interval,
    window_freedom,
)


def published(signal_scores: Floats, noise_scores: Floats) -> float:
    """The ratio of Signal and Noise (2508.13144), as its equations define it."""
    signal = max(abs(a - b) for a in signal_scores for b in signal_scores) / signal_scores.mean()
    noise = math.sqrt(((noise_scores - noise_scores.mean()) ** 2).sum() / (len(noise_scores) - 1)) / noise_scores.mean()
    return float(signal / noise)


def test_the_signal_to_noise_ratio_is_the_published_one() -> None:
    """Models are means over their last checkpoints; the noise of several trainings is the root mean square."""
    dice = np.random.default_rng(0)
    scores = dice.random((3, 1, 6, 40)) + np.array([0.1, 0.3, 0.2])[:, None, None, None]
    line = noise_line("score", "task", reduced(scores, 4), 4, range(6))
    windows = scores[:, 0, 2:].mean(axis=2)
    ratios = [published(windows.mean(axis=1), window) for window in windows]
    assert line.signal_to_noise.value == pytest.approx(math.sqrt(1 / np.mean([1 / ratio**2 for ratio in ratios])))
    scores[1:] = scores[0] + np.array([0.5, 0.8])[:, None, None, None]
    scores[1:, 0, 2:] = scores[1:, 0, 2:].mean(axis=1, keepdims=True)  # a single training has noise
    line = noise_line("score", "task", reduced(scores, 4), 4, range(6))
    windows = scores[:, 0, 2:].mean(axis=2)
    single = published(windows.mean(axis=1), windows[0]) * math.sqrt(3)
    assert line.signal_to_noise.value == pytest.approx(single)
    assert math.isnan(noise_line("score", "task", reduced(scores - 0.6, 4), 4, range(6)).signal_to_noise.value)


def test_what_carries_a_decision() -> None:
    """A difference of 40 standard deviations does, a hundredth does not, and three with their interval are open."""
    dice = np.random.default_rng(3)
    noise = dice.normal(size=(2, 9, 8, 1)) + 0.1 * dice.normal(size=(2, 9, 8, 100))
    for difference, expected in ((40.0, "yes"), (0.01, "no"), (3.0, "not shown")):
        scores = 100 + noise - noise.mean(axis=(1, 2, 3), keepdims=True) + difference * np.eye(2)[:, :1, None, None]
        assert noise_line("score", "task", reduced(scores, 8), 8, range(8)).carries == expected


def test_what_is_unknown_is_not_zero() -> None:
    """Deviations between seeds with one seed; ratios without noise; correlation without variance, or of two."""
    assert math.isnan(seed_variance(np.ones((3, 1))).root().value)
    assert math.isnan(Bounded(1.0, 0.5, 2.0).over(Bounded(0.0, 0.0, 1.0)).value)
    assert math.isnan(autocorrelation(np.ones((2, 5)), 2).value) and math.isnan(autocorrelation(np.eye(2), 2).value)
    assert Bounded(1.0, 0.0, 2.0).over(Bounded(1.0, 0.0, 2.0))[1:] == (0.0, math.inf)
    assert 2 < Bounded(0.0, 0.0, 2.0).over(Bounded(1.0, 0.5, 2.0)).high < 4


def test_intervals_of_variances() -> None:
    """Five independent checkpoints know a deviation to a factor of 0.6 to 2.9; those of a random walk know it less."""
    assert variance_interval(1.0, 4).root()[1:] == pytest.approx((0.599, 2.874), abs=1e-3)
    low, high = stats.chi2.ppf((0.025, 0.975), 3.3)
    assert variance_interval(2.0, 3.3)[1:] == pytest.approx((6.6 / high, 6.6 / low))
    for count in (2, 3, 5, 10):
        walk = np.minimum.outer(range(1, count + 1), range(1, count + 1)).astype(float)
        centring = np.eye(count) - 1 / count
        eigenvalues = np.linalg.eigvalsh(centring @ walk @ centring)
        assert window_freedom(count) == pytest.approx(eigenvalues.sum() ** 2 / (eigenvalues**2).sum())


def test_models_that_move_alike_count_once() -> None:
    """Seeds of four models that differ by constants are known as badly as those of one."""
    one = np.random.default_rng(1).normal(size=(1, 4))
    alike, alone = seed_variance(one + np.arange(4)[:, None]), stats.chi2.ppf((0.975, 0.025), 3)
    assert alike.value == pytest.approx(one.var(ddof=1))
    assert alike[1:] == pytest.approx(3 * one.var(ddof=1) / alone)


def test_the_largest_difference_of_two_models_is_a_t_interval() -> None:
    """Of more models the lower end is Bonferroni's, so it is below that of any pair."""
    errors = np.full((3, 3), 0.04)
    two = largest_difference(np.array([1.0, 3.0]), errors[:2, :2], 9)
    assert two == pytest.approx((2.0, 2 - 0.2 * stats.t.ppf(0.9875, 9), 2 + 0.2 * stats.t.ppf(0.975, 9)))
    assert largest_difference(np.array([1.0, 3.0, 2.9]), errors, 9).low < two.low
    assert largest_difference(np.array([1.0, 1.1]), errors[:2, :2], 9).low == 0


def test_decision_accuracy() -> None:
    """As the published program counts it, without ties; Clopper and Pearson's interval of half the models."""
    dice = np.random.default_rng(2)
    small, large = dice.random(9), dice.random(9)
    alike = [(small[a] > small[b]) == (large[a] > large[b]) for a in range(9) for b in range(a + 1, 9)]
    assert decided_alike(small, large) == pytest.approx(np.mean(alike))
    assert decided_alike(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(2.5 / 3)
    exact = stats.binomtest(3, 4).proportion_ci(method="exact")
    assert decision_accuracy(0.75, 8) == pytest.approx((0.75, exact.low, exact.high))
    assert decision_accuracy(1.0, 4)[1:] == pytest.approx((0.025**0.5, 1.0))
    assert decision_accuracy(0.0, 2)[1:] == pytest.approx((0.0, 0.975))


def test_rank_correlation_with_ties() -> None:
    steps, scores = np.arange(6.0), np.array([1.0, 2.0, 2.0, 5.0, 4.0, 5.0])
    assert rank_correlation(steps, scores) == pytest.approx(stats.spearmanr(steps, scores).statistic)
    assert math.isnan(rank_correlation(steps, np.ones(6)))


def test_independent_checkpoints() -> None:
    assert independent_checkpoints(5, 0.0) == 5
    assert independent_checkpoints(2, 0.5) == pytest.approx(4 / 3)
