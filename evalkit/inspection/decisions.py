"""Decisions of a rule about single documents. In: a task's view. Out: arrays, one entry for each document."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.document_views import ChoiceView
from evalkit.scores.predictions import Floats, best_choices
from evalkit.scores.rules import find_rule, row_scores

Flags = NDArray[np.bool_]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Decisions:
    """Decisions of a rule, [documents] each, in the order of the task's score table."""

    starts: Places
    """The document's first row in the table."""
    prediction: Places
    """Index of the predicted choice; the first one in a tie, as in lm-eval."""
    tie: Flags
    """Whether several choices have the highest score."""
    right: Flags
    """Whether the prediction is the gold choice."""
    margin: Floats
    """Score of the gold choice less the highest score of another choice, in the rule's unit: negative where the
    prediction is wrong, 0 in a tie with the gold choice, inf for a document with one choice."""


def decisions(view: ChoiceView, rule: str) -> Decisions:
    """Return the decisions of a rule about the documents of a task.

    Raises:
        UnknownNameError: there is no such rule.
        UsageError: the run lacks the scores that the rule needs.
    """
    table = view.scores
    scores = row_scores(table, find_rule(rule))
    starts, prediction, tie = best_choices(scores, table["choice"].to_numpy())
    gold = table["gold"].to_numpy()[starts]
    margin = _margins(scores, starts, starts + gold)
    return Decisions(starts, prediction, tie, prediction == gold, margin)


def _margins(scores: Floats, starts: Places, gold_rows: Places) -> Floats:
    if not len(starts):
        return np.empty(0)
    others = scores.copy()
    others[gold_rows] = -np.inf
    best = np.maximum.reduceat(others, starts)
    gold = scores[gold_rows]
    # Of two infinities, whose difference is no number, both are the worst possible score: a tie
    margin = np.subtract(gold, best, out=np.zeros(len(gold)), where=gold != best)
    return np.where(np.diff(np.append(starts, len(scores))) == 1, np.inf, margin)
