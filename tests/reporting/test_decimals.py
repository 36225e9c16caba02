"""Exact decimals, compared with the standard library's; the tolerance, compared with exact numbers."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.reporting.decimals import could_print, half_up, mean, of_float, parse_number, percent, to_text

decimals = st.decimals(min_value=-1000, max_value=1000, places=4, allow_nan=False)
places = st.integers(0, 3)


@given(decimals, places)
def test_rounding_is_decimal_half_up(value: Decimal, digits: int) -> None:
    expected = value.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_UP)
    assert half_up(Fraction(value), digits) == Fraction(expected)
    assert to_text(Fraction(value), digits) == (str(expected) if expected else str(abs(expected)))


@given(decimals, places)
def test_what_is_written_is_read_back(value: Decimal, digits: int) -> None:
    for signed in (False, True):
        assert parse_number(to_text(Fraction(value), digits, signed)) == half_up(Fraction(value), digits)


def test_halves_that_floats_send_down() -> None:
    """41.15 is the mean of the paper's best small model, which prints 41.2."""
    assert f"{41.15:.1f}" == "41.1"
    assert to_text(of_float(41.15), 1) == "41.2"
    assert f"{0.125:.2f}" == "0.12"
    assert to_text(of_float(0.125), 2) == "0.13"
    assert to_text(Fraction(-1, 100), 1) == "0.0"
    assert to_text(Fraction(-1, 100), 1, signed=True) == "+0.0"


@given(st.floats(0, 1))
def test_a_float_is_the_decimal_it_prints_as(value: float) -> None:
    assert float(of_float(value)) == value
    assert of_float(value) == Fraction(repr(value))


@pytest.mark.parametrize("text", ["6O.1", "nan", "inf", "1e3", "1,5", ".5", "5.", "--1", "51.3*", "½"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        parse_number(text)


@pytest.mark.parametrize("text", ["", " ", "-", "–", "—"])
def test_missing_is_never_zero(text: str) -> None:
    assert parse_number(text) is None


@given(st.lists(decimals, min_size=1, max_size=8))
def test_a_mean_rounded_from_the_truth_is_always_possible(truth: list[Decimal]) -> None:
    """Whatever the numbers behind the printed ones: rounding both honestly stays within the tolerance."""
    exact = [abs(Fraction(value)) for value in truth]
    printed = half_up(mean(exact), 1)
    recomputed = mean([half_up(value, 1) for value in exact])
    assert could_print(printed, recomputed, 1)


@given(decimals, st.integers(1, 50))
def test_a_whole_unit_away_is_impossible(value: Decimal, units: int) -> None:
    printed = half_up(Fraction(value), 1)
    assert not could_print(printed + Fraction(units, 10), printed, 1)
    assert not could_print(printed, printed + Fraction(units, 10), 1)


def test_percent_rounds_half_up_whatever_the_last_bits_are() -> None:
    assert percent(0.4125) == percent(0.41249999999999998) == percent(3 * 0.1375) == "41.3"
    assert percent(-0.0024999999999999996, signed=True) == "-0.3"
    assert percent(-1e-9, signed=True) == "+0.0"
    assert (percent(1.0), percent(0.00456, 2)) == ("100.0", "0.46")
