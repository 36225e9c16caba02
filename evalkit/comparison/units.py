"""How scores and their differences are printed: shares in percent and points, others in their own unit.

In: a measure, and the errors that stand beside the numbers. Out: texts.
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
        if self.places is None and math.isfinite(score):
            return percent(score, signed=signed)
        return fixed(score, self.places or 0, signed)

    def difference(self, difference: float) -> str:
        """Signed; nothing is not negative."""
        return self.value(difference, signed=True)

    def error(self, stderr: float | None) -> str:
        """With one decimal more; a dash where it is not known."""
        if self.places is None and stderr is not None and math.isfinite(stderr):
            return percent(stderr, 2)
        return fixed(stderr, (self.places or 0) + 1)


def unit_of(measure: Measure, errors: Iterable[float | None]) -> Unit:
    """The unit of a page: of others than shares, so many decimals that the smallest error has two digits."""
    if measure.is_share:
        return Unit(None)
    least = min((error for error in errors if error is not None and 0 < error < math.inf), default=None)
    places = _PLACES if least is None else 1 - math.floor(math.log10(least))
    return Unit(max(0, min(places, _MOST_PLACES)))
