"""Continuous outcomes: what a score table says of each document beyond right or wrong.

Names, formulas and keys, without numpy or pandas; `outcome_values.py` computes them.

Notation: L(k) is the log-likelihood of choice k's continuation in nats, g the gold choice, p the softmax of L over the
choices, s a rule's score. Sources: Brier (1950) in its original form, the sum over all choices, as lm-eval's
`brier_score`; log loss, Good (1952).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evalkit.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    pass


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
    """Return the key of an outcome under a rule; accuracy's is the rule, None where none is given.

    Raises:
        UnknownNameError: there is no such outcome.
        UsageError: a rule is given to an outcome that depends on none.
    """
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
