"""Several runs of each side: how much of a difference is seeds, and how much is documents.

In: scores of every run of a side on the same documents. Out: the difference of the sides' means, with the error that
holds for other seeds and other documents.

Runs and documents are crossed: every run answers every document. The variance of the difference has three parts,
seeds, documents, and what a seed does to a single document. The spread between the runs' scores holds the first and
the third, that between documents the second and the third; so the two are added and the third, estimated from the
residuals, is taken off once. This is how radiology compares readers on the same cases (Obuchowski and Rockette 1995;
Hillis 2007).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from evalkit.stats.estimates import Codes, Estimate, Floats, mean


class Spread(NamedTuple):
    """Parts of the variance of a difference, and Welch's test over runs alone."""

    seeds: float
    """Variance of the difference from the spread between runs: s_A² / K_A + s_B² / K_B. A side of one run adds
    nothing."""
    documents: float
    """Variance from the spread between documents, paired (and clustered, stratified)."""
    shared: float
    """What both of these hold, which counts once."""
    seeds_freedom: float
    """Welch's degrees of freedom."""
    stderr_a: float
    """Standard deviation between A's runs; not a number for a single one."""
    stderr_b: float


def spread(a: Floats, b: Floats, clusters: Codes | None = None, strata: Codes | None = None) -> Spread:
    """The parts of the variance of mean(b) - mean(a).

    Args:
        a: [runs of A, n] scores on the same documents.
        b: [runs of B, n].
        clusters: [n], as `estimates.mean` takes them.
        strata: [n].
    """
    runs = [(side.mean(axis=1), len(side)) for side in (a, b)]
    shared = 0.0
    for side in (a, b):
        if len(side) > 1:
            residuals = side - side.mean(axis=0)
            shared += sum(mean(row, clusters, strata).variance for row in residuals) / (len(side) * (len(side) - 1))
    seeds, freedom = between([scores for scores, _ in runs])
    documents = mean(b.mean(axis=0) - a.mean(axis=0), clusters, strata).variance
    deviations = [float(scores.std(ddof=1)) if count > 1 else math.nan for scores, count in runs]
    return Spread(seeds, documents, shared, freedom, *deviations)


def between(scores: list[Floats]) -> tuple[float, float]:
    """(variance of the difference of the sides' means, Welch's degrees of freedom), from the runs' scores alone."""
    parts = [(float(side.var(ddof=1)) / len(side), len(side) - 1) for side in scores if len(side) > 1]
    total, doubt = sum(part for part, _ in parts), sum(part**2 / freedom for part, freedom in parts)
    return total, total**2 / doubt if doubt > 0 else math.inf


def crossed(difference: float, parts: Spread, documents_freedom: float) -> Estimate:
    """The difference with the error that holds for other seeds and other documents alike."""
    variance = max(parts.seeds + parts.documents - parts.shared, parts.seeds, parts.documents)
    doubt = parts.documents**2 / documents_freedom
    if parts.seeds > 0:
        doubt += parts.seeds**2 / parts.seeds_freedom
    return Estimate(difference, variance, variance**2 / doubt if doubt > 0 else math.inf)
