"""A table ready to be written: every text decided, nothing left to compute. What all writers read."""

from __future__ import annotations

from typing import NamedTuple

from evalkit.tables.markup import Text, plain

MISSING = "-"
"""What stands where there is no number, in every format."""


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
    """The model's or the measure's."""
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

    @property
    def width(self) -> int:
        """How many columns there are, labels and facts included."""
        return 1 + len(self.facts) + sum(len(group.labels) for group in self.columns)


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
