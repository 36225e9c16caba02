"""Tables on a terminal fit its width, and wrapped ones lose nothing."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from wcwidth import wcswidth

from evalkit.reporting.table import (
    Cell,
    ColumnGroup,
    Line,
    Section,
    Table,
    column_names,
    literal,
    simple_table,
    superscript,
)
from evalkit.reporting.terminal import terminal_table

_words = st.text(alphabet="abcdé桥–", min_size=1, max_size=12)
_texts = st.lists(_words, max_size=8).map(" ".join)
_numbers = st.decimals(-999, 9999, places=2).map(str)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Tables of some columns of texts, then of numbers."""
    texts, numbers = draw(st.integers(1, 3)), draw(st.integers(0, 12))
    headers = draw(st.lists(_texts, min_size=texts + numbers, max_size=texts + numbers))
    cells = st.tuples(*[_texts] * texts, *[_numbers] * numbers)
    return simple_table("made-up", headers, draw(st.lists(cells, max_size=5)), texts=texts)


@given(tables(), st.integers(60, 160))
def test_tables_fit_and_lose_nothing(table: Table, width: int) -> None:
    lines = terminal_table(table, width).split("\n")
    # Three columns of unbreakable texts take 40 columns, a number 8
    assert max(map(wcswidth, lines)) <= width
    shown = " ".join(lines).split()
    for line in table.lines:
        for cell in line.cells:
            assert cell.value in shown
        for text in (line.label, *line.facts):
            assert all(word in shown for span in text for word in span.text.split())


_groups = st.lists(st.tuples(st.sampled_from(["", "Reasoning", "All Knowledge"]), st.integers(1, 4)), min_size=1)


@given(_groups, st.integers(40, 120))
def test_titles_of_groups_stand_over_their_columns(groups: list[tuple[str, int]], width: int) -> None:
    """Below each rule are columns of the group alone, with its title above, in every block."""
    titles = {f"g{number}c{column}": title for number, (title, size) in enumerate(groups) for column in range(size)}
    columns = [ColumnGroup(literal(title), tuple(literal(f"g{number}c{column}") for column in range(size)))
               for number, (title, size) in enumerate(groups)]  # fmt: skip
    line = Line("", literal("a row"), False, (), (Cell("1.0"),) * len(titles))
    shown = terminal_table(Table("t", columns=tuple(columns), sections=(Section((), "line", (line,)),)), width)
    found = dict[str, str]()
    for block in shown.split("\n\n"):
        *above, heading, _, row = block.split("\n")
        assert max(map(len, (*above, heading, row))) <= width
        for match in re.finditer(r"g\d+c\d", heading):
            assert row[: match.end()].endswith("1.0")
            spans = [rule.span() for rule in re.finditer("-+", above[-1] if above else "")]
            over = [span for span in spans if span[0] < match.end() and match.start() < span[1]]
            texts = [title[start:end] for start, end in over for title in above[:-1]]
            assert all(start <= match.start() and match.end() <= end for start, end in over)
            found[match[0]] = re.sub(" ", "", "".join(texts))
    assert found == {column: title.replace(" ", "") for column, title in titles.items()}


def test_references_to_notes_hide_no_title() -> None:
    labels = (literal("2"), literal("4") + superscript("a"))
    groups = (ColumnGroup(literal("heads=8"), labels), ColumnGroup(literal("heads=16"), (*labels[:1], literal("4"))))
    expected = ["heads=8 2", "heads=8 4 [a]", "heads=16 2", "heads=16 4"]
    assert column_names(Table("t", columns=(*groups, ColumnGroup(literal("x"), (literal("S"),))))) == [*expected, "S"]


def test_a_wide_table_continues_beneath_with_its_labels() -> None:
    headers = ["task", *(f"column {number}" for number in range(12))]
    rows = [["first", *["1234.5"] * 12], ["second", *["67.8"] * 12]]
    blocks = terminal_table(simple_table("wide", headers, rows), 60).split("\n\n")
    assert len(blocks) > 1
    for block in blocks:
        assert "column" in block.split("\n")[0]
        assert [line.split()[0] for line in block.split("\n")[-2:]] == ["first", "second"]
    path = "/a/very/long/path/that/nobody/could/read/in/one/go/step-1000"
    shown = terminal_table(simple_table("t", ["what", "path"], [["three short words", path]], texts=2), 50)
    assert "three short words" in shown  # a path is broken before other texts
    assert "".join(line[19:].strip() for line in shown.split("\n")[2:]) == path
