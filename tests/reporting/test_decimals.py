"""Exact decimals, compared with the standard library's; the tolerance, compared with exact numbers."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.reporting.decimals import could_print, half_up, mean, of_float, parse_number, percent, to_text

decimals = st.decimals(min_value=-1000, max_value=1000, places=4, allow_nan=False)


@given(decimals, st.integers(0, 3), st.booleans())
def test_rounding_is_decimal_half_up_and_is_read_back(value: Decimal, digits: int, signed: bool) -> None:
    expected = value.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_UP)
    assert half_up(Fraction(value), digits) == Fraction(expected)
    assert to_text(Fraction(value), digits) == (str(expected) if expected else str(abs(expected)))
    assert parse_number(to_text(Fraction(value), digits, signed and bool(expected))) == Fraction(expected)


@given(st.floats(0, 1))
def test_a_float_is_the_decimal_it_prints_as(value: float) -> None:
    """41.15, the mean of the paper's best small model, prints as 41.1 by floats; the paper has 41.2."""
    assert (float(of_float(value)), of_float(value)) == (value, Fraction(repr(value)))
    assert (f"{41.15:.1f}", to_text(of_float(41.15), 1)) == ("41.1", "41.2")
    assert percent(0.4125) == percent(0.41249999999999998) == percent(3 * 0.1375) == "41.3"
    assert percent(-0.0024999999999999996, signed=True) == "-0.3"
    assert [percent(value, signed=True) for value in (-0.0004, 0.0004, -0.00004, -1e-9, 0)] == [
        "-0.04", "+0.04", "-0.004", "0.0", "0.0"]  # fmt: skip


@pytest.mark.parametrize("text", ["6O.1", "nan", "inf", "1e3", "1,5", ".5", "5.", "--1", "51.3*", "½"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        parse_number(text)
    assert [parse_number(missing) for missing in ("", " ", "-", "–", "—")] == [None] * 5


@given(st.lists(decimals, min_size=1, max_size=8), st.integers(1, 50))
def test_a_rounded_mean_is_possible_and_a_whole_unit_away_is_not(truth: list[Decimal], units: int) -> None:
    """Whatever the numbers behind the printed ones: rounding both honestly stays within the tolerance."""
    exact = [abs(Fraction(value)) for value in truth]
    printed = half_up(mean(exact), 1)
    assert could_print(printed, mean([half_up(value, 1) for value in exact]), 1)
    assert not could_print(printed + Fraction(units, 10), printed, 1)
    assert not could_print(printed, printed + Fraction(units, 10), 1)
