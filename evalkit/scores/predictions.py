"""Predictions of a rule: the choice with the highest score of each document.

In: scores of all choices. Out: a prediction for each document, the first choice in a tie, as in lm-eval.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class RuleChoices(NamedTuple):
    """Predictions of a rule, one entry per document."""

    starts: NDArray[np.int64]
    """First row of the document in the table."""
    prediction: NDArray[np.int64]
    """Index of the predicted choice."""
    tie: NDArray[np.bool_]
    """Whether several choices have the highest score."""


def best_choices(scores: Floats, choice: NDArray[np.int64]) -> RuleChoices:
    """Return the choice with the highest score of each document, the first one in a tie.

    Args:
        scores: [rows] scores under a rule.
        choice: [rows] index of each row's choice; 0 begins a document.
    """
    starts = np.flatnonzero(choice == 0)
    if not len(starts):
        return RuleChoices(starts, np.empty(0, np.int64), np.empty(0, bool))
    at_best = scores == np.repeat(np.maximum.reduceat(scores, starts), np.diff(np.append(starts, len(scores))))
    # The first row at the maximum, for each document
    position = np.where(at_best, choice, np.iinfo(np.int64).max)
    return RuleChoices(starts, np.minimum.reduceat(position, starts), np.add.reduceat(at_best.astype(int), starts) > 1)
