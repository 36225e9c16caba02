"""Terminal output: tables as plain text, in the terminal's width.

In: a `Table` and a width. Out: text. In a table that is too wide, headings and texts are wrapped; where that is not
enough, further columns are in a block below, with the labels repeated.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import click
from tabulate import DataRow, TableFormat, tabulate
from wcwidth import wcswidth, wrap

from evalkit.escape import printable
from evalkit.reporting.markup import plain
from evalkit.reporting.table import Cell, Line, Table, beside, column_names

WIDTH = 100
"""Columns where the output is not a terminal."""
_LEAST_WIDTH = 40
_GAP = 2
_LONGEST_WORD, _BROKEN = 30, 20
"""Words with more columns, such as paths, may be broken; minimum width of a column with such words."""


def terminal_width() -> int | None:
    """Return the columns of the terminal at standard output; None where it is not a terminal."""
    if not sys.stdout.isatty():
        return None
    return max(_LEAST_WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def wrapped(line: str, width: int | None) -> str:
    """Wrap a sentence to a width; None: on one line."""
    line = printable(line)
    return line if width is None else "\n".join(wrap(line, width, break_on_hyphens=False, subsequent_indent="  "))


def terminal_table(table: Table, width: int | None = None) -> str:
    """Render a table with its caption and notes; * marks bold, _ underlined, † significant leads.

    Args:
        table: the table.
        width: width of the terminal; None: sentences are not wrapped, and the table has at most `WIDTH` columns.
    """
    caption = [wrapped(plain(table.caption), width)] if table.caption else []
    notes = ["\n".join(wrapped(plain(note), width) for note in table.notes)] if table.notes else []
    return "\n\n".join([*caption, *_blocks(table, width or WIDTH), *notes])


def _blocks(table: Table, width: int) -> list[str]:
    """Return the table as blocks, each with the labels and as many numeric columns as fit."""
    texts = 1 + len(table.facts)
    head, rows = _strings(table)
    gap, widths = _GAP, _widths([head, *rows])
    if _total(widths, gap) > width:
        bodies = _widths(rows) if rows else [0] * len(head)
        head = [_wrap(name, max(_longest_word([name]), body)) for name, body in zip(head, bodies, strict=True)]
        widths = _widths([head, *rows])
    numbers = widths[texts:]
    if _total(widths, gap) > width >= sum(widths[:texts]) + _GAP * texts + _total(numbers, 1):
        gap = 1
    least = [_longest_word(column) for column in zip(*[head, *rows], strict=True)][:texts]
    room = width - sum(number + gap for number in numbers)
    if not numbers:
        # Texts alone are wrapped ever narrower, since a row in several blocks could not be read
        narrower = ([min(width, most) for width in least] for most in (_LONGEST_WORD, _BROKEN, 12, 8, 5))
        least = next((found for found in narrower if _total(found, _GAP) <= room), least)
    if _total(least, _GAP) <= room:
        shrunk = _shrunk(widths[:texts], least, room)
    else:
        label = min(widths[0], max(width // 2, 1))
        shrunk = [label, *(min(fact, width - label - _GAP) for fact in widths[1:texts])]
    columns = [*shrunk, *numbers]
    blocks = []
    for start, end in _folded([size + (_GAP if place < texts - 1 else gap) for place, size in enumerate(columns[1:])],
                              width - columns[0]):  # fmt: skip
        chosen = [0, *range(1 + start, 1 + end)]
        block = _ColumnBlock([columns[place] for place in chosen], sum(place < texts for place in chosen), gap)
        blocks.append(block.text([head[place] for place in chosen], table, rows, chosen, width))
    return blocks


class _ColumnBlock(NamedTuple):
    """Some of a table's columns, with the labels."""

    widths: list[int]
    texts: int
    gap: int

    def text(
        self, head: Sequence[str], table: Table, rows: Sequence[Sequence[str]], chosen: Sequence[int], width: int
    ) -> str:
        """Render the lines: headings, a rule, and the sections with their titles."""
        physical, lines_of = self._physical(head, bottom=True), []
        tall = len(physical)
        for row in rows:
            lines = self._physical([row[place] for place in chosen])
            lines_of.append(len(lines))
            physical += lines
        laid = iter(self._laid_out(physical))
        rule = (" " * self.gap).join("-" * width for width in self._padded())
        found = [*(next(laid) for _ in range(tall)), rule]
        heights = iter(lines_of)
        for number, section in enumerate(table.sections):
            found += [rule] if number and section.lines else []
            found += [wrapped(plain(section.title), width)] if section.title else []
            found += [next(laid) for _ in section.lines for _ in range(next(heights))]
        return "\n".join(line.rstrip() for line in found)

    def _padded(self) -> list[int]:
        """Return widths with the full gap after texts, even where the gap between numbers is reduced."""
        return [width + (_GAP - self.gap) * (place < self.texts) for place, width in enumerate(self.widths)]

    def _physical(self, row: Sequence[str], bottom: bool = False) -> list[list[str]]:
        """Split a row into lines, with texts wrapped; shorter cells are aligned at the top, or at the bottom."""
        cells = [
            (_wrap(cell, width) if place < self.texts else cell).split("\n")
            for place, (cell, width) in enumerate(zip(row, self.widths, strict=True))
        ]
        tall = max(map(len, cells))
        filled = [[""] * (tall - len(cell)) + cell if bottom else cell + [""] * (tall - len(cell)) for cell in cells]
        return [list(line) for line in zip(*filled, strict=True)]

    def _laid_out(self, lines: Sequence[Sequence[str]]) -> list[str]:
        # A first line sets the widths of the columns; tabulate has no option for them
        wide = ["x" * width for width in self._padded()]
        sides = ["left"] * self.texts + ["right"] * (len(self.widths) - self.texts)
        gap = DataRow("", " " * self.gap, "")
        form = TableFormat(None, None, None, None, gap, gap, 0, None)
        laid = tabulate([wide, *lines], tablefmt=form, disable_numparse=True, preserve_whitespace=True, colalign=sides)
        return laid.split("\n")[1:]


def _strings(table: Table) -> tuple[list[str], list[list[str]]]:
    """Return the headings, and the rows of all sections, as strings."""
    head = [plain(table.corner), *map(plain, table.facts), *column_names(table)]
    marks = max((len(_marks(cell)) for line in table.lines for cell in line.cells), default=0)
    return head, [_row(line, marks) for line in table.lines]


def _row(line: Line, marks: int) -> list[str]:
    label = ("  " if line.indent else "") + plain(line.label)
    return [label, *map(plain, line.facts), *(_cell(cell, marks) for cell in line.cells)]


def _marks(cell: Cell) -> str:
    return ("*" if cell.bold else "") + ("_" if cell.underline else "") + ("†" if cell.significant else "")


def _cell(cell: Cell, marks: int) -> str:
    """Format a cell, with its marks padded to the same width, so that decimal points are aligned."""
    return printable(cell.value) + _marks(cell).ljust(marks) + beside(cell)


def _wrap(text: str, width: int) -> str:
    if _columns(text) <= width:
        return text
    indent = " " * (len(text) - len(text.lstrip()))
    return "\n".join(wrap(text, max(2, width), break_on_hyphens=False, subsequent_indent=indent)) or text


def _longest_word(texts: Iterable[str]) -> int:
    words = (word for text in texts for word in re.split(r"[ \n]+", text))
    longest = max(map(_columns, words), default=0)
    return longest if longest <= _LONGEST_WORD else _BROKEN


def _shrunk(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Shrink text columns to fit in `room`, none below its `least`; columns with paths first, then the widest first."""
    found = list(widths)
    while _total(found, _GAP) > room:
        spare = [place for place, width in enumerate(found) if width > least[place]]
        if not spare:
            break
        broken = [place for place in spare if least[place] == _BROKEN]
        found[max(broken or spare, key=found.__getitem__)] -= 1
    return found


def _folded(columns: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Assign the columns after the labels to blocks, as ranges; each block is filled before the next.

    Args:
        columns: their widths, each with the gap before it.
        room: width without the labels.
    """
    ends = [0]
    while ends[-1] < len(columns):
        start = ends[-1]
        ends.append(start + max(1, sum(total <= room for total in accumulate(columns[start:]))))
    return list(pairwise(ends)) or [(0, 0)]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(_columns, column)) for column in zip(*rows, strict=True)]


def _columns(text: str) -> int:
    """Return the terminal columns of a text, or of the longest of its lines."""
    return max(width if (width := wcswidth(line)) >= 0 else len(line) for line in text.split("\n"))


def _total(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + gap * max(0, len(widths) - 1)


COLOURS = {
    "special": "magenta",
    "instruction": "blue",
    "context": "cyan",
    "continuation": "green",
    "end": "yellow",
}
"""Segment → colour."""


def coloured(pieces: Iterable[tuple[str, str]]) -> str:
    """Return (segment, text) pieces as one text with segments in colour; without colours where NO_COLOR is set."""
    plain = bool(os.environ.get("NO_COLOR"))
    return "".join(
        printable(text, "\n\t") if plain else click.style(printable(text, "\n\t"), fg=COLOURS[segment])
        for segment, text in pieces
    )
