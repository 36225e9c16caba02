"""Reports in every format."""

from __future__ import annotations

import csv
import io
import json

import pytest

from evalkit.errors import UsageError
from evalkit.reporting.report import Report, render
from evalkit.reporting.table import FORMATS, simple_table

TABLE = simple_table("made-up", ["task", "n", "value"], [["a_b", "1,000", "−1.5"], ["mean", "", "2.0"]], ruled={1})
REPORT = Report((TABLE,), ("B is better.", "In words."), ("A: one",), ("a note",))


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_holds_everything_but_csv_notes(form: str) -> None:
    text = render(REPORT, form)  # type: ignore[arg-type]
    assert not text.endswith("\n")
    for word in ("1.5", "2.0", *(("B is better.", "A: one", "a note") if form != "csv" else ())):
        assert word in text
    if form == "json":
        assert json.loads(text)["tables"][0]["rows"][1] == {"task": "mean", "n": None, "value": 2.0}
    if form == "csv":
        assert list(csv.reader(io.StringIO(text)))[1][:2] == ["a_b", "1,000"]


def test_programs_get_content_and_records_where_there_are_some() -> None:
    report = Report((TABLE, TABLE), content={"x": [float("nan"), 1]}, records=[{"a": 1.25}, {"a": None, "b": "=x"}])
    assert json.loads(render(report, "json")) == {"x": [None, 1]}
    assert render(report, "csv").splitlines() == ["a,b", "1.25,", ",'=x"]


def test_several_tables_are_no_csv() -> None:
    with pytest.raises(UsageError, match=r"can contain one table, not several \(made-up, made-up\); .* json"):
        render(Report((TABLE, TABLE)), "csv")


def test_parts_follow_each_other() -> None:
    both = Report((), parts=(REPORT, REPORT))
    assert render(both, "terminal") == "\n\n\n".join([render(REPORT, "terminal")] * 2)
    assert len(json.loads(render(both, "json"))) == 2
    assert render(both, "html", standalone=True).count("<table") == 2
    assert render(both, "latex", standalone=True).count(r"\begin{tabular}") == 2


def test_json_loses_no_column_of_one_name() -> None:
    twice = simple_table("x", ["key", "A", "A", "section"], [["one", "1", "2.5", "3"]])
    assert json.loads(render(Report((twice,)), "json"))["rows"] == [
        {"key (2)": "one", "A": 1, "A (2)": 2.5, "section (2)": 3}
    ]
    assert "1,267" not in render(Report((simple_table("x", ["a", "n"], [["b", "1,267"]]),)), "json")
