"""Number formats of scores and differences: shares in percent and points, other measures in their unit.

In: a measure, and the standard errors printed with the numbers. Out: texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from evalkit.benchmarks.outcomes import Measure
from evalkit.reporting.decimals import fixed, percent

_PLACES, _MOST_PLACES = 3, 12


@dataclass(frozen=True)
class Unit:
    """Unit and decimals of the numbers in one report."""

    places: int | None
    """Decimals; None for shares, which are printed in percent."""

    @property
    def factor(self) -> float:
        """Factor that a score is multiplied by in figures."""
        return 100 if self.places is None else 1

    @property
    def points(self) -> str:
        """Suffix of a difference: " points", or nothing."""
        return " points" if self.places is None else ""

    def value(self, score: float, signed: bool = False) -> str:
        """Format a score, or a difference (signed)."""
        if self.places is None and math.isfinite(score):
            return percent(score, signed=signed)
        return fixed(score, self.places or 0, signed)

    def difference(self, difference: float) -> str:
        """Format a difference with its sign; zero is never negative."""
        return self.value(difference, signed=True)

    def error(self, stderr: float | None) -> str:
        """Format a standard error with one more decimal; a dash if it is unknown."""
        if self.places is None and stderr is not None and math.isfinite(stderr):
            return percent(stderr, 2)
        return fixed(stderr, (self.places or 0) + 1)


def p_text(p: float | None) -> str:
    """Format a p value with three decimals."""
    if p is None:
        return "–"
    return "<0.001" if p < 0.0005 else fixed(p, 3)


def unit_of(measure: Measure, errors: Iterable[float | None]) -> Unit:
    """Return the unit of a report. Measures other than shares have decimals for two digits of the smallest error."""
    if measure.is_share:
        return Unit(None)
    least = min((error for error in errors if error is not None and 0 < error < math.inf), default=None)
    places = _PLACES if least is None else 1 - math.floor(math.log10(least))
    return Unit(max(0, min(places, _MOST_PLACES)))
