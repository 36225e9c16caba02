"""Exact decimals: how every table and page rounds, and how the paper's numbers are read and averaged.

Rounding is to a fixed number of decimals, a half going away from zero ("half up"), as a reader with a pencil does it;
floats would send 41.15 to 41.1, since the nearest double lies below it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")

MISSING = ("", "-", "–", "—")
"""How a cell without a number is written in a file."""


def parse_number(text: str) -> Fraction | None:
    """The number that a cell's text says; None where the cell is empty or a dash.

    Raises:
        ValueError: it is neither. Exponents, nan and inf are no numbers of a table.
    """
    text = text.strip()
    if text in MISSING:
        return None
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"'{text}' is not a number")
    return Fraction(text)


def of_float(value: float) -> Fraction:
    """The decimal that a float prints as: 0.4125 is meant, not the double nearest to it."""
    return Fraction(repr(float(value)))


def half_up(value: Fraction, places: int) -> Fraction:
    """Rounded to `places` decimals, a half away from zero."""
    scale = 10**places
    units = (abs(value) * scale + Fraction(1, 2)) // 1
    return Fraction(units if value >= 0 else -units, scale)


def to_text(value: Fraction, places: int, signed: bool = False) -> str:
    """The rounded number with exactly `places` decimals; never "-0.0"."""
    rounded = half_up(value, places)
    units = int(abs(rounded) * 10**places)
    digits = str(units).rjust(places + 1, "0")
    text = f"{digits[:-places]}.{digits[-places:]}" if places else digits
    sign = "-" if rounded < 0 else "+" if signed else ""
    return sign + text


def fixed(value: float | None, places: int, signed: bool = False) -> str:
    """A number in its own unit as every page prints it; a dash where there is none, infinities by their sign."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "+∞" if value > 0 else "-∞"
    return to_text(of_float(value), places, signed)


def percent(fraction: float, places: int = 1, signed: bool = False) -> str:
    """A fraction in percent as every page and table prints it; noise of floating-point sums does not move a half."""
    return to_text(100 * of_float(round(fraction, 12)), places, signed)


def mean(values: Sequence[Fraction]) -> Fraction:
    """The unweighted mean, exact."""
    return sum(values, Fraction(0)) / len(values)


def half_unit(places: int) -> Fraction:
    """Half of the last printed decimal: how far a printed number may lie from the number behind it."""
    return Fraction(1, 2 * 10**places)


def could_print(printed: Fraction, recomputed: Fraction, places: int) -> bool:
    """Whether a printed mean may be right although the mean of the printed parts rounds to something else.

    Each printed part stands for a number up to half a unit away, so their mean is known to half a unit; the printed
    mean was itself rounded. Both can be true only where they are less than one unit (two halves) apart.
    """
    return abs(printed - recomputed) < 2 * half_unit(places)
