"""Markdown, CSV, HTML and terminal output contain the same cells when read back."""

from __future__ import annotations

import csv
import html.parser
import io
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evalkit.escape import in_csv
from evalkit.reporting.table import Cell, ColumnGroup, Line, Section, Table, beside, literal, plain
from evalkit.tables.layout import layout_names
from evalkit.tables.request import TableRequest, make
from tests.printed import printed

Row = tuple[str, list[str]]


def rows(table: Table) -> list[Row]:
    """Label and cells of every line, as they should be read from any format."""
    return [
        (plain(line.label), [*map(plain, line.facts), *(cell.value + beside(cell) for cell in line.cells)])
        for section in table.sections
        for line in section.lines
    ]


def from_csv(text: str) -> list[Row]:
    _, *lines = csv.reader(io.StringIO(text))
    return [(label, cells) for _, label, *cells in lines]


def from_markdown(text: str) -> list[Row]:
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    found = []
    for line in lines:
        label, *cells = [part.strip() for part in re.split(r"(?<!\\)\|", line)[1:-1]]
        if any(cells):
            found.append((clean(label), [clean(cell) for cell in cells]))
    return found


def clean(text: str) -> str:
    bare = re.sub(r"(?<!\\)\*+|</?u>|&emsp;", "", text).replace("†", "")
    return re.sub(r"\\(.)", r"\1", bare)


class Cells(html.parser.HTMLParser):
    """The texts of th and td, row by row of the body."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("th", "td")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def from_html(text: str) -> list[Row]:
    body = text[text.index("<tbody") : text.rindex("</tbody>")]
    parser = Cells()
    parser.feed(body)
    return [(label, [cell.replace("†", "") for cell in cells]) for label, *cells in parser.rows if cells]


@pytest.mark.parametrize("name", layout_names())
def test_every_format_holds_the_same_cells(name: str) -> None:
    table = make(TableRequest(name))
    expected = rows(table)
    assert from_csv(printed(table, "csv")) == expected
    assert from_markdown(printed(table, "markdown")) == expected
    assert from_html(printed(table, "html")) == expected
    shown = [re.sub(r"(?<=\S)[*_]+", "", line).split() for line in printed(table, "terminal").splitlines()]
    for label, cells in expected:
        assert [*label.split(), *cells] in shown


@given(st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc", "Cf", "Zs", "Zl", "Zp")), min_size=1))
@example("-")
def test_a_foreign_name_breaks_no_format(name: str) -> None:
    line = Line("x", literal(name), False, (), (Cell("1.0"),))
    group = ColumnGroup((), (literal("a"),))
    table = Table("t", (), (), (), (group,), (Section((), "line", (line,)),), ())
    assert from_csv(printed(table, "csv")) == [(in_csv(name), ["1.0"])]
    assert from_html(printed(table, "html")) == [(name.replace("†", "†"), ["1.0"])]
    markdown = printed(table, "markdown").splitlines()[2]
    label = markdown.removeprefix("| ").removesuffix(" | 1.0 |")
    assert re.sub(r"\\(.)", r"\1", label) == name
    assert not re.search(r"(?<!\\)(\\\\)*[|*_`<]", label)
