"""Marked numbers, and the content of filled cells, on synthetic tables."""

from __future__ import annotations

from fractions import Fraction

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from evalkit.reporting.decimals import to_text
from evalkit.tables.fill import best_marks, computed, fill
from evalkit.tables.layout import TableLayout, load_layout
from evalkit.tables.published import Number

MODELS = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> TableLayout:
    """Two sections of two models; bold is the highest of a section, underline the lowest of the table."""
    path = tmp_path_factory.mktemp("layout") / "made_up.yaml"
    content = {
        "suite": "zeroshot8",
        "marks": {"bold": "highest in section", "underline": "lowest in table"},
        "rows": [{"items": {"a": "A", "b": "B"}}, {"items": {"c": "C", "d": "D"}}],
        "columns": [{"items": {"winogrande": None, "arc_easy": None, "arc_challenge": None, "Reasoning": None}}],
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return load_layout(str(path))


numbers = st.lists(
    st.one_of(st.none(), st.integers(0, 400).map(lambda n: Fraction(n, 40))), min_size=len(MODELS), max_size=len(MODELS)
)


@given(numbers)
def test_marks_are_of_what_is_printed(layout: TableLayout, given_values: list[Fraction | None]) -> None:
    """A cell is marked exactly where no other of its scope prints a better number; so ties are all marked."""
    values = {
        (model, "arc_easy"): value for model, value in zip(MODELS, given_values, strict=True) if value is not None
    }
    shown = {model: float(to_text(value, 1)) for (model, _), value in values.items()}
    marks = best_marks(layout, values)
    for model, value in shown.items():
        section = MODELS[:2] if model in MODELS[:2] else MODELS[2:]
        bold = all(shown[other] <= value for other in section if other in shown)
        underline = all(other >= value for other in shown.values())
        expected = {kind for kind, on in (("bold", bold), ("underline", underline)) if on}
        assert marks.get((model, "arc_easy"), frozenset()) == expected
    assert {model for model, _ in marks} <= shown.keys()


def test_equal_as_printed_is_equal(layout: TableLayout) -> None:
    """39.775 and 39.825 both print 39.8, as in the paper's table vanilla_head_app."""
    marks = best_marks(layout, {("a", "arc_easy"): Fraction("39.775"), ("b", "arc_easy"): Fraction("39.825")})
    assert all("bold" in kinds for kinds in marks.values())
    assert len(marks) == 2


def test_averages_are_computed_and_need_all_their_parts(layout: TableLayout) -> None:
    whole = {
        "winogrande": Number(Fraction(50)),
        "arc_easy": Number(Fraction(60)),
        "arc_challenge": Number(Fraction(31)),
    }
    part = {"winogrande": Number(Fraction(50)), "arc_easy": Number(Fraction(60))}
    found = computed(layout, {"a": whole, "b": part})
    assert found["a", "Reasoning"].value == Fraction(47)
    assert ("b", "Reasoning") not in found
    cells = {
        line.key: line.cells for section in fill(layout, {"a": whole, "b": part}).sections for line in section.lines
    }
    assert [cell.value for cell in cells["a"]] == ["50.0", "60.0", "31.0", "47.0"]
    assert [cell.value for cell in cells["b"]] == ["50.0", "60.0", "-", "-"]
    assert [cell.value for cell in cells["c"]] == ["-"] * 4


def test_a_difference_is_of_printed_numbers(layout: TableLayout) -> None:
    """51.84 and 51.36 print 51.8 and 51.4: a reader would miss a tenth if 0.48 were printed as +0.5."""
    ours, theirs = ({"a": {"arc_easy": Number(Fraction(value))}} for value in ("51.84", "51.36"))
    cell = fill(layout, ours, published=theirs).sections[0].lines[0].cells[1]
    assert (cell.value, cell.difference) == ("51.8", "+0.4")
