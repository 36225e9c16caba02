"""Table model: the formatted content of a table, from which all writers render, and the markup of its texts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from evalkit.errors import TableError
from evalkit.escape import printable
from evalkit.reporting.numbers import following

_TOKENS = re.compile(r"\\([\\*~$])|(\*\*|\*|~|\$)|([^\\*~$]+|\\)")
"""A backslash before a character of the markup stands for that character; any other backslash for itself."""
_STYLES = {"**": "bold", "*": "italic", "~": "small_caps", "$": "math"}


class Span(NamedTuple):
    """A piece of text in one style."""

    text: str
    bold: bool = False
    italic: bool = False
    small_caps: bool = False
    math: bool = False
    superscript: bool = False


Text = tuple[Span, ...]


def literal(text: str) -> Text:
    """Return a string as text without markup."""
    return (Span(printable(text)),) if text else ()


def superscript(text: str) -> Text:
    return (Span(text, superscript=True),)


def parse(text: str, where: str) -> Text:
    """Parse markup; a style that is not closed is a `TableError` that begins with `where`."""
    spans: list[Span] = []
    on: dict[str, bool] = {}
    for match in _TOKENS.finditer(text):
        escaped, style, plain = match.groups()
        if style and on.pop(style, None) is None:
            on[style] = True
        elif not style:
            span = Span(printable(escaped or plain), **{_STYLES[name]: True for name in on})
            if spans and spans[-1][1:] == span[1:]:
                span = span._replace(text=spans.pop().text + span.text)
            spans.append(span)
    for style in on:
        raise TableError(f"{where}: '{style}' is not closed in '{text}'; write \\{style} for the character")
    return tuple(spans)


def plain(text: Text) -> str:
    """Return the text without styles; references to notes are in brackets after a space."""
    return "".join(f" [{span.text}]" if span.superscript else span.text for span in text)


Format = Literal["terminal", "markdown", "latex", "html", "csv", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)
SUFFIXES = dict(zip(FORMATS, (".txt", ".md", ".tex", ".html", ".csv", ".json"), strict=True))

MISSING = "-"
"""Text of a missing number in the paper's tables, in every format."""


class Cell(NamedTuple):
    value: str = MISSING
    spread: str = ""
    """A standard error or deviation, printed after ±."""
    difference: str = ""
    """The signed difference from the published number, printed in brackets."""
    bold: bool = False
    underline: bool = False
    significant: bool = False
    """Whether the lead over the next best is significant."""


class Line(NamedTuple):
    """A row of the body."""

    key: str
    """Key of the model or the measure; empty where the label identifies the row."""
    label: Text
    indent: bool
    facts: tuple[Text, ...]
    """Texts between the label and the numbers."""
    cells: tuple[Cell, ...]

    @property
    def texts(self) -> tuple[Text, ...]:
        return (self.label, *self.facts)


class Section(NamedTuple):
    title: Text
    style: str
    """ruled: the title between rules; heading: the title on a line; line: a rule, no title."""
    lines: tuple[Line, ...]


class ColumnGroup(NamedTuple):
    title: Text
    labels: tuple[Text, ...]


class Table(NamedTuple):
    name: str
    caption: Text = ()
    corner: Text = ()
    facts: tuple[Text, ...] = ()
    """Headings of the text columns after the labels."""
    columns: tuple[ColumnGroup, ...] = ()
    sections: tuple[Section, ...] = ()
    notes: tuple[Text, ...] = ()
    by_point: bool = True
    """Whether numbers are aligned by their decimal points; else on the right."""

    def with_notes(self, notes: Iterable[str] = ()) -> Table:
        """Return the table with other notes, which are without markup."""
        return self._replace(notes=tuple(map(literal, notes)))

    @property
    def headings(self) -> tuple[Text, ...]:
        """Headings of the columns of texts."""
        return (self.corner, *self.facts)

    @property
    def width(self) -> int:
        """Number of columns, labels and facts included."""
        return 1 + len(self.facts) + self.numbers

    @property
    def numbers(self) -> int:
        return sum(len(group.labels) for group in self.columns)

    @property
    def lines(self) -> Iterator[Line]:
        return (line for section in self.sections for line in section.lines)


Row: TypeAlias = Sequence[str]


def simple_table(
    name: str, headers: Row, rows: Sequence[Row], *, texts: int = 1, ruled: Collection[int] = (), title: str = ""
) -> Table:
    """Build a table from strings without markup: `texts` text columns, then numbers or short words.

    `ruled` are the indices of rows with a rule above.
    """
    sections: list[list[Line]] = [[]]
    for number, row in enumerate(rows):
        if number in ruled and sections[-1]:
            sections.append([])
        label, *facts = map(literal, row[:texts])
        sections[-1].append(Line("", label, False, tuple(facts), tuple(map(Cell, row[texts:]))))
    bodies = tuple(Section((), "line", tuple(lines)) for lines in sections)
    corner, *others = map(literal, headers[:texts])
    columns = (ColumnGroup((), tuple(map(literal, headers[texts:]))),) if len(headers) > texts else ()
    return Table(name, literal(title), corner, tuple(others), columns, bodies, by_point=False)


def filled_table(name: str, headers: Row, rows: Sequence[Row], *, texts: int = 1, **more: Any) -> Table:
    """Build a `simple_table` without the columns that are empty in all rows, to save width; the first one stays."""
    shown = [column for column in range(len(headers)) if not column or any(row[column] for row in rows)]
    kept = [[row[column] for column in shown] for row in (headers, *rows)]
    return simple_table(name, kept[0], kept[1:], texts=sum(column < texts for column in shown), **more)


Markup = Mapping[str, tuple[str, str]]
"""Style of a span or a cell → what stands before and after its text; the innermost first."""


def marked(styled: Span | Cell, text: str, markup: Markup) -> str:
    """Return the escaped text of a span or a cell in its styles."""
    for before, after in dict.fromkeys(mark for style, mark in markup.items() if getattr(styled, style, False)):
        text = before + text + after
    return text


def beside(cell: Cell) -> str:
    """Return what follows the value: spread and difference."""
    return following(cell.spread) + (f" ({cell.difference})" if cell.difference else "")


def column_names(table: Table) -> list[str]:
    """Return one name for each column, for formats with a single header row.

    Titles precede labels that are repeated, references to notes aside.
    """
    columns = [(plain(group.title), label) for group in table.columns for label in group.labels]
    bare = [plain(tuple(span for span in label if not span.superscript)) for _, label in columns]
    repeated = [bool(title) and bare.count(label) > 1 for (title, _), label in zip(columns, bare, strict=True)]
    return [f"{title} " * prefixed + plain(label) for (title, label), prefixed in zip(columns, repeated, strict=True)]
