"""Every table as printed, compared with the paper's own source: numbers, marks, labels and headings, cell by cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.tables.layout import layout_names
from evalkit.tables.request import TableRequest, make
from tests.fixtures import facts
from tests.printed import printed
from tests.tables.source import Printed, read_paper, read_tabular, to_json

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "integral_transformer.tex"


@pytest.mark.parametrize("name", layout_names())
def test_as_printed_is_as_the_paper_prints(name: str) -> None:
    expected = facts("tables")[name]
    found = to_json(read_tabular(printed(make(TableRequest(name, as_printed=True)), "latex")))
    assert len(expected["rows"]) >= 2
    assert found["heading"] == expected["heading"]
    assert found["titles"] == expected["titles"]
    for ours, theirs in zip(found["rows"], expected["rows"], strict=True):
        assert ours == theirs


def test_the_paper_has_no_other_table() -> None:
    assert set(facts("tables")) == set(layout_names())


def test_the_fixture_is_what_the_source_says() -> None:
    if not PAPER.is_file():
        pytest.skip("the shared folder with the paper's source is not beside this checkout")
    tables = read_paper(PAPER.read_text(encoding="utf-8"))
    assert {name: to_json(body) for name, body in tables.items()} == facts("tables")


def test_by_default_the_best_is_marked_and_the_mean_is_computed() -> None:
    """Where the paper slips, the rebuilt table does not: three places that can be seen by eye."""
    long_context = {row.label: row for row in read_tabular(printed(make(TableRequest("app_long_contx")), "latex")).rows}
    assert [cell.bold for cell in long_context["passage count"].cells] == [True, False, False]
    layers = {row.label: row for row in read_tabular(printed(make(TableRequest("abl_top_app")), "latex")).rows}
    assert [layers[label].cells[0].bold for label in ("top 50%", "top 100%")] == [False, True]
    backbones = read_tabular(printed(make(TableRequest("backbone_abl_app")), "latex")).rows
    assert backbones[-1].cells[-1] == Printed("41.2", True, True)
