"""How scores and their differences are printed: shares in percent and points, others in their own unit.

In: a measure, and the errors that stand beside the numbers. Out: texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from evalkit.benchmarks.outcomes import Measure
from evalkit.reporting.decimals import of_float, percent, to_text

_PLACES, _MOST_PLACES = 3, 12


@dataclass(frozen=True)
class Unit:
    """Of one page."""

    places: int | None
    """Decimals; None for shares, which are printed in percent."""

    @property
    def factor(self) -> float:
        """Of a score, before it is drawn."""
        return 100 if self.places is None else 1

    @property
    def points(self) -> str:
        """What follows a difference: " points", or nothing."""
        return " points" if self.places is None else ""

    def value(self, score: float, signed: bool = False) -> str:
        """A score, or a difference (signed)."""
        if not math.isfinite(score):
            return "–" if math.isnan(score) else "+∞" if score > 0 else "-∞"
        if self.places is None:
            return percent(score, signed=signed)
        return to_text(of_float(score), self.places, signed)

    def difference(self, difference: float) -> str:
        """Signed; nothing is not negative."""
        return self.value(difference, signed=True)

    def error(self, stderr: float | None) -> str:
        """With one decimal more; a dash where it is not known."""
        if stderr is None or math.isnan(stderr):
            return "–"
        return percent(stderr, 2) if self.places is None else to_text(of_float(stderr), self.places + 1)


def unit_of(measure: Measure, errors: Iterable[float | None]) -> Unit:
    """The unit of a page: of others than shares, so many decimals that the smallest error has two digits."""
    if measure.is_share:
        return Unit(None)
    least = min((error for error in errors if error is not None and 0 < error < math.inf), default=None)
    places = _PLACES if least is None else 1 - math.floor(math.log10(least))
    return Unit(max(0, min(places, _MOST_PLACES)))
