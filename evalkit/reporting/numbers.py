"""The form of a number with its standard error: its scale, its decimals, "±", and the dash of an unknown error.

In: a number in its own unit, and its error or deviation. Out: texts for cells and sentences. No other module writes
"±" before a number, so that a change here changes every table, list, page and sentence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from evalkit.reporting.decimals import fixed, percent

UNKNOWN = "–"
PLUS_MINUS = "±"


@dataclass(frozen=True)
class NumberFormat:
    """How numbers of one kind, and their errors, are printed."""

    places: int
    """Decimals of a number."""
    whole: float | None = None
    """The value of 100 %, of numbers that are printed in percent."""
    more_of_errors: int = 0
    """Further decimals of an error."""

    def value(self, number: float | Fraction | None, signed: bool = False, more: int = 0) -> str:
        """Format a number with `more` further decimals; a dash if it is unknown."""
        places = self.places + more
        if self.whole is None or number is None or not math.isfinite(number):
            return fixed(number, places, signed)
        return percent(float(number) / self.whole, places, signed)

    def error(self, stderr: float | Fraction | None) -> str:
        """Format an error for a place that says what it is, such as a column of errors."""
        return self.value(stderr, more=self.more_of_errors)

    def spread(self, stderr: float | Fraction | None) -> str:
        """Format an error that follows its number; empty if it is unknown."""
        return "" if stderr is None else self.error(stderr)

    def with_error(self, number: float | None, stderr: float | None) -> str:
        """Format a number and, if known, its error: "67.0 ± 3.3"."""
        return self.value(number) + following(self.spread(stderr))

    def plus_minus(self, stderr: float | None) -> str:
        """Format an error that stands alone: "± 3.3"; a dash if it is unknown."""
        return following(self.spread(stderr)).lstrip() or UNKNOWN

    def columns(self, number: float | None, stderr: float | None) -> tuple[str, str]:
        """Format a number and its error for two columns: "67.0" and "± 3.3"."""
        return self.value(number), self.plus_minus(stderr)


SHARES = NumberFormat(1, whole=1.0)
"""Fractions, such as accuracies, in percent."""
PERCENTAGES = NumberFormat(2)
"""Scores from 0 to 100 that are stored with two decimals."""
MEANS = NumberFormat(3)
"""Means of log-likelihoods, bits and probabilities over documents."""
METRICS = NumberFormat(4)
"""Metrics of any unit."""


def following(spread: str) -> str:
    """Return a formatted error as it follows its number: " ± 3.3"; empty without one."""
    return f" {PLUS_MINUS} {spread}" if spread else ""
