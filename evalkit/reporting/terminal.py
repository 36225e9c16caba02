"""Terminal output: tables as plain text, in the terminal's width.

In: a `Table` and a width. Out: text. Titles of groups of columns have a line of their own, with a rule over the group.
In a table that is too wide, headings and texts are wrapped; where that is not enough, further columns are in a block
below, with the labels repeated.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

import click
from wcwidth import wcswidth, wrap

from evalkit.escape import printable
from evalkit.reporting.table import Cell, Table, beside, plain

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

    Without a width of the terminal, sentences are not wrapped, and the table has at most `WIDTH` columns.
    """
    caption = [wrapped(plain(table.caption), width)] if table.caption else []
    notes = ["\n".join(wrapped(plain(note), width) for note in table.notes)] if table.notes else []
    return "\n\n".join([*caption, *_blocks(table, width or WIDTH), *notes])


def _blocks(table: Table, width: int) -> list[str]:
    texts = 1 + len(table.facts)
    head, rows = _strings(table)
    gap, widths = _GAP, _widths([head, *rows])
    if _total(widths, gap) > width:
        bodies = _widths(rows) if rows else [0] * len(head)
        head = [_wrap(name, max(_longest_word([name]), body)) for name, body in zip(head, bodies, strict=True)]
        widths = _widths([head, *rows])
    numbers, start = widths[texts:], 0
    for group in table.columns:  # room for a title over narrow columns
        end = start + len(group.labels)
        if (lacking := _longest_word([plain(group.title)]) - _total(numbers[start:end], 1)) > 0:
            numbers[start] += lacking
        start = end
    if _total(widths, gap) > width >= sum(widths[:texts]) + _GAP * texts + _total(numbers, 1):
        gap = 1
    columns_of_texts = list(zip(*[head, *rows], strict=True))[:texts]
    least = [_longest_word(column) for column in columns_of_texts]
    room = width - sum(number + gap for number in numbers)
    whole = [_longest_word(columns_of_texts[0], width), *least[1:]]
    if _total(whole, _GAP) <= room:  # labels are names, which are copied
        least = whole
    if not numbers:
        # Texts alone are wrapped ever narrower, since a row in several blocks could not be read
        narrower = ([min(size, most) for size in least] for most in (_LONGEST_WORD, _BROKEN, 12, 8, 5))
        least = next((sizes for sizes in narrower if _total(sizes, _GAP) <= room), least)
    if _total(least, _GAP) <= room:
        shrunk = _shrunk(widths[:texts], least, room)
    else:
        label = min(widths[0], max(width // 2, 1))
        shrunk = [label, *(min(fact, width - label - _GAP) for fact in widths[1:texts])]
    columns = [*shrunk, *numbers]
    steps = [size + (_GAP if number < texts else gap) for number, size in enumerate(columns)][1:]
    blocks, start = list[str](), 0
    while start < len(steps) or not blocks:  # each block is filled before the next
        fitting = sum(total <= width - columns[0] for total in accumulate(steps[start:]))
        chosen = [0, *range(1 + start, len(columns))[: max(1, fitting)]]
        rows_of_block = [[row[column] for column in chosen] for row in (head, *rows)]
        blocks.append(_block(table, rows_of_block, chosen, [columns[column] for column in chosen], gap, width))
        start += max(1, fitting)
    return blocks


def _block(table: Table, rows: list[list[str]], chosen: list[int], sizes: list[int], gap: int, width: int) -> str:
    """Render the `chosen` columns: `rows` of cells, the headings first. Texts are wrapped and have the full gap."""
    between, texts = " " * gap, sum(column <= len(table.facts) for column in chosen)
    padded = [size + (_GAP - gap) * (number < texts) for number, size in enumerate(sizes)]

    def laid_out(row: list[str], above: bool = False) -> list[str]:
        cells = [_wrap(cell, size) for cell, size in zip(row, sizes, strict=True)]
        return _joined(cells, padded, texts, between, above)

    head, *body = rows
    rule, remaining = between.join("-" * size for size in padded), iter(body)
    lines = [*_titles(table, chosen, padded, between), *laid_out(head, above=True), rule]
    for number, section in enumerate(table.sections):
        lines += [rule] if number and section.lines else []
        lines += [wrapped(plain(section.title), width)] if section.title else []
        lines += [line for _ in section.lines for line in laid_out(next(remaining))]
    return "\n".join(lines)


def _titles(table: Table, chosen: list[int], sizes: list[int], between: str) -> list[str]:
    """Return lines with the titles of the chosen columns' groups and rules below them; none without titles."""
    groups = [-1 - text for text in range(1 + len(table.facts))]
    groups += [number for number, group in enumerate(table.columns) for _ in group.labels]
    spans, titles = list[int](), list[str]()
    for number, members in groupby(zip(chosen, sizes, strict=True), lambda column: groups[column[0]]):
        spans.append(_total([size for _, size in members], len(between)))
        titles.append(_wrap(plain(table.columns[number].title) if number >= 0 else "", spans[-1]))
    if not any(titles):
        return []
    rules = ["-" * (span if title else 0) for title, span in zip(titles, spans, strict=True)]
    return [line for row in (titles, rules) for line in _joined(row, spans, len(spans), between, above=True)]


def _joined(row: Sequence[str], sizes: Sequence[int], texts: int, between: str, above: bool) -> list[str]:
    """Return the lines of a row of wrapped cells, `texts` of them on the left; the first lines are empty if `above`."""
    cells = [cell.split("\n") for cell in row]
    tall = max(map(len, cells))
    filled = [[""] * (tall - len(cell)) + cell if above else cell + [""] * (tall - len(cell)) for cell in cells]
    lines = []
    for line in zip(*filled, strict=True):
        space = [" " * (size - _columns(part)) for part, size in zip(line, sizes, strict=True)]
        parts = [part + space[n] if n < texts else space[n] + part for n, part in enumerate(line)]
        lines.append(between.join(parts).rstrip())
    return lines


def _strings(table: Table) -> tuple[list[str], list[list[str]]]:
    # Marks are padded to the same width, so that decimal points are aligned
    width = max((len(_marks(cell)) for line in table.lines for cell in line.cells), default=0)
    rows = []
    for line in table.lines:
        cells = [printable(cell.value) + _marks(cell).ljust(width) + beside(cell) for cell in line.cells]
        label, *facts = map(plain, line.texts)
        rows.append(["  " * line.indent + label, *facts, *cells])
    labels = (label for group in table.columns for label in group.labels)
    return [*map(plain, (*table.headings, *labels))], rows


def _marks(cell: Cell) -> str:
    return "*" * cell.bold + "_" * cell.underline + "†" * cell.significant


def _wrap(text: str, width: int) -> str:
    if _columns(text) <= width:
        return text
    indent = " " * (len(text) - len(text.lstrip()))
    return "\n".join(wrap(text, max(2, width), break_on_hyphens=False, subsequent_indent=indent)) or text


def _longest_word(texts: Iterable[str], most: int = _LONGEST_WORD) -> int:
    words = (word for text in texts for word in re.split(r"[ \n]+", text))
    longest = max(map(_columns, words), default=0)
    return longest if longest <= most else _BROKEN


def _shrunk(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Shrink text columns to fit in `room`, none below its `least`; columns with paths first, then the widest first."""
    shrunk = list(widths)
    while _total(shrunk, _GAP) > room:
        if not (spare := [column for column, width in enumerate(shrunk) if width > least[column]]):
            break
        broken = [column for column in spare if least[column] == _BROKEN]
        shrunk[max(broken or spare, key=shrunk.__getitem__)] -= 1
    return shrunk


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(_columns, column)) for column in zip(*rows, strict=True)]


def _columns(text: str) -> int:
    """Return the terminal columns of a text, or of the longest of its lines."""
    return max(width if (width := wcswidth(line)) >= 0 else len(line) for line in text.split("\n"))


def _total(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + gap * max(0, len(widths) - 1)


COLOURS = {"special": "magenta", "instruction": "blue", "context": "cyan", "continuation": "green", "end": "yellow"}


def coloured(pieces: Iterable[tuple[str, str]]) -> str:
    """Return (segment, text) pieces as one text with segments in colour; without colours where NO_COLOR is set."""
    escaped = ((segment, printable(text, "\n\t")) for segment, text in pieces)
    if os.environ.get("NO_COLOR"):
        return "".join(text for _, text in escaped)
    return "".join(click.style(text, fg=COLOURS[segment]) for segment, text in escaped)
