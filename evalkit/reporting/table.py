"""A table ready to be written: every text decided, nothing left to compute. What all writers read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from evalkit.reporting.markup import Text, literal, plain

MISSING = "-"
"""What stands where the paper's tables have no number, in every format."""


class Cell(NamedTuple):
    """One number as it is printed."""

    value: str = MISSING
    """With the table's decimals and unit."""
    spread: str = ""
    """A standard error or deviation, printed after ±."""
    difference: str = ""
    """From the published number, with its sign, printed in brackets."""
    bold: bool = False
    underline: bool = False
    significant: bool = False
    """The lead over the next best is more than chance."""


class Line(NamedTuple):
    """One row of the body."""

    key: str
    """The model's or the measure's; empty where the label says all."""
    label: Text
    indent: bool
    facts: tuple[Text, ...]
    """Texts between the label and the numbers."""
    cells: tuple[Cell, ...]


class Section(NamedTuple):
    """Rows under one title."""

    title: Text
    style: str
    """ruled: the title between rules; heading: the title on a line; line: a rule, no title."""
    lines: tuple[Line, ...]


class ColumnGroup(NamedTuple):
    """Columns under one title."""

    title: Text
    labels: tuple[Text, ...]


class Table(NamedTuple):
    """All of it."""

    name: str
    caption: Text
    corner: Text
    facts: tuple[Text, ...]
    """Over the texts beside the labels."""
    columns: tuple[ColumnGroup, ...]
    sections: tuple[Section, ...]
    notes: tuple[Text, ...]
    """Lines under the table."""
    by_point: bool = True
    """Whether numbers stand with their points under each other; else on the right."""

    @property
    def width(self) -> int:
        """How many columns there are, labels and facts included."""
        return 1 + len(self.facts) + self.numbers

    @property
    def numbers(self) -> int:
        """How many columns of numbers there are."""
        return sum(len(group.labels) for group in self.columns)

    @property
    def lines(self) -> Iterator[Line]:
        """Those of all sections."""
        return (line for section in self.sections for line in section.lines)


def simple_table(
    name: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    texts: int = 1,
    ruled: Collection[int] = (),
    title: str = "",
) -> Table:
    """A table of strings without markup.

    Args:
        name: for references to it.
        headers: over the columns.
        rows: the cells as they are to be read; one of each header.
        texts: how many columns, from the left, are texts; the others are numbers or short words.
        ruled: rows that a rule stands above.
        title: what it shows.
    """
    sections: list[list[Line]] = [[]]
    for place, row in enumerate(rows):
        if place in ruled and sections[-1]:
            sections.append([])
        label, *facts = map(literal, row[:texts])
        sections[-1].append(Line("", label, False, tuple(facts), tuple(map(Cell, row[texts:]))))
    columns = (ColumnGroup((), tuple(map(literal, headers[texts:]))),) if len(headers) > texts else ()
    return Table(
        name=name,
        caption=literal(title),
        corner=literal(headers[0]),
        facts=tuple(map(literal, headers[1:texts])),
        columns=columns,
        sections=tuple(Section((), "line", tuple(lines)) for lines in sections),
        notes=(),
        by_point=False,
    )


def beside(cell: Cell, plus_minus: str = " ± ") -> str:
    """What stands after the value: spread and difference."""
    spread = f"{plus_minus}{cell.spread}" if cell.spread else ""
    return spread + (f" ({cell.difference})" if cell.difference else "")


def column_names(table: Table) -> list[str]:
    """One name for each column, for formats of a single heading line: a title stands before labels that repeat."""
    labels = [plain(label) for group in table.columns for label in group.labels]
    return [
        f"{plain(group.title)} {plain(label)}" if group.title and labels.count(plain(label)) > 1 else plain(label)
        for group in table.columns
        for label in group.labels
    ]
