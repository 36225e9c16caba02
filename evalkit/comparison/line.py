"""Differences and tests of one line of a comparison: a task or one layer of it, and the mean over tasks.

In: paired documents with the scores of both sides. Out: the difference with its standard error and interval, and the
p value of the appropriate test, before correction for multiple tests; how many documents an outcome saves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from evalkit.benchmarks.outcomes import Label, Measure
from evalkit.comparison.differences import AverageDifference, Difference, TaskDifference, verdict_of
from evalkit.comparison.pairing import PairedTask, Pairing
from evalkit.stats import adjusted as adjusting
from evalkit.stats import significance
from evalkit.stats.estimates import CONFIDENCE, Estimate, Floats, average, interval, mean, t_quantile
from evalkit.stats.power import ALPHA, mcnemar_detectable, sign_flip_detectable, t_detectable

MCNEMAR, SIGN_FLIP, SEEDS = "McNemar", "sign flip and t", "t over seeds and documents"


class ScoredLine:
    """[runs of the side, n] scores of a line, with their difference, its errors and its test.

    `layer` is None if a document has one score, or for the mean over layers.
    """

    def __init__(self, paired: PairedTask, a: Floats, b: Floats, measure: Measure, layer: int | None = None) -> None:
        self.paired, self.a, self.b, self.measure, self.layer = paired, a, b, measure, layer
        self.differences = b.mean(axis=0) - a.mean(axis=0)
        self.won, self.lost = int((self.differences > 0).sum()), int((self.differences < 0).sum())
        self.documents = mean(self.differences, paired.clusters, paired.strata)
        self.sums = significance.cluster_sums(self.differences, paired.clusters)
        self.weights = significance.cluster_sums(np.ones(paired.n), paired.clusters)
        self.size = adjusting.size_of_differences(self.sums, self.weights, measure.span)
        self.adjusted = self.documents
        if measure.bounds:  # without bounds no interval near them can be too short
            self.adjusted = adjusting.with_one_won_and_one_lost(self.documents, paired.sources, self.size)
        several = len(a) > 1 or len(b) > 1
        self.spread = significance.spread(a, b, paired.clusters, paired.strata) if several else None
        self.rounding = measure.resolution * float(np.abs(a).mean() + np.abs(b).mean()) / 2
        independent = paired.sources == paired.n and np.isin(self.differences, (-1, 0, 1)).all()
        self.test = SEEDS if several else MCNEMAR if measure.is_share and independent else SIGN_FLIP

    @cached_property
    def p(self) -> float | None:
        """The p value; None if it is unknown. A difference as small as rounding has 1."""
        if abs(self.documents.value) <= self.rounding > 0:
            return 1.0
        if self.spread is not None:
            return nan_to_none(significance.crossed_p_value(self.adjusted, self.spread))
        if self.test == MCNEMAR:
            return significance.mcnemar(self.won, self.lost)
        # Under the null, sources of unequal sizes need not be symmetric about zero, so the t test is used too
        return nan_to_none(max(significance.sign_flip(self.sums), significance.t_test(self.adjusted)))

    def detectable(self) -> float | None:
        """Return the smallest true difference that these documents detect with 80 % power; None if there is none."""
        if self.test == MCNEMAR:
            return mcnemar_detectable(self.paired.n, self.won + self.lost)
        adjusted, span = _crossed(self.adjusted, self.spread), self.measure.span
        smooth = t_detectable(adjusted.stderr, adjusted.freedom, span)
        if not math.isfinite(span):
            # With too few sources no pattern of signs is significant, whatever the differences
            return None if self.test == SIGN_FLIP and 2.0 ** (1 - len(self.sums)) > ALPHA else smooth
        # Where documents and runs hardly differ, the discreteness of a test over documents limits power more than the t
        discrete = sign_flip_detectable(self.sums, self.weights, self.documents.stderr, span)
        return None if smooth is None or discrete is None else max(smooth, discrete)

    def difference(self, p_holm: float, with_power: bool) -> TaskDifference:
        """Return the record of the line, with the smallest detectable difference, which is slow, if `with_power`."""
        paired, measure, lower = self.paired, self.measure, self.measure.higher_is_better is False
        corrected = None if self.p is None else p_holm
        verdict = verdict_of(corrected, self.documents.value, measure.higher_is_better)
        estimates = (self.documents, self.adjusted, self.spread, self.p)
        effect = _effect(line_name(paired.task, self.layer), self.a, self.b, *estimates, measure, verdict)
        return TaskDifference(
            **vars(effect),
            n=paired.n,
            sources=paired.sources,
            strata=1 if paired.strata is None else len(np.unique(paired.strata)),
            dropped=paired.dropped,
            official=paired.official,
            won=self.lost if lower else self.won,
            lost=self.won if lower else self.lost,
            same=paired.n - self.won - self.lost,
            test=self.test,
            p_holm=corrected,
            detectable=self.detectable() if with_power else None,
            layer=self.layer,
        )


def by_task(pairing: Pairing, rule: str) -> list[ScoredLine]:
    """Return a line for each task; for a measure with layers, of each document's mean over them."""
    measure = pairing.measure(rule)
    return [ScoredLine(task, *pairing.scores(task, rule), measure) for task in pairing.tasks]


def average_difference(name: str, lines: Sequence[ScoredLine]) -> AverageDifference:
    """Compare the mean over tasks; a seed answers all tasks, so its variance is that between the runs' averages."""
    measure, count = lines[0].measure, len(lines)
    a, b = (np.stack([getattr(line, side).mean(axis=1) for line in lines]).mean(axis=0) for side in "ab")
    documents, of_tasks = average([line.documents for line in lines]), [line.adjusted for line in lines]
    if measure.bounds:
        sources, sizes = [line.paired.sources for line in lines], [line.size for line in lines]
        adjusted = adjusting.adjusted_average(documents, of_tasks, sources, sizes)
    else:
        adjusted = adjusting.at_least_task_intervals(documents, of_tasks)
    parts = None
    if spreads := [line.spread for line in lines if line.spread is not None]:
        shared = sum(of_line.shared for of_line in spreads) / count**2
        variances = (significance.between(a), significance.between(b), documents.variance, shared)
        parts = significance.Spread(*variances, len(a), len(b))
        p = nan_to_none(significance.crossed_p_value(adjusted, parts))
    else:
        p = lines[0].p if count == 1 else nan_to_none(significance.t_test(adjusted))
    if abs(documents.value) <= sum(line.rounding for line in lines) / count and measure.resolution:
        p = 1.0
    verdict = verdict_of(p, documents.value, measure.higher_is_better)
    return AverageDifference(**vars(_effect(name, a, b, documents, adjusted, parts, p, measure, verdict)))


def _effect(
    name: str, a: Floats, b: Floats, documents: Estimate, adjusted: Estimate, parts: significance.Spread | None,
    p: float | None, measure: Measure, verdict: str,
) -> Difference:  # fmt: skip
    """Return what is common to tasks and averages; the adjusted interval is clipped to possible differences.

    An exact test may be not significant where the t interval excludes zero. The interval is then extended to zero, so
    that the two agree.
    """
    estimate, adjusted = _crossed(documents, parts), _crossed(adjusted, parts)
    bounds, span = interval(adjusted), measure.span
    low, high = (-span, span) if math.isnan(bounds.low) else (max(-span, bounds.low), min(span, bounds.high))
    if p is None or p > ALPHA:
        low, high = min(low, 0.0), max(high, 0.0)
    error, freedom = nan_to_none(estimate.stderr), nan_to_none(adjusted.freedom)
    scores = float(a.mean()), float(b.mean())
    return Difference(name, *scores, estimate.value, low, high, error, freedom, p, parts, verdict)


def _crossed(estimate: Estimate, parts: significance.Spread | None) -> Estimate:
    return estimate if parts is None else significance.crossed(estimate, parts)


def line_name(task: str, layer: int | None) -> str:
    """Return a line's name, unique within its comparison."""
    return task if layer is None else f"{task} layer {layer}"


def line_label(label: Label, layer: int | None) -> Label:
    """Return the printed label of a line."""
    return label if layer is None else Label(*(f"{text}, layer {layer}" for text in label))


def nan_to_none(value: float) -> float | None:
    """Return a number, or None for NaN."""
    return None if math.isnan(value) else value


def efficiency(accuracy: Sequence[ScoredLine], other: Sequence[ScoredLine]) -> tuple[float, float, float] | None:
    """Return how many times fewer documents an outcome needs than accuracy at equal power, and the 95 % interval.

    Several runs of a side are taken as they are: the ratio is about documents, not about seeds. The upper end is
    infinite where accuracy's difference may be zero. The interval is Fieller's, of the ratio of two expectations. None
    where the outcome's difference may be zero, or where every ratio is possible.
    """
    first, second = (average([line.documents for line in lines]) for lines in (accuracy, other))
    if not (first.variance > 0 and second.variance > 0):
        return None
    a, b = first.value / first.stderr, second.value / second.stderr
    # Both differences, in units of their errors, are correlated over samples of documents
    sums = []
    for x, y in zip(accuracy, other, strict=True):
        scaled = x.differences / first.stderr + y.differences / second.stderr
        sums.append(mean(scaled, x.paired.clusters, x.paired.strata))
    correlation = max(-1.0, min(1.0, average(sums).variance / 2 - 1))
    square = t_quantile((1 + CONFIDENCE) / 2, min(first.freedom, second.freedom)) ** 2
    if b**2 <= square:
        return None
    times = (b / a) ** 2 if a else math.inf
    leading, half, last = a**2 - square, a * b - square * correlation, b**2 - square
    if leading == 0:
        return times, (last / (2 * half)) ** 2, math.inf
    root = math.sqrt(max(0.0, half**2 - leading * last))
    ends = sorted(((half - root) / leading, (half + root) / leading), key=abs)
    return times, ends[0] ** 2, ends[1] ** 2 if leading > 0 else math.inf
