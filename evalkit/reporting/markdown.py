"""Markdown output: pipe tables."""

from __future__ import annotations

from evalkit.reporting.escape import in_markdown
from evalkit.reporting.markup import Span, Text
from evalkit.reporting.table import Cell, Table, beside, column_names


def markdown_table(table: Table) -> str:
    """Return a pipe table with its notes and caption; a section's title has a row of its own."""
    names = [in_markdown(name) for name in column_names(table)]
    head = [_text(table.corner) or " ", *map(_text, table.facts), *names]
    sides = [":--"] * (1 + len(table.facts)) + ["--:"] * table.numbers
    lines = [_pipes(head), _pipes(sides)]
    for section in table.sections:
        if section.title:
            lines.append(_pipes([_text(section.title), *[""] * (len(head) - 1)]))
        for line in section.lines:
            label = ("&emsp;" if line.indent else "") + _text(line.label)
            lines.append(_pipes([label, *map(_text, line.facts), *map(_cell, line.cells)]))
    caption = [_text(table.caption)] if table.caption else []
    return "\n\n".join([*caption, "\n".join(lines), *(_text(note) for note in table.notes if note)])


def _pipes(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _text(text: Text) -> str:
    return "".join(map(_span, text))


def _span(span: Span) -> str:
    # Emphasis ends only where its mark does not follow a space
    inner = span.text.strip(" ")
    if not inner:
        return span.text
    left, right = span.text.split(inner, 1)
    written = in_markdown(inner)
    if span.superscript:
        return f"<sup>{written}</sup>"
    if span.italic or span.math:
        written = f"*{written}*"
    return left + (f"**{written}**" if span.bold else written) + right


def _cell(cell: Cell) -> str:
    value = in_markdown(cell.value)
    value = f"<u>{value}</u>" if cell.underline else value
    value = f"**{value}**" if cell.bold else value
    return value + ("†" if cell.significant else "") + beside(cell)
