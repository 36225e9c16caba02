"""Tables as Markdown, HTML, CSV and JSON, and records as CSV. In: tables, or records. Out: text."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evalkit.escape import in_csv, in_markdown, printable
from evalkit.reporting.table import MISSING, Cell, Table, Text, beside, column_names, marked, plain


def markdown_table(table: Table) -> str:
    """Return a pipe table with its notes and caption; a section's title has a row of its own."""
    corner, *facts = map(_markdown, table.headings)
    rows = [[corner or " ", *facts, *map(in_markdown, column_names(table))]]
    rows.append([":--"] * (1 + len(facts)) + ["--:"] * table.numbers)
    for section in table.sections:
        if section.title:
            rows.append([_markdown(section.title), *[""] * (table.width - 1)])
        for line in section.lines:
            label, *texts = map(_markdown, line.texts)
            rows.append(["&emsp;" * line.indent + label, *texts, *map(_markdown_cell, line.cells)])
    lines = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    caption = [_markdown(table.caption)] if table.caption else []
    return "\n\n".join([*caption, lines, *(_markdown(note) for note in table.notes if note)])


_MARKDOWN = {"italic": ("*", "*"), "math": ("*", "*"), "underline": ("<u>", "</u>"), "bold": ("**", "**")}


def _markdown(text: Text) -> str:
    spans = []
    for span in text:
        # Emphasis ends only where its mark does not follow a space
        inner = span.text.strip(" ")
        left, _, right = span.text.partition(inner) if inner else (span.text, "", "")
        written = marked(span, in_markdown(inner), _MARKDOWN) if inner else ""
        spans.append(f"<sup>{written}</sup>" if span.superscript else left + written + right)
    return "".join(spans)


def _markdown_cell(cell: Cell) -> str:
    return marked(cell, in_markdown(cell.value), _MARKDOWN) + "†" * cell.significant + beside(cell)


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
    return "".join(_html_parts(table))


def html_lines(lines: Sequence[str], element: str) -> str:
    """Return sentences as paragraphs (p), or as the items of a list (ul); addresses are links."""
    escaped = [_linked(printable(line)) for line in lines]
    if element == "ul":
        return "<ul>\n" + "".join(f"<li>{line}</li>\n" for line in escaped) + "</ul>"
    return "\n".join(f"<p>{line}</p>" for line in escaped)


def html_page(title: str, body: str) -> str:
    """Return a complete page."""
    head = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
    return f"{head}{_STYLE}{body}\n</html>"


def _html_parts(table: Table) -> Iterator[str]:
    yield f'<table class="{"evalkit" if table.by_point else "evalkit right"}" id="{html.escape(table.name)}">\n'
    if table.caption:
        yield f"<caption>{_html(table.caption)}</caption>\n"
    grouped = any(group.title for group in table.columns)
    span = ' rowspan="2"' if grouped else ""
    corner = "th" if table.corner else "td"  # a heading without text is none
    yield f'<thead>\n<tr><{corner} class="corner"{span}>{_html(table.corner)}</{corner}>'
    yield from (f'<th scope="col" class="fact"{span}>{_html(fact)}</th>' for fact in table.facts)
    if grouped:
        for group in table.columns:
            begin, title, end = ('<th class="group"', _html(group.title), "th") if group.title else ("<td", "", "td")
            yield f'{begin} colspan="{len(group.labels)}">{title}</{end}>'
        yield "</tr>\n<tr>"
    yield from (f'<th scope="col">{_html(label)}</th>' for group in table.columns for label in group.labels)
    yield "</tr>\n</thead>\n"
    for section in table.sections:
        yield f'<tbody class="{section.style}">\n'
        if section.title:
            yield f'<tr class="title"><th colspan="{table.width}">{_html(section.title)}</th></tr>\n'
        for line in section.lines:
            indent = ' class="indent"' if line.indent else ""
            facts = "".join(f'<td class="fact">{_html(fact)}</td>' for fact in line.facts)
            cells = "".join(f"<td>{_html_cell(cell)}</td>" for cell in line.cells)
            yield f'<tr><th scope="row"{indent}>{_html(line.label)}</th>{facts}{cells}</tr>\n'
        yield "</tbody>\n"
    if table.notes:
        notes = "".join(f'<tr><td colspan="{table.width}">{_html(note)}</td></tr>\n' for note in table.notes)
        yield f"<tfoot>\n{notes}</tfoot>\n"
    yield "</table>"


_TAGS = {"italic": "em", "math": "em", "underline": "u", "bold": "strong", "superscript": "sup"}
_HTML = {"small_caps": ('<span class="sc">', "</span>")}
_HTML |= {style: (f"<{tag}>", f"</{tag}>") for style, tag in _TAGS.items()}


def _html_cell(cell: Cell) -> str:
    value = marked(cell, html.escape(printable(cell.value)), _HTML)
    small = f"<small>{html.escape(beside(cell))}</small>" if beside(cell) else ""
    return value + "<sup>†</sup>" * cell.significant + small


def _html(text: Text) -> str:
    return "".join(marked(span, _linked(span.text), _HTML) for span in text)


_ADDRESS = re.compile(r"https?://(?:[\w/.?#@!$*+=%~,:;-]|&amp;)*[\w/#=-]")  # in escaped text


def _linked(text: str) -> str:
    return _ADDRESS.sub(r'<a href="\g<0>">\g<0></a>', html.escape(text))


_NUMBER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?%?")
Record = Mapping[str, Any]
"""A row of a CSV: unrounded numbers, None for missing values."""


def records_csv(records: Sequence[Record]) -> str:
    """Return records as CSV, one line each; missing values are empty. Columns are in the order of first occurrence."""
    columns = list(dict.fromkeys(name for record in records for name in record))
    return _csv([columns, *([record.get(name) for name in columns] for record in records)])


def table_csv(table: Table) -> str:
    """Return a table as CSV, without marks; row keys, if any, are the first column, since labels may repeat.

    The table's notes (unofficial documents, other protocols) follow in rows of the key "note".
    """
    unkeyed = not any(line.key for line in table.lines)
    rows = [["key", *_names(table)][unkeyed:]]
    for line in table.lines:
        rows.append([line.key, *map(plain, line.texts), *(cell.value + beside(cell) for cell in line.cells)][unkeyed:])
    rows += [["note", plain(note), *[""] * (len(rows[0]) - 2)] for note in table.notes]
    return _csv(rows)


def _csv(rows: Sequence[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(in_csv, row) for row in rows)
    return out.getvalue().rstrip("\n")


def _names(table: Table) -> list[str]:
    corner, *facts = map(plain, table.headings)
    return [corner or "label", *facts, *column_names(table)]


def table_content(table: Table) -> dict[str, Any]:
    """Return a table as plain data: rows with their texts by heading and their numbers by column."""
    names = ["section", "key"]
    for heading in _names(table):
        name, number = heading, 2
        while name in names:  # a later heading of the same name gets a number
            name, number = f"{heading} ({number})", number + 1
        names.append(name)
    rows = []
    for section in table.sections:
        for line in section.lines:
            row = {"section": plain(section.title)} if section.title else {}
            row |= {"key": line.key} if line.key else {}
            content = [*map(plain, line.texts), *map(_content, line.cells)]
            rows.append(row | dict(zip(names[2:], content, strict=True)))
    caption = {"caption": plain(table.caption)} if table.caption else {}
    notes = {"notes": list(map(plain, table.notes))} if table.notes else {}
    return {"name": table.name, **caption, "rows": rows, **notes}


def json_text(content: Any) -> str:
    """Return indented JSON; missing values are null."""
    return json.dumps(_plain(content), indent=2, ensure_ascii=False, allow_nan=False)


def _content(cell: Cell) -> Any:
    """Return a cell's number, or a dict with its spread, difference and marks where it has any."""
    value = _number(cell.value)
    more = {name: _number(text) for name, text in (("spread", cell.spread), ("difference", cell.difference)) if text}
    marks = {name: True for name in ("bold", "underline", "significant") if getattr(cell, name)}
    return {"value": value} | more | marks if more or marks else value


def _number(text: str) -> Any:
    """Return the number that a cell prints (percent in a table of percentages); None if empty, else the text."""
    if text in ("", MISSING, "–"):
        return None
    if not _NUMBER.fullmatch(text):
        return text
    digits = text.replace(",", "").removeprefix("+").removesuffix("%")
    return float(digits) if "." in digits else int(digits)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
