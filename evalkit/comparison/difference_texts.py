"""Differences, intervals and p values as texts."""

from __future__ import annotations

from evalkit.comparison.differences import Difference
from evalkit.comparison.units import Unit
from evalkit.reporting.decimals import fixed


def p_text(p: float | None) -> str:
    """Format a p value with three decimals."""
    if p is None:
        return "–"
    return "<0.001" if p < 0.0005 else fixed(p, 3)


def difference_text(one: Difference, unit: Unit) -> str:
    """Format a difference with its interval and p value."""
    sign = "" if one.p is not None and one.p < 0.0005 else "= "
    difference = f"{unit.difference(one.difference)}{unit.points}"
    return f"{difference} (95 % interval {interval_text(one, unit)}), p {sign}{p_text(one.p)}"


def interval_text(one: Difference, unit: Unit) -> str:
    """Format the interval of a difference."""
    return f"{unit.difference(one.low)} to {unit.difference(one.high)}"
