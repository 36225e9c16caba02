"""Scales: what a number measures, in which unit, and which direction is better.

A scale is declared once, with the measure that it is of. Metrics, measures of documents and stored numbers refer to it;
a unit is never inferred.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

FRACTION, PERCENT = "fraction", "percent"
"""Units of shares: from 0 to 1, and from 0 to 100."""
ACCURACY = "accuracy"
"""The outcome of a rule: right or wrong."""
_WHOLE: dict[str | None, float] = {FRACTION: 1.0, PERCENT: 100.0}
"""Unit of shares → the value of 100 %."""


@dataclass(frozen=True)
class Scale:
    """Name, unit and direction of numbers."""

    name: str
    """What is measured: "accuracy", "f1"."""
    unit: str | None
    """None: unknown."""
    higher_is_better: bool | None = True
    """None if neither direction is better."""
    bounds: tuple[float, float] | None = None
    """Smallest and largest possible value, which a share has by its unit; None if unbounded."""

    def __post_init__(self) -> None:
        if self.whole is None:
            return
        bounds = (0.0, self.whole)
        if self.bounds not in (None, bounds):
            raise ValueError(f"{self.name}: a {self.unit} is from 0 to {self.whole:g}, not within {self.bounds}")
        object.__setattr__(self, "bounds", bounds)

    @property
    def whole(self) -> float | None:
        """The value of 100 %: 1 for fractions, 100 for percentages; None for other units."""
        return _WHOLE.get(self.unit)

    @property
    def is_fraction(self) -> bool:
        """Whether differences are in points, and printed in percent."""
        return self.unit == FRACTION

    @property
    def direction(self) -> str:
        """Which direction is better, in words."""
        if self.higher_is_better is None:
            return "neither higher nor lower is better"
        return "higher is better" if self.higher_is_better else "lower is better"

    @property
    def span(self) -> float:
        """The largest possible difference of two numbers."""
        return self.bounds[1] - self.bounds[0] if self.bounds else inf

    @property
    def entries(self) -> dict[str, Any]:
        """The entries of results.json, JSON and CSV."""
        return {"metric": self.name, "unit": self.unit, "higher_is_better": self.higher_is_better}

    def stored(self, value: float | None, stderr: float | None) -> dict[str, Any]:
        """Return the entries of a number in results.json, JSON and CSV."""
        return self.entries | {"value": value, "stderr": stderr}

    def named(self, name: str) -> Scale:
        """Return the same scale of another measure."""
        return replace(self, name=name)


def stored_scale(entries: Mapping[str, Any]) -> Scale:
    """Return the scale of a number in results.json."""
    return Scale(entries["metric"], entries["unit"], entries["higher_is_better"])


CORRECT = Scale(ACCURACY, FRACTION)
"""Share of the documents whose gold answer a rule chooses."""
