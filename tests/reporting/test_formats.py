"""Tables, reports and figures in every format contain the same cells when read back, whatever their names."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evalkit.errors import RunError, UsageError
from evalkit.escape import in_csv
from evalkit.reporting.figures import check_figure_path, new_figure, save_figure
from evalkit.reporting.report import Report, render
from evalkit.reporting.table import (
    FORMATS,
    Cell,
    ColumnGroup,
    Line,
    Section,
    Table,
    beside,
    literal,
    plain,
    simple_table,
)
from evalkit.tables.layout import layout_names
from evalkit.tables.request import TableRequest, make
from tests.printed import printed

Row = tuple[str, list[str]]


def from_csv(text: str) -> list[Row]:
    _, *lines = csv.reader(io.StringIO(text))
    return [(label, cells) for _, label, *cells in lines]


def from_markdown(text: str) -> list[Row]:
    def clean(cell: str) -> str:
        return re.sub(r"\\(.)", r"\1", re.sub(r"(?<!\\)\*+|</?u>|&emsp;", "", cell).replace("†", ""))

    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    rows = [[clean(cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [(label, cells) for label, *cells in rows if any(cells)]


def from_html(text: str) -> list[Row]:
    rows = []
    for row in re.findall("<tr>(.*)</tr>", text[text.index("<tbody") : text.rindex("</tbody>")]):
        cells = [cell for _, cell in re.findall(r"<(th|td)\b[^>]*>(.*?)</\1>", row)]
        label, *others = [html.unescape(re.sub("<[^>]*>", "", cell)) for cell in cells]
        rows.append((label, [cell.replace("†", "") for cell in others]))
    return rows


@pytest.mark.parametrize("name", layout_names())
def test_every_format_holds_the_same_cells(name: str) -> None:
    table = make(TableRequest(name))
    expected = [
        (plain(line.label), [*map(plain, line.facts), *(cell.value + beside(cell) for cell in line.cells)])
        for line in table.lines
    ]
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
    assert from_html(printed(table, "html")) == [(name, ["1.0"])]
    label = printed(table, "markdown").splitlines()[2].removeprefix("| ").removesuffix(" | 1.0 |")
    assert re.sub(r"\\(.)", r"\1", label) == name
    assert not re.search(r"(?<!\\)(\\\\)*[|*_`<]", label)


TABLE = simple_table("made-up", ["task", "n", "value"], [["a_b", "1,000", "−1.5"], ["mean", "", "2.0"]], ruled={1})
REPORT = Report((TABLE,), ("B is better.", "In words."), ("A: one",), ("a note",))


def test_a_report_in_every_format() -> None:
    for form in FORMATS:
        for word in ("1.5", "2.0", *(("B is better.", "A: one", "a note") if form != "csv" else ())):
            assert word in render(REPORT, form)
    assert json.loads(render(REPORT, "json"))["tables"][0]["rows"][1] == {"task": "mean", "n": None, "value": 2.0}
    assert list(csv.reader(io.StringIO(render(REPORT, "csv"))))[1][:2] == ["a_b", "1,000"]
    both = Report((), parts=(REPORT, REPORT))
    assert render(both, "terminal") == "\n\n\n".join([render(REPORT, "terminal")] * 2)
    assert len(json.loads(render(both, "json"))) == 2
    assert render(both, "html", standalone=True).count("<table") == 2
    assert render(both, "latex", standalone=True).count(r"\begin{tabular}") == 2
    with pytest.raises(UsageError, match=r"csv.*made-up, made-up"):
        render(both, "csv")


def test_addresses_in_html_are_links_and_nothing_else_is() -> None:
    urls = ["https://a.example/x?y=1&z=2#w", "http://b.example/~c/d_e"]
    texts = [
        f"see {urls[0]}, or ({urls[1]}).",
        'https://c.example"onclick="x <b>',
        "javascript:alert(1) ftp://d.example",
    ]
    table = simple_table("made-up", ["page", "value"], [[urls[0], "1"]], texts=2)
    written = render(Report((table,), (texts[0],), facts=tuple(texts)), "html")
    links = re.findall(r"<a ([^>]*)>(.*?)</a>", written)
    assert [html.unescape(text) for _, text in links] == [*urls, *urls, "https://c.example", urls[0]]
    assert all(attributes == f'href="{text}"' for attributes, text in links)
    assert "<b>" not in written
    assert html.unescape(re.sub(r"</?a\b[^>]*>", "", written)).count(texts[0]) == 2


def test_programs_get_content_and_records_and_every_column() -> None:
    report = Report((TABLE, TABLE), content={"x": [float("nan"), 1]}, records=[{"a": 1.25}, {"a": None, "b": "=x"}])
    assert json.loads(render(report, "json")) == {"x": [None, 1]}
    assert render(report, "csv").splitlines() == ["a,b", "1.25,", ",'=x"]
    twice = simple_table("x", ["key", "A", "A", "section"], [["row", "1", "2.5", "1,267"]])
    row = {"key (2)": "row", "A": 1, "A (2)": 2.5, "section (2)": 1267}
    assert json.loads(render(Report((twice,)), "json"))["rows"] == [row]


@pytest.mark.parametrize("name", ["a.PNG", "deep/er/a.pdf", "a.svg"])
def test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Folders are made; what cannot be written leaves the old file, and nothing beside it."""
    path = tmp_path / name
    figure = new_figure(3, 2)
    figure.subplots().plot([1, 2], [3, 4], label="模型 $x")
    save_figure(figure, path)
    content = path.read_bytes()
    assert content.startswith({".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}[path.suffix.lower()])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("evalkit.paths.os.fsync", full)
    with pytest.raises(RunError, match=rf"{path.name} cannot be written: No space left"):
        save_figure(figure, path)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == {path.name: content}
    for unusable in ("a.jpg", "a", ".png", "x" * 300 + ".png"):
        with pytest.raises(UsageError, match=r"figures are written as|cannot be written"):
            check_figure_path(tmp_path / unusable)
