"""Difference and test of one line of a comparison: a task, or one layer of it.

In: paired documents with the scores of both sides. Out: the difference with its standard error, and the p value of the
appropriate test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from evalkit.benchmarks.outcomes import Label, Measure
from evalkit.comparison.pairing import PairedTask, Pairing
from evalkit.stats.adjusted import size_of_differences, with_one_won_and_one_lost
from evalkit.stats.estimates import CONFIDENCE, Estimate, Floats, average, mean, t_quantile
from evalkit.stats.power import ALPHA, mcnemar_detectable, sign_flip_detectable, t_detectable
from evalkit.stats.significance import cluster_sums, crossed, crossed_p_value, mcnemar, sign_flip, spread, t_test

MCNEMAR, SIGN_FLIP, SEEDS = "McNemar", "sign flip and t", "t over seeds and documents"


class ScoredLine:
    """Scores, difference and p value of a line, before correction for multiple tests.

    Args:
        paired: its documents.
        a, b: [runs of the side, n] scores.
        measure: of the scores.
        layer: of the model; None if a document has one score, or for the mean over layers.
    """

    def __init__(self, paired: PairedTask, a: Floats, b: Floats, measure: Measure, layer: int | None = None) -> None:
        self.paired, self.a, self.b, self.layer, self.span = paired, a, b, layer, measure.span
        self.name = line_name(paired.task, layer)
        self.differences = b.mean(axis=0) - a.mean(axis=0)
        place = (paired.clusters, paired.strata)
        self.documents = mean(self.differences, *place)
        self.sums = cluster_sums(self.differences, paired.clusters)
        self.weights = cluster_sums(np.ones(paired.n), paired.clusters)
        self.size = size_of_differences(self.sums, self.weights, self.span)
        self.rounding = measure.resolution * float(np.abs(a).mean() + np.abs(b).mean()) / 2
        self.several = len(a) > 1 or len(b) > 1
        self.spread = spread(a, b, *place) if self.several else None
        self.adjusted = self.documents
        if measure.bounds:  # without bounds no interval near them can be too short
            self.adjusted = with_one_won_and_one_lost(self.documents, paired.sources, self.size)
        self.of_documents = self.adjusted
        self.estimate = self.documents
        if self.spread is not None:
            self.estimate, self.adjusted = (crossed(one, self.spread) for one in (self.documents, self.adjusted))
        self.won, self.lost = int((self.differences > 0).sum()), int((self.differences < 0).sum())
        if self.spread is not None:
            self.test = SEEDS
        elif measure.is_share and paired.sources == paired.n and np.isin(self.differences, (-1, 0, 1)).all():
            self.test = MCNEMAR
        else:
            self.test = SIGN_FLIP

    @cached_property
    def p(self) -> float | None:
        """The p value; None if it is unknown. A difference as small as rounding has 1."""
        if abs(self.documents.value) <= self.rounding > 0:
            return 1.0
        if self.spread is not None:
            return nan_to_none(crossed_p_value(self.of_documents, self.spread))
        if self.test == MCNEMAR:
            return mcnemar(self.won, self.lost)
        # Under the null, sources of unequal sizes need not be symmetric about zero, so the t test is used too
        return nan_to_none(max(sign_flip(self.sums).p, t_test(self.adjusted)))

    def detectable(self) -> float | None:
        """Return the smallest true difference that these documents detect with 80 % power; None if there is none."""
        if self.test == MCNEMAR:
            return mcnemar_detectable(self.paired.n, self.won + self.lost)
        smooth = t_detectable(self.adjusted.stderr, self.adjusted.freedom, self.span)
        if not math.isfinite(self.span):
            # With too few sources no pattern of signs is significant, whatever the differences
            return None if self.test == SIGN_FLIP and 2.0 ** (1 - len(self.sums)) > ALPHA else smooth
        # Where documents and runs hardly differ, the discreteness of a test over documents limits power more than the t
        found = smooth, sign_flip_detectable(self.sums, self.weights, self.documents.stderr, self.span)
        return None if None in found else max(one for one in found if one is not None)


def by_task(pairing: Pairing, rule: str) -> list[ScoredLine]:
    """Return a line for each task; for a measure with layers, of each document's mean over them."""
    measure = pairing.measure(rule)
    return [ScoredLine(task, *pairing.scores(task, rule), measure) for task in pairing.tasks]


def by_layer(pairing: Pairing, rule: str) -> list[ScoredLine]:
    """Return a line for each layer of each task."""
    measure = pairing.measure(rule)
    return [
        ScoredLine(task, *pairing.scores(task, rule, place), measure, layer)
        for task in pairing.tasks
        for place, layer in enumerate(measure.layers)
    ]


def line_name(task: str, layer: int | None) -> str:
    """Return a line's name, unique within its comparison."""
    return task if layer is None else f"{task} layer {layer}"


def line_label(label: Label, layer: int | None) -> Label:
    """Return the printed label of a line."""
    return label if layer is None else Label(*(f"{text}, layer {layer}" for text in label))


def nan_to_none(value: float) -> float | None:
    """Return a number, or None for NaN."""
    return None if math.isnan(value) else value


class Efficiency(NamedTuple):
    """Documents that accuracy needs for one that the outcome needs, at equal power."""

    times: float
    low: float
    """The 95 % interval."""
    high: float
    """Infinite where accuracy's difference may be zero."""


def efficiency(accuracy: Sequence[ScoredLine], other: Sequence[ScoredLine]) -> Efficiency | None:
    """Return how many times fewer documents an outcome needs than accuracy; None if no interval bounds it.

    Several runs of a side are taken as they are: the ratio is about documents, not about seeds.

    Args:
        accuracy: lines of tasks under accuracy.
        other: lines of the same tasks, in the same order, under the outcome.
    """
    first, second = (average([one.documents for one in lines]) for lines in (accuracy, other))
    if not (first.variance > 0 and second.variance > 0):
        return None
    a, b = first.value / first.stderr, second.value / second.stderr
    shared = _correlation(accuracy, other, first, second)
    found = _fieller(a, b, shared, t_quantile((1 + CONFIDENCE) / 2, min(first.freedom, second.freedom)))
    return None if found is None else Efficiency((b / a) ** 2 if a else math.inf, *found)


def _correlation(
    accuracy: Sequence[ScoredLine], other: Sequence[ScoredLine], first: Estimate, second: Estimate
) -> float:
    """Return the correlation of both average differences over samples of documents."""
    sums = [
        mean(one.differences / first.stderr + two.differences / second.stderr, one.paired.clusters, one.paired.strata)
        for one, two in zip(accuracy, other, strict=True)
    ]
    return max(-1.0, min(1.0, average(sums).variance / 2 - 1))


def _fieller(a: float, b: float, shared: float, quantile: float) -> tuple[float, float] | None:
    """Return the interval of (ratio of expectations, b over a)², of normal variables with deviations of one.

    None where b may be zero, or where every ratio is possible.
    """
    square = quantile**2
    if b**2 <= square:
        return None
    leading, half, last = a**2 - square, a * b - square * shared, b**2 - square
    root = math.sqrt(max(0.0, half**2 - leading * last))
    if leading == 0:
        return (last / (2 * half)) ** 2, math.inf
    ends = sorted(((half - root) / leading, (half + root) / leading), key=abs)
    return ends[0] ** 2, ends[1] ** 2 if leading > 0 else math.inf
