"""Names with arbitrary characters, on a terminal line and in a spreadsheet cell."""

from __future__ import annotations

import csv
import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.errors import EvalkitError, UnknownNameError
from evalkit.escape import in_csv, printable
from evalkit.reporting.formats import records_csv

NAMES = {
    "a\nb": "a\\nb",
    "a\rb": "a\\rb",
    "a\x1b[2Jb": "a\\x1b[2Jb",
    "a\x9bb": "a\\x9bb",
    "a\u202eb": "a\\u202eb",
    "a\u2066b": "a\\u2066b",
    "a\u2028b": "a\\u2028b",
    "a\u200bb": "a\\u200bb",
    "a\udcffb": "a\\udcffb",
    "a\U000e0041b": "a\\U000e0041b",
    "Ünïcode 東京 🌊 نص \\ a b": "Ünïcode 東京 🌊 نص \\ a b",
}


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names(name: str) -> None:
    assert printable(name) == NAMES[name]
    assert str(EvalkitError(f"{name}: wrong")) == f"{NAMES[name]}: wrong"
    assert str(UnknownNameError("task", name, ["b"])).startswith(f"unknown task '{NAMES[name]}'")


@given(st.text())
def test_any_text_is_on_one_line_and_is_obeyed_by_no_terminal(text: str) -> None:
    shown = printable(text)
    assert shown == printable(shown)
    assert len(shown.splitlines()) <= 1
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    shown.encode()


@pytest.mark.parametrize(
    "text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "=", "-1.5 points", "+-1"]
)
def test_a_name_that_a_spreadsheet_would_run(text: str) -> None:
    assert in_csv(text) == f"'{printable(text)}"


@pytest.mark.parametrize("value", [-1.5, -3, None, True, "-1.5", "+0.3", "-1e-5", "5", "", "-", "a=1", "'=1"])
def test_numbers_and_other_texts_stay(value: object) -> None:
    assert in_csv(value) is value


def test_a_csv_of_records() -> None:
    text = records_csv([{"name": "=HYPERLINK(1)", "p": -0.5, "n": 3, "note": None}])
    assert list(csv.reader(io.StringIO(text)))[1] == ["'=HYPERLINK(1)", "-0.5", "3", ""]
