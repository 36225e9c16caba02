"""Numbers with their errors: decimals by unit, percent, dashes, and the same error in every form."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.reporting.numbers import MEANS, METRICS, PERCENTAGES, SHARES, NumberFormat

FORMATS = [SHARES, PERCENTAGES, MEANS, METRICS, NumberFormat(1, whole=100.0), NumberFormat(2, more_of_errors=1)]


@pytest.mark.parametrize(
    ("form", "number", "stderr", "expected"),
    [
        (SHARES, 0.4125, 0.03345, "41.3 ± 3.3"),
        (NumberFormat(1, whole=100.0), 41.25, 3.345, "41.3 ± 3.3"),
        (NumberFormat(1, whole=1.0, more_of_errors=1), 0.4125, 0.03345, "41.3 ± 3.35"),
        (PERCENTAGES, 33.335, 1.0, "33.34 ± 1.00"),
        (MEANS, -1.23456, 0.0625, "-1.235 ± 0.063"),
        (METRICS, 12, 0.5, "12.0000 ± 0.5000"),
        (SHARES, 0.5, None, "50.0"),
        (SHARES, math.nan, None, "–"),
        (SHARES, math.inf, None, "+∞"),
    ],
)
def test_a_number_with_its_error(form: NumberFormat, number: float, stderr: float | None, expected: str) -> None:
    assert form.with_error(number, stderr) == expected


@pytest.mark.parametrize("form", FORMATS)
@given(number=st.floats(-100, 100), stderr=st.floats(0, 100))
def test_all_places_show_the_same_error(form: NumberFormat, number: float, stderr: float) -> None:
    value, beside = form.columns(number, stderr)
    assert form.with_error(number, stderr) == f"{value} {beside}"
    assert beside == f"± {form.error(stderr)}" == f"± {form.spread(stderr)}"


@pytest.mark.parametrize("form", FORMATS)
def test_unknown_numbers(form: NumberFormat) -> None:
    assert form.columns(None, None) == ("–", "–")
    assert (form.error(None), form.spread(None), form.with_error(None, None)) == ("–", "", "–")
