"""Differences and tests of one line of a comparison: a task or one layer of it, and the mean over tasks.

In: paired documents with the scores of both sides. Out: the difference with its standard error and interval, and the
p value of the appropriate test, before correction for multiple tests; how many documents an outcome saves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from evalkit.benchmarks.outcomes import Measure
from evalkit.comparison.differences import TOO_FEW, AverageDifference, Difference, TaskDifference, verdict_of
from evalkit.comparison.pairing import PairedTask, Pairing, sample_names
from evalkit.stats import adjusted as adjusting
from evalkit.stats import significance
from evalkit.stats.estimates import CONFIDENCE, Estimate, Floats, average, interval, mean, skewness, t_quantile
from evalkit.stats.power import ALPHA, detectable, mcnemar_detectable, sign_flip_detectable
from evalkit.stats.sequential import FIRST, ONCE, Look, Looks
from evalkit.suites.suites import Label

MCNEMAR, SIGN_FLIP, SEEDS = "McNemar", "sign flip and t", "t over seeds and documents"
PAIRS = "t over pairs of seeds and documents"


class ScoredLine:
    """[runs of the side, n] scores of a line, with their difference, its errors and its test.

    `layer` is None if a document has one score, or for the mean over layers. `in_pairs`: the n-th run of A and that of
    B have the same seed, so that what the seed does to both is no error of their difference. Its p value and interval
    hold at all `looks`.
    """

    def __init__(
        self,
        paired: PairedTask,
        a: Floats,
        b: Floats,
        measure: Measure,
        layer: int | None = None,
        in_pairs: bool = False,
        looks: Looks = ONCE,
    ) -> None:
        self.paired, self.a, self.b, self.measure, self.layer = paired, a, b, measure, layer
        self.look = Look(looks, paired.n / min(FIRST, paired.total or FIRST))
        self.in_pairs, self.name = in_pairs, line_name(paired.task, layer)
        self.differences = b.mean(axis=0) - a.mean(axis=0)
        self.won, self.lost = int((self.differences > 0).sum()), int((self.differences < 0).sum())
        self.documents = mean(self.differences, paired.clusters, paired.strata)
        self.sums = significance.cluster_sums(self.differences, paired.clusters)
        self.weights = significance.cluster_sums(np.ones(paired.n), paired.clusters)
        self.size = adjusting.size_of_differences(self.sums, self.weights, measure.span)
        # Without bounds no interval near them can be too short, but a long tail can be
        self.adjusted = self.documents._replace(skewness=skewness(self.differences, paired.clusters, paired.strata))
        if measure.bounds:
            self.adjusted = adjusting.with_one_won_and_one_lost(self.documents, paired.sources, self.size)
        several, sides = len(a) > 1 or len(b) > 1, (np.zeros_like(a[:1]), b - a) if in_pairs else (a, b)
        self.spread = significance.spread(*sides, paired.clusters, paired.strata) if several else None
        self.rounding = measure.resolution * float(np.abs(a).mean() + np.abs(b).mean()) / 2
        independent = paired.sources == paired.n and np.isin(self.differences, (-1, 0, 1)).all()
        self.test = MCNEMAR if measure.is_share and independent else SIGN_FLIP
        if several:
            self.test = PAIRS if in_pairs else SEEDS
        self.has_too_few = paired.n < measure.least_documents

    @property
    def p(self) -> float | None:
        """The p value; None if it is unknown. A difference as small as rounding has 1."""
        return self.look.p(self.p_of_one_look)

    @cached_property
    def p_of_one_look(self) -> float | None:
        if abs(self.documents.value) <= self.rounding > 0:
            return 1.0
        if self.has_too_few:
            return None
        if self.test == MCNEMAR:
            return significance.mcnemar(self.won, self.lost)
        p = _p_value(self.adjusted, self.spread)
        # Under the null, sources of unequal sizes need not be symmetric about zero, so the t test is used too
        return p if self.test != SIGN_FLIP else max(significance.sign_flip(self.sums), p or 0.0)

    def p_against(self, difference: float) -> float | None:
        """Return the p value of the interval's test, against another difference than zero; None if it is unknown."""
        return self.look.p(None if self.has_too_few else _p_value(self.adjusted, self.spread, difference))

    @property
    def dominance(self) -> float:
        """Share of the variance over documents that is due to a single source."""
        squares = (self.sums - self.documents.value * self.weights) ** 2
        return float(squares.max() / (squares.sum() or 1.0))

    def detectable(self, level: float) -> float | None:
        """Return the smallest true difference that a test at a level detects with 80 % power; None if there is none."""
        if self.has_too_few:
            return None
        level = self.look.level(level)
        if self.test == MCNEMAR:
            return mcnemar_detectable(self.paired.n, self.won + self.lost, level)
        span = self.measure.span
        smooth = detectable(self.adjusted, self.spread, span, level)
        sampled = self.test == SIGN_FLIP and np.count_nonzero(self.sums) > significance.ENUMERATED
        if sampled and level < 1 / (significance.DRAWS + 1):  # no sampled p value is below it
            return None
        if not math.isfinite(span):
            # With too few sources no pattern of signs is significant, whatever the differences
            return None if self.test == SIGN_FLIP and 2.0 ** (1 - len(self.sums)) > level else smooth
        # Where documents and runs hardly differ, the discreteness of a test over documents limits power more than the t
        discrete = sign_flip_detectable(self.sums, self.weights, self.documents.stderr, span, level)
        return None if smooth is None or discrete is None else max(smooth, discrete)

    def difference(self, p_holm: float, level: float | None) -> TaskDifference:
        """Return the record of the line, with the smallest difference detectable at a level, which is slow, if any."""
        paired, measure, lower = self.paired, self.measure, self.measure.higher_is_better is False
        corrected = None if self.p is None else p_holm
        verdict = verdict_of(corrected, self.documents.value, measure.higher_is_better)
        verdict = TOO_FEW if self.has_too_few else verdict
        estimates = (self.documents, self.adjusted, self.spread, self.p_of_one_look)
        effect = _effect(self.name, self.a, self.b, *estimates, measure, self.look)
        if self.has_too_few:
            effect = replace(effect, low=-measure.span, high=measure.span)
        smallest = None if level is None else self.detectable(level)
        decided = replace(
            effect, p_holm=corrected, verdict=verdict, detectable=smallest, has_caveats=paired.has_caveats
        )
        return TaskDifference(
            **vars(decided),
            n=paired.n,
            sources=paired.sources,
            strata=1 if paired.strata is None else len(np.unique(paired.strata)),
            dropped=paired.dropped,
            total=paired.total,
            official=paired.official,
            won=self.lost if lower else self.won,
            lost=self.won if lower else self.lost,
            same=paired.n - self.won - self.lost,
            test=self.test,
            dominance=self.dominance,
            layer=self.layer,
        )


def line_of(pairing: Pairing, task: PairedTask, rule: str, layer: tuple[int, int] | None = None) -> ScoredLine:
    """Return the line of a task's documents, or of one layer of them: its index and its number."""
    index, number = layer or (None, None)
    scores = pairing.scores(task, rule, index)
    return ScoredLine(task, *scores, pairing.measure(rule), number, pairing.in_pairs, pairing.looks)


def by_task(pairing: Pairing, rule: str) -> list[ScoredLine]:
    """Return a line for each task; for a measure with layers, of each document's mean over them."""
    return [line_of(pairing, task, rule) for task in pairing.tasks]


def average_difference(
    name: str, lines: Sequence[ScoredLine], level: float = ALPHA, with_power: bool = False
) -> AverageDifference:
    """Compare the mean over tasks; a seed answers all tasks, so its variance is that between the runs' averages.

    The interval misses the difference with a probability of `level`, at which the smallest detectable difference is
    computed, too, if `with_power`. The p value is not corrected.
    """
    measure, count = lines[0].measure, len(lines)
    a, b = (np.stack([getattr(line, side).mean(axis=1) for line in lines]).mean(axis=0) for side in "ab")
    of_tasks, samples = [line.adjusted for line in lines], samples_of(lines)
    documents = average([line.documents for line in lines], samples)
    look = look_at_average(lines)
    nominal = look.level(level)
    if measure.bounds:
        sources, sizes = [line.paired.sources for line in lines], [line.size for line in lines]
        adjusted = adjusting.adjusted_average(documents, of_tasks, sources, sizes, nominal, samples)
    else:
        adjusted = adjusting.at_least_task_intervals(average(of_tasks, samples), of_tasks, nominal, samples)
    parts = None
    if spreads := [line.spread for line in lines if line.spread is not None]:
        shared = sum(of_line.shared for of_line in spreads) / count**2
        sides = (np.zeros(1), b - a) if lines[0].in_pairs else (a, b)
        seeds_a, seeds_b = map(significance.between, sides)
        parts = significance.Spread(seeds_a, seeds_b, documents.variance, shared, *map(len, sides))
    p = lines[0].p_of_one_look if count == 1 else _p_value(adjusted, parts)
    if abs(documents.value) <= sum(line.rounding for line in lines) / count and measure.resolution:
        p = 1.0
    effect = _effect(name, a, b, documents, adjusted, parts, p, measure, look, level)
    if count == 1 and lines[0].has_too_few:
        effect = replace(effect, low=-measure.span, high=measure.span, verdict=TOO_FEW)
    if with_power:
        smallest = lines[0].detectable(level) if count == 1 else detectable(adjusted, parts, measure.span, nominal)
        effect = replace(effect, detectable=smallest)
    effect = replace(effect, has_caveats=any(line.paired.has_caveats for line in lines))
    return AverageDifference(**vars(effect))


def samples_of(lines: Sequence[ScoredLine]) -> list[str]:
    """Return the name of each line's sample of documents, which lines have in common that ask the same questions."""
    return sample_names([line.paired for line in lines])


def look_at_average(lines: Sequence[ScoredLine]) -> Look:
    """Return the look at an average, whose growth is that of the tasks, weighted by their parts of its variance."""
    variances = [line.documents.variance for line in lines]
    growths = [line.look.growth for line in lines]
    return Look(lines[0].look.looks, float(np.average(growths, weights=variances if sum(variances) > 0 else None)))


def length_ratio(nominal: float, level: float, freedom: float | None) -> float:
    """Return how many times as long an interval of a nominal level is as that of a single look."""
    of_all, of_one = (t_quantile(1 - each / 2, freedom or math.inf) for each in (nominal, level))
    return of_all / of_one


def _p_value(estimate: Estimate, parts: significance.Spread | None, null: float = 0.0) -> float | None:
    """Return the p value of an estimate against a difference; None if it is unknown."""
    estimate = estimate._replace(value=estimate.value - null)
    return nan_to_none(
        significance.t_test(estimate) if parts is None else significance.crossed_p_value(estimate, parts)
    )


def _effect(
    name: str, a: Floats, b: Floats, documents: Estimate, adjusted: Estimate, parts: significance.Spread | None,
    p: float | None, measure: Measure, look: Look, level: float = ALPHA,
) -> Difference:  # fmt: skip
    """Return what is common to tasks and averages; the adjusted interval is clipped to possible differences.

    An exact test may be not significant where the t interval excludes zero. The interval is then extended to zero, so
    that the two agree.
    """
    level = look.level(level)
    estimate, adjusted = (
        each if parts is None else significance.crossed(each, parts, level) for each in (documents, adjusted)
    )
    bounds, span = interval(adjusted, level), measure.span
    low, high = (-span, span) if math.isnan(bounds.low) else (max(-span, bounds.low), min(span, bounds.high))
    if p is None or p > level:
        low, high = min(low, 0.0), max(high, 0.0)
    p = look.p(p)
    error, freedom = nan_to_none(estimate.stderr), nan_to_none(adjusted.freedom)
    scores, verdict = (float(a.mean()), float(b.mean())), verdict_of(p, estimate.value, measure.higher_is_better)
    return Difference(name, *scores, estimate.value, low, high, error, freedom, p, parts, verdict)


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
    """Return how many times as many documents accuracy needs as an outcome at equal power, and the 95 % interval.

    Several runs of a side are taken as they are: the ratio is about documents, not about seeds. The interval is
    Fieller's, of the ratio of two expectations, whatever both differences are: from 0 where the outcome's may be zero,
    without an upper end where accuracy's may be. None where there is no variance.
    """
    samples = samples_of(accuracy)
    first, second = (average([line.documents for line in lines], samples) for lines in (accuracy, other))
    if not (first.variance > 0 and second.variance > 0):
        return None
    a, b = first.value / first.stderr, second.value / second.stderr
    # Both differences, in units of their errors, are correlated over samples of documents
    sums = []
    for x, y in zip(accuracy, other, strict=True):
        scaled = x.differences / first.stderr + y.differences / second.stderr
        sums.append(mean(scaled, x.paired.clusters, x.paired.strata))
    correlation = max(-1.0, min(1.0, average(sums, samples).variance / 2 - 1))
    square = t_quantile((1 + CONFIDENCE) / 2, min(first.freedom, second.freedom)) ** 2
    times = (b / a) ** 2 if a else math.inf
    leading, half, last = a**2 - square, a * b - square * correlation, b**2 - square
    root = math.sqrt(max(0.0, half**2 - leading * last))
    ends = sorted(abs(half + sign * root) / abs(leading) for sign in (-1, 1)) if leading else [0.0, math.inf]
    low, high = 0.0 if last <= 0 else ends[0], math.inf if leading <= 0 else ends[1]
    return times, low**2, high**2
