"""Intervals of differences, as if two more sources had been compared: one won and one lost.

In: `Estimate`s of mean differences of scores. Out: `Estimate`s whose intervals neither cover too little where few
documents differ nor shrink to nothing where none does (Bonett and Price 2012).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from evalkit.stats.estimates import Estimate, Floats, interval


def with_one_won_and_one_lost(estimate: Estimate, n: float, size: float = 1.0) -> Estimate:
    """A mean difference of scores, as if two more sources had been compared: one won, one lost.

    An interval about the difference itself covers too little where few documents differ, and has no length where none
    does, or where all are won. Bonett and Price (2012) add a half to each cell of the 2 x 2 table, which is to add
    these two. The degrees of freedom stay, which makes up for few documents: where all n documents are won, the t has
    nearly the p value of the exact test.

    Args:
        estimate: of a mean of differences.
        n: how many sources it is of, documents that share one counted once.
        size: by how much the two are won and lost, see `size_of_differences`; 1 for answers that are right or wrong.
    """
    observed = estimate.variance * n**2 / (n + 2) ** 2
    # Squares of the two about the mean, and of the mean's own move
    variance = observed + 2 * (size**2 + n * estimate.value**2 / (n + 2)) / (n + 2) ** 2
    return Estimate(estimate.value * n / (n + 2), variance, estimate.freedom)


def adjusted_average(
    whole: Estimate, tasks: Sequence[Estimate], sources: Sequence[float], sizes: Sequence[float]
) -> Estimate:
    """An unweighted mean over tasks as if two more sources had been compared in the pool of all, one won and one lost.

    Args:
        whole: the mean over the tasks as they are (`average`).
        tasks: of each, as if two more had been compared in it.
        sources: of each task.
        sizes: of each task's differences, see `size_of_differences`.
    """
    return no_better_known_than(with_one_won_and_one_lost(whole, *pooled(sources, sizes)), tasks)


def no_better_known_than(whole: Estimate, tasks: Sequence[Estimate]) -> Estimate:
    """An average whose interval is at least as long as each task by itself makes it.

    Satterthwaite's degrees of freedom take a variance that is small by chance for one that is well known: three
    documents that are all won would tell more in an average than alone.

    Args:
        whole: of an unweighted mean over tasks; of shares as if two more sources had been compared in the pool of all.
        tasks: of each; of shares as if two more had been compared in it.
    """
    shares = [task._replace(value=whole.value, variance=task.variance / len(tasks) ** 2) for task in tasks]
    if any(math.isnan(one.variance) for one in (whole, *shares)):
        return whole
    return max([whole, *shares], key=lambda one: interval(one).high)


def size_of_differences(sums: Floats, weights: Floats, none: float = 1.0) -> float:
    """By how much sources differ where they do (root mean square).

    Of graded scores, or of many documents of one source, a whole source won would outweigh a task.

    Args:
        sums: [clusters] of differences.
        weights: [clusters] documents.
        none: what is returned where none does: the most by which they could.
    """
    differ = sums != 0
    return math.sqrt(float((sums**2).sum() / (weights[differ] ** 2).sum())) if differ.any() else none


def pooled(sources: Sequence[float], sizes: Sequence[float]) -> tuple[float, float]:
    """(sources, size) with which `with_one_won_and_one_lost` takes the unweighted mean over several tasks.

    Two sources are added to the pool of all tasks: two in each would pull the mean over many small tasks to zero.

    Args:
        sources: of each task; their pool is as large as so many sources in one task would have to be.
        sizes: of each task's differences.
    """
    shares = 1 / np.array(sources, float)
    size = float((shares * np.array(sizes) ** 2).sum() / shares.sum())
    return len(shares) ** 2 / float(shares.sum()), math.sqrt(size)
