"""Filled tables: the paper's cell by cell, and marks, averages and differences of synthetic numbers."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.errors import TableError
from evalkit.reporting.decimals import to_text
from evalkit.reporting.table import plain
from evalkit.tables.fill import Number, fill, leads, printed_cells, read_numbers
from evalkit.tables.layout import TableLayout, layout_names, load_layout
from evalkit.tables.request import TableRequest, make
from tests.fixtures import facts
from tests.printed import printed
from tests.tables.runs import lines, written
from tests.tables.source import Printed, read_paper, read_tabular, to_json

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "integral_transformer.tex"
MODELS = ("a", "b", "c", "d")


@pytest.mark.parametrize("name", layout_names())
def test_as_printed_is_as_the_paper_prints(name: str) -> None:
    """Numbers, marks, labels and headings, read from both LaTeX sources by another program."""
    expected = facts("tables")[name]
    assert to_json(read_tabular(printed(make(TableRequest(name, as_printed=True)), "latex"))) == expected
    assert len(expected["rows"]) >= 2
    layout = load_layout(name)
    numbers, averages = read_numbers(layout.data_file), layout.averages.keys() & layout.measures.keys()
    assert layout.model_items.keys() == numbers.keys()
    assert all(set(layout.tasks) >= row.keys() for row in numbers.values())  # so no average is stored
    assert printed_cells(layout).values.keys() == {(model, key) for model in layout.model_items for key in averages}


def test_the_fixture_is_what_the_source_says() -> None:
    assert set(facts("tables")) == set(layout_names())
    if not PAPER.is_file():
        pytest.skip("the shared folder with the paper's source is not beside this checkout")
    tables = read_paper(PAPER.read_text(encoding="utf-8"))
    assert {name: to_json(body) for name, body in tables.items()} == facts("tables")


def test_by_default_the_best_is_marked_and_the_mean_is_computed() -> None:
    """Where the paper slips, the rebuilt table does not: three places that can be seen by eye."""
    long_context, layers, backbones = (
        [(row.label, row.cells) for row in read_tabular(printed(make(TableRequest(name)), "latex")).rows]
        for name in ("app_long_contx", "abl_top_app", "backbone_abl_app")
    )
    assert [cell.bold for cell in dict(long_context)["passage count"]] == [True, False, False]
    assert [dict(layers)[label][0].bold for label in ("top 50%", "top 100%")] == [False, True]
    assert backbones[-1][1][-1] == Printed("41.2", True, True)


@pytest.mark.parametrize("name", layout_names())
def test_recomputed_averages_are_stated(name: str) -> None:
    """Averages that differ are counted in both tables as LaTeX, by another program."""
    recomputed, as_printed = (make(TableRequest(name, as_printed=printed)) for printed in (False, True))
    ours, theirs = (read_tabular(printed(table, "latex")) for table in (recomputed, as_printed))
    cells = [(cell.text, other.text) for row, beside in zip(ours.rows, theirs.rows, strict=True)
             for cell, other in zip(row.cells, beside.cells, strict=True)]  # fmt: skip
    averages = sum(measure in load_layout(name).averages for measure in load_layout(name).measures)
    count, differ = averages * len(load_layout(name).model_items), sum(a != b for a, b in cells)
    notes = [
        f"recomputed from the tasks' published numbers; printed averages that differ: {differ} of {count}."
        in plain(note)
        for note in recomputed.notes
    ]
    assert (notes, as_printed.notes) == ([True] * bool(averages), ())
    assert averages or not differ


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> TableLayout:
    """Two sections of two models; bold is the highest of a section, underline the lowest of the table."""
    path = written(
        tmp_path_factory.mktemp("layout") / "made_up.yaml",
        suite="zeroshot8",
        marks={"bold": "highest in section", "underline": "lowest in table"},
        rows=[{"items": {"a": "A", "b": "B"}}, {"items": {"c": "C", "d": "D"}}],
        columns=[{"items": {"winogrande": None, "arc_easy": None, "arc_challenge": None, "Reasoning": None}}],
    )
    return load_layout(path)


def of_arc_easy(**values: str | Fraction) -> dict[str, dict[str, Number]]:
    return {model: {"arc_easy": Number(Fraction(value))} for model, value in values.items()}


@given(st.dictionaries(st.sampled_from(MODELS), st.integers(0, 400).map(lambda n: Fraction(n, 40))))
def test_marks_are_of_what_is_printed(layout: TableLayout, values: dict[str, Fraction]) -> None:
    """A cell is marked exactly where no other of its scope prints a better number, and another a worse one: ties are
    all marked, and a number alone, or equal to all others, is neither the best nor the worst."""
    shown = {model: float(to_text(value, 1)) for model, value in values.items()}
    for line in fill(layout, of_arc_easy(**values)).lines:
        section = MODELS[:2] if line.key in MODELS[:2] else MODELS[2:]
        value = shown.get(line.key)
        rivals = [shown[other] for other in section if other in shown]
        bold = value is not None and len(set(rivals)) > 1 and all(other <= value for other in rivals)
        underline = (
            value is not None and len(set(shown.values())) > 1 and all(other >= value for other in shown.values())
        )
        assert (line.cells[1].bold, line.cells[1].underline) == (bold, underline)


def test_leads_averages_and_differences(layout: TableLayout) -> None:
    """39.775 and 39.825 both print 39.8, as in the paper's table vanilla_head_app, so neither leads; of 51.84 and
    51.36, printed as 51.8 and 51.4, a reader would miss a tenth in +0.5; an average needs all of its parts."""
    numbers = of_arc_easy(a="39.775", b="39.825", c="50", d="49.9")
    assert list(leads(layout, numbers)) == [("c", "d", "arc_easy")]
    cell = fill(layout, of_arc_easy(a="51.84"), published=of_arc_easy(a="51.36")).sections[0].lines[0].cells[1]
    assert (cell.value, cell.difference) == ("51.8", "+0.4")
    part = {"winogrande": Number(Fraction(50)), "arc_easy": Number(Fraction(60))}
    table = fill(layout, {"a": part | {"arc_challenge": Number(Fraction(31))}, "b": part})
    assert list(lines(table).values())[:3] == [["50.0", "60.0", "31.0", "47.0"], ["50.0", "60.0", "-", "-"], ["-"] * 4]


def test_a_file_of_numbers(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    path.write_text("\ufeffmodel, piqa ,boolq\nmine,51.30,\n\nyours,-,0\n", encoding="utf-8")
    assert read_numbers(path) == {"mine": {"piqa": Number(Fraction(513, 10))}, "yours": {"boolq": Number(Fraction(0))}}
    for content, word in ((b"model,piqa\nmine,6O.1\n", "line 2.*row 'mine', column 'piqa'.*'6O.1'"),
                          (b"model,piqa,piqa\nmine,1,2\n", "line 1"), (b"model,piqa\nm\xff,1\n", "")):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(TableError, match=rf"numbers\.csv.*{word}"):
            read_numbers(path)
