"""Exact decimal arithmetic: rounding in all output, and parsing and averaging of the paper's numbers.

Rounding is to a fixed number of decimals, with halves away from zero ("half up"), as by hand. Floats would round 41.15
to 41.1, since the nearest double is below it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def parse_number(text: str) -> Fraction | None:
    """Parse a cell's number; None where the cell is empty or a dash.

    Raises:
        ValueError: it is neither. Exponents, nan and inf are not accepted.
    """
    text = text.strip()
    if text in ("", "-", "–", "—"):
        return None
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"'{text}' is not a number")
    return Fraction(text)


def of_float(value: float | Fraction) -> Fraction:
    """Convert a float to the decimal that it prints as: 0.4125, not the nearest double."""
    return Fraction(repr(float(value)))


def half_up(value: Fraction, places: int) -> Fraction:
    """Round to `places` decimals, with halves away from zero."""
    scale = 10**places
    units = (abs(value) * scale + Fraction(1, 2)) // 1
    return Fraction(units if value >= 0 else -units, scale)


def to_text(value: Fraction, places: int, signed: bool = False) -> str:
    """Format a number with exactly `places` decimals; never as "-0.0".

    If `signed`, a number that rounds to zero has up to two more decimals, so that its sign is shown: "-0.04". Zero has
    no sign.
    """
    rounded = half_up(value, places)
    if signed and not rounded:
        finer = next((more for more in (places + 1, places + 2) if half_up(value, more)), places)
        return to_text(value, finer, signed=finer > places)
    digits = str(int(abs(rounded) * 10**places)).rjust(places + 1, "0")
    text = f"{digits[:-places]}.{digits[-places:]}" if places else digits
    return ("-" if rounded < 0 else "+" if signed else "") + text


def fixed(value: float | Fraction | None, places: int, signed: bool = False) -> str:
    """Format a number in its own unit; a dash for None and NaN, a signed ∞ for infinities."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "+∞" if value > 0 else "-∞"
    return to_text(of_float(value), places, signed)


def signed_number(value: float, places: int) -> str:
    """Format a number with its sign, which rounding to zero does not hide: "-4e-05"."""
    if value and abs(value) < 0.5 * 10.0**-places:
        return f"{value:+.0e}"
    return fixed(value, places, signed=True)


def percent(fraction: float, places: int = 1, signed: bool = False) -> str:
    """Format a fraction in percent; floating-point noise does not change the rounding of a half."""
    return to_text(100 * of_float(round(fraction, 12)), places, signed)


def mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def could_print(printed: Fraction, recomputed: Fraction, places: int) -> bool:
    """Return whether a printed mean may be right although the mean of the printed parts rounds to another number.

    Each printed part has a rounding error of up to half a unit, and so has their mean; the printed mean was itself
    rounded. So both can be right only if they differ by less than one unit.
    """
    return abs(printed - recomputed) < Fraction(1, 10**places)
