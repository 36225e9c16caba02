"""The other formats: Markdown, CSV, HTML and a terminal. LaTeX has a module of its own."""

from __future__ import annotations

import csv
import html
import io

from evalkit.reporting.escape import in_csv, in_markdown
from evalkit.tables.markup import Span, Text, plain
from evalkit.tables.table import Cell, Line, Section, Table, beside, column_names

_STYLE = """<style>
table.evalkit { border-collapse: collapse; font: 15px/1.5 Georgia, serif; margin: 1em auto; }
table.evalkit thead { border-top: 2px solid; border-bottom: 1px solid; }
table.evalkit tbody.line, table.evalkit tbody.ruled, table.evalkit tbody.ruled tr.title { border-top: 1px solid; }
table.evalkit tbody.ruled tr.title { border-bottom: 1px solid; }
table.evalkit tbody:last-of-type { border-bottom: 2px solid; }
table.evalkit th, table.evalkit td { padding: .15em .7em; text-align: center; white-space: nowrap; }
table.evalkit th { font-weight: normal; }
table.evalkit th.group { border-bottom: 1px solid; font-weight: bold; }
table.evalkit th.corner, table.evalkit th[scope=row], table.evalkit tr.title th { text-align: left; }
table.evalkit tbody.ruled tr.title th { text-align: center; }
table.evalkit th.indent { padding-left: 1.6em; }
table.evalkit small { opacity: .75; }
table.evalkit tfoot td { text-align: left; white-space: normal; font-size: 13px; }
table.evalkit caption { caption-side: bottom; padding-top: .6em; text-align: left; }
.sc { font-variant: small-caps; }
</style>
"""


def markdown(table: Table) -> str:
    """A pipe table with its caption; a section's title is a line of its own."""
    names = [in_markdown(name) for name in column_names(table)]
    head = [_markdown_text(table.corner) or " ", *map(_markdown_text, table.facts), *names]
    lines = [_pipes(head), _pipes([":--" if side == "left" else "--:" for side in _sides(table)])]
    for section in table.sections:
        if section.title:
            lines.append(_pipes([_markdown_text(section.title), *[""] * (len(head) - 1)]))
        for line in section.lines:
            label = ("&emsp;" if line.indent else "") + _markdown_text(line.label)
            lines.append(_pipes([label, *map(_markdown_text, line.facts), *map(_markdown_cell, line.cells)]))
    below = [_markdown_text(text) for text in (*table.notes, table.caption) if text]
    return "\n".join(lines) + "\n" + "".join(f"\n{text}\n" for text in below)


def comma_separated(table: Table) -> str:
    """A CSV of what is printed, without marks; the first column has the rows' keys, since labels may repeat.

    What is to be said of runs (unofficial documents, another measurement) follows in rows of the key "note".
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    names = ["key", plain(table.corner) or "label", *map(plain, table.facts), *column_names(table)]
    writer.writerow(map(in_csv, names))
    for section in table.sections:
        for line in section.lines:
            texts = [line.key, plain(line.label), *map(plain, line.facts)]
            writer.writerow([*map(in_csv, texts), *(cell.value + beside(cell) for cell in line.cells)])
    for note in table.notes:
        writer.writerow(["note", in_csv(plain(note)), *[""] * (table.width - 1)])
    return buffer.getvalue()


def web(table: Table, standalone: bool = False) -> str:
    """A table element, or a page that holds it."""
    head = _web_heading(table)
    bodies = "".join(_web_section(section, table.width) for section in table.sections)
    notes = "".join(f'<tr><td colspan="{table.width}">{_web_text(note)}</td></tr>\n' for note in table.notes)
    foot = f"<tfoot>\n{notes}</tfoot>\n" if notes else ""
    caption = f"<caption>{_web_text(table.caption)}</caption>\n" if table.caption else ""
    begin = f'<table class="evalkit" id="{html.escape(table.name)}">\n'
    element = f"{begin}{caption}<thead>\n{head}</thead>\n{bodies}{foot}</table>\n"
    if not standalone:
        return element
    title = f"<title>{html.escape(table.name)}</title>"
    return f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n{title}\n{_STYLE}{element}</html>\n'


def terminal(table: Table) -> str:
    """Plain text; * stands after what is bold, _ after what is underlined, † after a significant lead."""
    from evalkit.reporting.page import aligned

    head = [plain(table.corner), *map(plain, table.facts), *column_names(table)]
    rows: list[list[str]] = []
    cells = [cell for section in table.sections for line in section.lines for cell in line.cells]
    room = max((len(_terminal_marks(cell)) for cell in cells), default=0)
    for section in table.sections:
        if section.title:
            rows.append([plain(section.title), *[""] * (len(head) - 1)])
        for line in section.lines:
            rows.append(
                [_terminal_label(line), *map(plain, line.facts), *(_terminal_cell(c, room) for c in line.cells)]
            )
    text = aligned(rows, head, tablefmt="simple", colalign=_sides(table), preserve_whitespace=True)
    notes = [plain(note) for note in table.notes]
    return "\n".join([*(line.rstrip() for line in text.splitlines()), *([""] if notes else []), *notes]) + "\n"


def _sides(table: Table) -> list[str]:
    """Numbers stand right, with the short texts beside them; a table of texts alone stands left."""
    numbers = sum(len(group.labels) for group in table.columns)
    return ["left", *["right" if numbers else "left"] * len(table.facts), *["right"] * numbers]


def _pipes(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _markdown_text(text: Text) -> str:
    return "".join(map(_markdown_span, text))


def _markdown_span(span: Span) -> str:
    # Emphasis ends only where no space stands before its mark
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


def _markdown_cell(cell: Cell) -> str:
    value = f"<u>{cell.value}</u>" if cell.underline else cell.value
    value = f"**{value}**" if cell.bold else value
    return value + ("†" if cell.significant else "") + beside(cell)


def _web_heading(table: Table) -> str:
    grouped = any(group.title for group in table.columns)
    span = ' rowspan="2"' if grouped else ""
    first = f'<th class="corner"{span}>{_web_text(table.corner)}</th>'
    first += "".join(f'<th scope="col"{span}>{_web_text(fact)}</th>' for fact in table.facts)
    labels = "".join(f'<th scope="col">{_web_text(label)}</th>' for group in table.columns for label in group.labels)
    if not grouped:
        return f"<tr>{first}{labels}</tr>\n"
    titles = "".join(
        f'<th class="group" colspan="{len(group.labels)}">{_web_text(group.title)}</th>'
        if group.title
        else f'<th colspan="{len(group.labels)}"></th>'
        for group in table.columns
    )
    return f"<tr>{first}{titles}</tr>\n<tr>{labels}</tr>\n"


def _web_section(section: Section, width: int) -> str:
    title = f'<tr class="title"><th colspan="{width}">{_web_text(section.title)}</th></tr>\n' if section.title else ""
    return f'<tbody class="{section.style}">\n{title}' + "".join(map(_web_line, section.lines)) + "</tbody>\n"


def _web_line(line: Line) -> str:
    indent = ' class="indent"' if line.indent else ""
    facts = "".join(f"<td>{_web_text(fact)}</td>" for fact in line.facts)
    cells = "".join(f"<td>{_web_cell(cell)}</td>" for cell in line.cells)
    return f'<tr><th scope="row"{indent}>{_web_text(line.label)}</th>{facts}{cells}</tr>\n'


def _web_cell(cell: Cell) -> str:
    value = f"<u>{cell.value}</u>" if cell.underline else cell.value
    value = f"<strong>{value}</strong>" if cell.bold else value
    small = f"<small>{html.escape(beside(cell))}</small>" if beside(cell) else ""
    return value + ("<sup>†</sup>" if cell.significant else "") + small


def _web_text(text: Text) -> str:
    return "".join(map(_web_span, text))


def _web_span(span: Span) -> str:
    written = html.escape(span.text)
    if span.superscript:
        return f"<sup>{written}</sup>"
    if span.small_caps:
        written = f'<span class="sc">{written}</span>'
    if span.italic or span.math:
        written = f"<em>{written}</em>"
    return f"<strong>{written}</strong>" if span.bold else written


def _terminal_label(line: Line) -> str:
    return ("  " if line.indent else "") + plain(line.label)


def _terminal_marks(cell: Cell) -> str:
    return ("*" if cell.bold else "") + ("_" if cell.underline else "") + ("†" if cell.significant else "")


def _terminal_cell(cell: Cell, room: int) -> str:
    """Filled up by blanks where others carry more marks, so that the points stand under each other."""
    return cell.value + _terminal_marks(cell).ljust(room) + beside(cell)
