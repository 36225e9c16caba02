"""A comparison on a sample of documents borrows strength from earlier runs on more of them.

In: the differences of a sample's documents, and the scores of earlier runs, of related checkpoints, on these and on all
documents. Out: the regression estimator of the mean difference over documents like all of them: what the earlier runs
show about how the sample differs from the rest is no error (Cochran, Sampling Techniques, 7; control variates).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evalkit.benchmarks.outcomes import Comparable
from evalkit.comparison.pairing import PairedTask, identity_of
from evalkit.errors import UsageError
from evalkit.runs.score_table import sources_of, weighted
from evalkit.stats.estimates import Codes, Estimate, Floats, mean


@dataclass(frozen=True)
class Borrowed:
    """Scores of earlier runs."""

    sampled: Floats
    """[runs, n], of the sample's documents."""
    every: Floats
    """[runs, N], of all their documents."""
    clusters: Codes | None
    strata: Codes | None
    """[N], as of `PairedTask`."""

    def adjusted(self, differences: Floats) -> tuple[Floats, Estimate]:
        """Return [n] differences without what the earlier runs explain of their mean, and the explained part's mean.

        About their mean they are residuals over 1 less the leverage, as without the document itself (HC3): a document
        with an extreme score pulls the regression to it, and its own residual is too small (MacKinnon and White 1985).
        """
        centred = self.sampled - self.sampled.mean(axis=1, keepdims=True)
        weights = np.linalg.pinv(centred @ centred.T) @ centred
        slopes = weights @ differences
        leverage = (centred * weights).sum(axis=0) + 1 / len(differences)
        residuals = (differences - differences.mean() - slopes @ centred) / np.maximum(1 - leverage, 1e-9)
        shift = slopes @ (self.sampled.mean(axis=1) - self.every.mean(axis=1))
        value = differences.mean() - shift
        return value + residuals - residuals.mean(), mean(slopes @ self.every, self.clusters, self.strata)

    def with_errors(self, residual: Estimate, explained: Estimate, sources: int) -> Estimate:
        """Return the estimate of the mean, with the residual's error on the sample and the explained part's on all.

        A degree of freedom is lost for each run.
        """
        lost, freedom = len(self.sampled), residual.freedom - len(self.sampled)
        if sources - 1 - lost < 1 or not freedom > 0:
            return residual._replace(variance=math.nan, freedom=math.nan)
        variance = residual.variance * (sources - 1) / (sources - 1 - lost) + explained.variance
        return residual._replace(variance=variance, freedom=freedom)


def borrowed(task: PairedTask, first: Comparable, earlier: Sequence[Comparable], rule: str) -> Borrowed:
    """Return the scores of earlier runs on a paired task of which `first` is a run.

    Raises `UsageError` if an earlier run lacks a document of the sample, or has scores by layer.
    """
    name, sample = task.task, first.documents.iloc[task.rows[0]]
    tables = [run.documents[run.documents["task"] == name] for run in earlier]
    column = identity_of(name, [sample, *tables], (first, *earlier))
    asked, *keys = (table.set_index(["subtask", column]).index for table in (sample, *tables))
    sampled, every = [], []
    for run, table, key in zip(earlier, tables, keys, strict=True):
        places, order = key.get_indexer(asked), key.get_indexer(keys[0])
        if (places < 0).any():
            raise UsageError(f"--given {run.run.folder.name}: it lacks documents of {name}; give runs of all documents")
        if len(key) != len(keys[0]) or (order < 0).any():
            runs = f"{earlier[0].run.folder.name} and {run.run.folder.name}"
            raise UsageError(f"--given: {runs} have different documents of {name}; give runs of the same documents")
        scores = run.by_rule(rule)[np.asarray(table.index)]
        if scores.ndim > 1:
            raise UsageError(f"--given is for scores of documents, and {rule} has one for each layer")
        sampled.append(weighted(scores[places], sample))
        every.append(weighted(scores[order], tables[0]))
    return Borrowed(np.array(sampled), np.array(every), *sources_of(tables[0]))
