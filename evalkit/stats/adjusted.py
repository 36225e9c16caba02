"""Adjusted confidence intervals of paired differences (Bonett and Price 2012).

In: `Estimate`s of mean differences of scores. Out: `Estimate`s with two pseudo-observations added, one source won and
one lost. Their intervals neither cover too little where few documents differ nor have zero length where none does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from evalkit.stats.estimates import CONFIDENCE, Estimate, Floats, by_sample, parts_of_average, t_quantile


def with_one_won_and_one_lost(estimate: Estimate, n: float, size: float = 1.0) -> Estimate:
    """Add two sources to a mean difference of scores, one won and one lost.

    An interval about the difference itself covers too little where few documents differ, and has zero length where none
    does, or where all are won. Bonett and Price (2012) add a half to each cell of the 2 x 2 table, which is equivalent
    to these two sources. The degrees of freedom are unchanged, which compensates for few documents: where all n
    documents are won, the t test has nearly the p value of the exact test.

    Args:
        estimate: of a mean of differences.
        n: number of sources; documents that share a source count once.
        size: by how much the two are won and lost, see `size_of_differences`; 1 for answers that are right or wrong.
    """
    observed = estimate.variance * n**2 / (n + 2) ** 2
    # Squares of the two about the mean, and of the shift of the mean
    variance = observed + 2 * (size**2 + n * estimate.value**2 / (n + 2)) / (n + 2) ** 2
    return Estimate(estimate.value * n / (n + 2), variance, estimate.freedom)


def adjusted_average(
    whole: Estimate,
    tasks: Sequence[Estimate],
    sources: Sequence[float],
    sizes: Sequence[float],
    level: float = 1 - CONFIDENCE,
    samples: Sequence[str] = (),
) -> Estimate:
    """Add two sources, one won and one lost, to an unweighted mean over tasks (to the pool of all tasks).

    Args:
        whole: mean over the tasks without adjustment (`average`).
        tasks: each task's adjusted estimate (`with_one_won_and_one_lost`).
        sources: number of sources of each task.
        sizes: size of each task's differences, see `size_of_differences`.
        level: of the interval, with which it misses.
        samples: the name of each task's sample, as of `average`.
    """
    adjusted = with_one_won_and_one_lost(whole, *pooled(sources, sizes, samples))
    return at_least_task_intervals(adjusted, tasks, level, samples)


def at_least_task_intervals(
    whole: Estimate, tasks: Sequence[Estimate], level: float = 1 - CONFIDENCE, samples: Sequence[str] = ()
) -> Estimate:
    """Widen an average's interval to at least the length that each task's (or sample's) own error contributes.

    Satterthwaite's degrees of freedom treat a variance that is small by chance as well known: three documents that are
    all won would be stronger evidence in an average than alone.

    Args:
        whole: of an unweighted mean over tasks; of shares, adjusted.
        tasks: of each task; of shares, adjusted.
        level: of the interval, with which it misses.
        samples: the name of each task's sample, as of `average`.
    """
    parts = parts_of_average(tasks, samples)
    shares = [whole._replace(variance=part.variance, freedom=part.freedom) for part in parts]
    if any(math.isnan(estimate.variance) for estimate in (whole, *shares)):
        return whole
    return max([whole, *shares], key=lambda share: t_quantile(1 - level / 2, share.freedom) * share.stderr)


def size_of_differences(sums: Floats, weights: Floats, none: float = 1.0) -> float:
    """Return the root mean square of the sources' differences that are not zero.

    The sources that are added have this size: with graded scores, or many documents of one source, a source won by the
    largest possible difference would outweigh a task.

    Args:
        sums: [clusters] sums of differences.
        weights: [clusters] documents.
        none: returned where no source differs: the largest possible difference.
    """
    differ = sums != 0
    return math.sqrt(float((sums**2).sum() / (weights[differ] ** 2).sum())) if differ.any() else none


def pooled(sources: Sequence[float], sizes: Sequence[float], samples: Sequence[str] = ()) -> tuple[float, float]:
    """Return the (sources, size) that `with_one_won_and_one_lost` needs for the unweighted mean over several tasks.

    Two sources are added to the pool of all tasks: two in each would pull the mean over many small tasks to zero.

    Args:
        sources: number of sources of each task; the pool's is the number with the same error in a single task.
        sizes: size of each task's differences.
        samples: the name of each task's sample, as of `average`.
    """
    # A task's error is as 1 / √n; those of one sample add
    shares = np.array([sum(n**-0.5 for n in group) ** 2 for group in by_sample(sources, samples)])
    squares = np.array([fmean(size**2 for size in group) for group in by_sample(sizes, samples)])
    return len(sources) ** 2 / float(shares.sum()), math.sqrt(float((shares * squares).sum() / shares.sum()))
