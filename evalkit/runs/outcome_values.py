"""Values of continuous outcomes.

In: a score table. Out: a number for each document. Pure functions of a stored table: no model, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evalkit.errors import RunError, UsageError
from evalkit.runs.outcomes import MARGIN, ContinuousOutcome
from evalkit.runs.rules import Rule, row_scores
from evalkit.runs.score_table import why_unsized

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]


def document_outcomes(table: pd.DataFrame, outcome: ContinuousOutcome, rule: Rule) -> Floats:
    """Return the outcome of each document, [documents] in the table's order.

    Args:
        table: a score table; the rows of a document are adjacent, its choices in order.
        outcome: one of `OUTCOMES`.
        rule: that of a margin; not used by the others.

    Raises:
        UsageError: the table lacks a segment that the rule needs or the options' lengths, or a margin does not exist.
        RunError: the table is damaged.
    """
    choice = table["choice"].to_numpy()
    starts = np.flatnonzero(choice == 0)
    counts = np.diff(np.append(starts, len(table)))
    gold = starts + table["gold"].to_numpy()[starts]
    if (gold >= starts + counts).any():
        raise RunError("the score table is damaged: a gold answer is not one of its document's choices")
    if outcome.name == MARGIN:
        return _margins(table, row_scores(table, rule), starts, gold, rule)
    likelihood = table["ll_continuation"].to_numpy(float)
    if not np.isfinite(likelihood).all():
        raise RunError("the score table is damaged: a continuation has no finite log-likelihood")
    return _OF_LIKELIHOODS[outcome.name](table, likelihood, starts, counts, gold)


def _bits_per_byte(table: pd.DataFrame, likelihood: Floats, starts: Codes, counts: Codes, gold: Codes) -> Floats:
    if unsized := why_unsized(table):
        raise UsageError(f"outcome bits_per_byte needs {unsized}, or use log_loss, brier or margin")
    size = table["bytes"].to_numpy(float)[gold]
    if not (size > 0).all():
        raise RunError("the score table is damaged: a gold answer has no bytes")
    bits: Floats = -likelihood[gold] / (math.log(2) * size)
    return bits


def _log_loss(table: pd.DataFrame, likelihood: Floats, starts: Codes, counts: Codes, gold: Codes) -> Floats:
    return -_log_probabilities(likelihood, starts, counts)[gold]


def _brier(table: pd.DataFrame, likelihood: Floats, starts: Codes, counts: Codes, gold: Codes) -> Floats:
    distance = np.exp(_log_probabilities(likelihood, starts, counts))
    distance[gold] -= 1
    score: Floats = np.add.reduceat(distance**2, starts) if len(starts) else np.empty(0)
    return score


_OF_LIKELIHOODS: dict[str, Callable[[pd.DataFrame, Floats, Codes, Codes, Codes], Floats]] = {
    "bits_per_byte": _bits_per_byte,
    "log_loss": _log_loss,
    "brier": _brier,
}


def _log_probabilities(likelihood: Floats, starts: Codes, counts: Codes) -> Floats:
    """Return [rows] logarithms of the softmax over each document's choices."""
    if not len(starts):
        return likelihood
    shifted = likelihood - np.repeat(np.maximum.reduceat(likelihood, starts), counts)
    normal: Floats = shifted - np.repeat(np.log(np.add.reduceat(np.exp(shifted), starts)), counts)
    return normal


def _margins(table: pd.DataFrame, scores: Floats, starts: Codes, gold: Codes, rule: Rule) -> Floats:
    if not len(starts):
        return np.empty(0)
    others = scores.copy()
    others[gold] = -np.inf
    with np.errstate(invalid="ignore"):
        margins: Floats = scores[gold] - np.maximum.reduceat(others, starts)
    if (missing := np.flatnonzero(~np.isfinite(margins))).size:
        row = table.iloc[starts[missing[0]]]
        raise UsageError(
            f"{row['subtask']} document {row['doc_id']} has no margin under rule {rule.name}: it has a single choice, "
            "or a choice without a finite score; use --outcome bits_per_byte, log_loss or brier"
        )
    return margins
