"""Continuous outcomes: what a score table says of each document beyond right or wrong.

In: a score table. Out: a number for each document; and the outcomes' names, formulas and keys, without numpy or pandas.

Notation: L(k) is the log-likelihood of choice k's continuation in nats, g the gold choice, p the softmax of L over the
choices, s a rule's score. Sources: Brier (1950) in its original form, the sum over all choices, as lm-eval's
`brier_score`; log loss, Good (1952).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evalkit.errors import RunError, UnknownNameError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

    from evalkit.runs.rules import Floats, Rule

    Places = NDArray[np.int64]

ACCURACY = "accuracy"
"""The outcome of a rule: right or wrong."""
MARGIN = "margin"


@dataclass(frozen=True)
class ContinuousOutcome:
    """A continuous outcome."""

    name: str
    title: str
    """Name in texts."""
    description: str
    formula: str
    higher_is_better: bool
    bounds: tuple[float, float] | None
    """Smallest and largest possible value; None if unbounded."""


OUTCOMES: dict[str, ContinuousOutcome] = {
    one.name: one
    for one in (
        ContinuousOutcome(
            "bits_per_byte",
            "bits per byte",
            "negative log-likelihood of the gold answer in bits per UTF-8 byte of it",
            "-L(g) / (ln 2 bytes(g))",
            False,
            None,
        ),
        ContinuousOutcome(
            "log_loss",
            "log loss",
            "negative logarithm, in nats, of the gold answer's probability among the choices",
            "-ln p(g)",
            False,
            None,
        ),
        ContinuousOutcome(
            "brier",
            "Brier score",
            "squared distance of the choices' probabilities from right and wrong, summed over the choices",
            "sum_k (p(k) - [k = g])^2",
            False,
            (0.0, 2.0),
        ),
        ContinuousOutcome(
            MARGIN,
            "margin",
            "the rule's score of the gold answer less that of the best other choice; positive where the rule is right",
            "s(g) - max_{k != g} s(k)",
            True,
            None,
        ),
    )
}


def outcome_of(key: str) -> tuple[ContinuousOutcome, str | None] | None:
    """Return the outcome that a key names, and the rule of a margin if the key has one; None if it names a rule.

    Keys are the outcomes' names, and "margin:RULE".
    """
    name, _, rule = key.partition(":")
    if name == MARGIN:
        return OUTCOMES[MARGIN], rule or None
    return (OUTCOMES[key], None) if key in OUTCOMES else None


def outcome_key(outcome: str | None, rule: str | None) -> str | None:
    """Return the key of an outcome under a rule; accuracy's is the rule, None where none is given."""
    if outcome in (None, ACCURACY):
        return rule
    if outcome not in OUTCOMES:
        raise UnknownNameError("outcome", str(outcome), (ACCURACY, *OUTCOMES))
    if outcome == MARGIN:
        return f"{MARGIN}:{rule}" if rule else MARGIN
    if rule:
        raise UsageError(f"--outcome {outcome} does not depend on a rule; leave out --rule {rule}")
    return outcome


def with_default_rule(key: str | None, rule: str | None) -> str | None:
    """Return a key under a default rule: that of accuracy or of a margin that names none."""
    if key is None:
        return rule
    return f"{MARGIN}:{rule}" if key == MARGIN and rule else key


def document_outcomes(table: pd.DataFrame, outcome: ContinuousOutcome, rule: Rule) -> Floats:
    """Return the outcome of each document, [documents] in the table's order.

    Args:
        table: a score table; the rows of a document are adjacent, its choices in order.
        outcome: one of `OUTCOMES`.
        rule: that of a margin; not used by the others.
    """
    import numpy as np

    from evalkit.runs.rules import row_scores
    from evalkit.runs.score_table import why_unsized

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
    if outcome.name == "bits_per_byte":
        if unsized := why_unsized(table):
            raise UsageError(f"outcome bits_per_byte needs {unsized}, or use log_loss, brier or margin")
        size = table["bytes"].to_numpy(float)[gold]
        if not (size > 0).all():
            raise RunError("the score table is damaged: a gold answer has no bytes")
        bits: Floats = -likelihood[gold] / (math.log(2) * size)
        return bits
    shifted = likelihood - np.repeat(np.maximum.reduceat(likelihood, starts), counts)
    log_probability: Floats = shifted - np.repeat(np.log(np.add.reduceat(np.exp(shifted), starts)), counts)
    if outcome.name == "log_loss":
        loss: Floats = -log_probability[gold]
        return loss
    distance = np.exp(log_probability)
    distance[gold] -= 1
    brier: Floats = np.add.reduceat(distance**2, starts)
    return brier


def _margins(table: pd.DataFrame, scores: Floats, starts: Places, gold: Places, rule: Rule) -> Floats:
    import numpy as np

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
