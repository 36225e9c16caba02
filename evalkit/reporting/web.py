"""HTML output: tables and reports, without scripts."""

from __future__ import annotations

import html
from collections.abc import Sequence

from evalkit.escape import printable
from evalkit.reporting.markup import Span, Text
from evalkit.reporting.table import Cell, Line, Section, Table, beside

_STYLE = """<style>
body { font: 15px/1.5 Georgia, serif; margin: 1em; }
table.evalkit { border-collapse: collapse; font: 15px/1.5 Georgia, serif; margin: 1em auto; }
table.evalkit thead { border-top: 2px solid; border-bottom: 1px solid; }
table.evalkit tbody.line, table.evalkit tbody.ruled, table.evalkit tbody.ruled tr.title { border-top: 1px solid; }
table.evalkit tbody.ruled tr.title { border-bottom: 1px solid; }
table.evalkit tbody:last-of-type { border-bottom: 2px solid; }
table.evalkit th, table.evalkit td { padding: .15em .7em; text-align: center; white-space: nowrap; }
table.evalkit th { font-weight: normal; }
table.evalkit.right td, table.evalkit.right th { text-align: right; }
table.evalkit.right td.fact, table.evalkit.right th.fact { text-align: left; white-space: normal; }
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


def html_table(table: Table) -> str:
    """Return a table element."""
    head = _heading(table)
    bodies = "".join(_section(section, table.width) for section in table.sections)
    notes = "".join(f'<tr><td colspan="{table.width}">{_text(note)}</td></tr>\n' for note in table.notes)
    foot = f"<tfoot>\n{notes}</tfoot>\n" if notes else ""
    caption = f"<caption>{_text(table.caption)}</caption>\n" if table.caption else ""
    kind = "evalkit" if table.by_point else "evalkit right"
    begin = f'<table class="{kind}" id="{html.escape(table.name)}">\n'
    return f"{begin}{caption}<thead>\n{head}</thead>\n{bodies}{foot}</table>"


def html_lines(lines: Sequence[str], element: str) -> str:
    """Return sentences as paragraphs (p), or as the items of a list (ul)."""
    escaped = [html.escape(printable(line)) for line in lines]
    if element == "ul":
        return "<ul>\n" + "".join(f"<li>{line}</li>\n" for line in escaped) + "</ul>"
    return "\n".join(f"<p>{line}</p>" for line in escaped)


def html_page(title: str, body: str) -> str:
    """Return a complete page."""
    head = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
    return f"{head}{_STYLE}{body}\n</html>"


def _heading(table: Table) -> str:
    grouped = any(group.title for group in table.columns)
    span = ' rowspan="2"' if grouped else ""
    corner = "th" if table.corner else "td"  # a heading without text is none
    first = f'<{corner} class="corner"{span}>{_text(table.corner)}</{corner}>'
    first += "".join(f'<th scope="col" class="fact"{span}>{_text(fact)}</th>' for fact in table.facts)
    labels = "".join(f'<th scope="col">{_text(label)}</th>' for group in table.columns for label in group.labels)
    if not grouped:
        return f"<tr>{first}{labels}</tr>\n"
    titles = "".join(
        f'<th class="group" colspan="{len(group.labels)}">{_text(group.title)}</th>'
        if group.title
        else f'<td colspan="{len(group.labels)}"></td>'
        for group in table.columns
    )
    return f"<tr>{first}{titles}</tr>\n<tr>{labels}</tr>\n"


def _section(section: Section, width: int) -> str:
    title = f'<tr class="title"><th colspan="{width}">{_text(section.title)}</th></tr>\n' if section.title else ""
    return f'<tbody class="{section.style}">\n{title}' + "".join(map(_line, section.lines)) + "</tbody>\n"


def _line(line: Line) -> str:
    indent = ' class="indent"' if line.indent else ""
    facts = "".join(f'<td class="fact">{_text(fact)}</td>' for fact in line.facts)
    cells = "".join(f"<td>{_cell(cell)}</td>" for cell in line.cells)
    return f'<tr><th scope="row"{indent}>{_text(line.label)}</th>{facts}{cells}</tr>\n'


def _cell(cell: Cell) -> str:
    value = html.escape(printable(cell.value))
    value = f"<u>{value}</u>" if cell.underline else value
    value = f"<strong>{value}</strong>" if cell.bold else value
    small = f"<small>{html.escape(beside(cell))}</small>" if beside(cell) else ""
    return value + ("<sup>†</sup>" if cell.significant else "") + small


def _text(text: Text) -> str:
    return "".join(map(_span, text))


def _span(span: Span) -> str:
    written = html.escape(span.text)
    if span.superscript:
        return f"<sup>{written}</sup>"
    if span.small_caps:
        written = f'<span class="sc">{written}</span>'
    if span.italic or span.math:
        written = f"<em>{written}</em>"
    return f"<strong>{written}</strong>" if span.bold else written
