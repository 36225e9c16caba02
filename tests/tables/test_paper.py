"""Every table as printed, against the paper's own source: numbers, marks, labels and headings, cell by cell.

The source is read here by other code than any of evalkit's: a small reader of tabular bodies.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from evalkit.tables.layout import layout_names
from evalkit.tables.request import TableRequest, make
from tests.printed import printed

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "integral_transformer.tex"


class Printed(NamedTuple):
    """One cell of a tabular, whatever commands made it."""

    text: str
    bold: bool
    underline: bool


class Row(NamedTuple):
    label: str
    cells: tuple[Printed, ...]


class Body(NamedTuple):
    """A tabular: what stands over its columns, and its rows."""

    heading: tuple[str, ...]
    titles: tuple[str, ...]
    """Of groups of columns and of rows, in order."""
    rows: tuple[Row, ...]


def words(source: str) -> str:
    """The characters that a piece of a label prints, in lower case."""
    text = re.sub(r"\\(hspace|phantom|cmidrule\(lr\))\{[^}]*\}", "", source)
    text = re.sub(r"\\(multirow|multicolumn)\{[^}]*\}\{[^}]*\}", "", text)
    text = re.sub(r"\\([a-z]+)\s*", lambda m: "", text)
    return re.sub(r"\s+", " ", re.sub(r"[{}$\\]", "", text)).strip().lower()


def cell(source: str) -> Printed:
    bold = r"\bf" in source or r"\textbf" in source
    return Printed(words(source).replace(" ", ""), bold, r"\underline" in source)


def read_tabular(source: str) -> Body:
    content = source.split(r"\toprule", 1)[1].split(r"\bottomrule")[0]
    content = re.sub(r"\\(midrule|cmidrule\(lr\)\{[^}]*\})", "", content)
    heading: tuple[str, ...] = ()
    titles: list[str] = []
    rows: list[Row] = []
    for line in re.split(r"(?<!\\)\\\\", content):
        parts = [part.strip() for part in line.split("&")]
        titles += [words(part) for part in parts if r"\multicolumn" in part]
        cells = [part for part in parts[1:] if r"\multicolumn" not in part]
        if any(re.search(r"\d", part) for part in cells) and heading:
            rows.append(Row(words(parts[0]), tuple(map(cell, parts[1:]))))
        elif len(cells) == len(parts) - 1 and len(parts) > 1 and not heading:
            heading = tuple(map(words, parts[1:]))
        elif len(parts) > 1 and not any(cells) and words(parts[0]) and heading:
            titles.append(words(parts[0]))  # a line of a label alone
    return Body(heading, tuple(title for title in titles if title), tuple(rows))


def of_paper(name: str) -> Body:
    if not PAPER.is_file():
        pytest.skip("the shared folder with the paper's source is not beside this checkout")
    source = PAPER.read_text(encoding="utf-8")
    [(start, end)] = [
        (source.rindex(r"\begin{table", 0, found.start()), found.start())
        for found in re.finditer(rf"\\label\{{tab:{name}\}}", source)
    ]
    return read_tabular(source[start:end])


@pytest.mark.parametrize("name", layout_names())
def test_as_printed_is_as_the_paper_prints(name: str) -> None:
    expected = of_paper(name)
    found = read_tabular(printed(make(TableRequest(name, as_printed=True)), "latex"))
    assert len(expected.rows) >= 2
    assert found.heading == expected.heading
    assert found.titles == expected.titles
    assert [row.label for row in found.rows] == [row.label for row in expected.rows]
    for ours, theirs in zip(found.rows, expected.rows, strict=True):
        assert ours.cells == theirs.cells, ours.label


def test_the_paper_has_no_other_table() -> None:
    if not PAPER.is_file():
        pytest.skip("the shared folder with the paper's source is not beside this checkout")
    labels = re.findall(r"\\label\{tab:(\w+)\}", PAPER.read_text(encoding="utf-8"))
    assert set(labels) == set(layout_names())


def test_by_default_the_best_is_marked_and_the_mean_is_computed() -> None:
    """Where the paper slips, the rebuilt table does not: three places that can be seen by eye."""
    long_context = {row.label: row for row in read_tabular(printed(make(TableRequest("app_long_contx")), "latex")).rows}
    assert [cell.bold for cell in long_context["passage count"].cells] == [True, False, False]
    layers = {row.label: row for row in read_tabular(printed(make(TableRequest("abl_top_app")), "latex")).rows}
    assert [layers[label].cells[0].bold for label in ("top 50%", "top 100%")] == [False, True]
    backbones = read_tabular(printed(make(TableRequest("backbone_abl_app")), "latex")).rows
    assert backbones[-1].cells[-1] == Printed("41.2", True, True)
