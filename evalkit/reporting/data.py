"""CSV and JSON output. In: tables, or records. Out: text for programs."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from evalkit.escape import in_csv, in_markdown
from evalkit.reporting.markup import Span, Text, plain
from evalkit.reporting.table import MISSING, Cell, Table, beside, column_names


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


_NUMBER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?%?")
Record = Mapping[str, Any]
"""A row of a CSV: unrounded numbers, None for missing values."""


def records_csv(records: Sequence[Record]) -> str:
    """Return records as CSV, one line each; missing values are empty. Columns are in the order of first occurrence."""
    out = io.StringIO()
    columns = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: in_csv(value) for name, value in record.items()} for record in records)
    return out.getvalue().rstrip("\n")


def table_csv(table: Table) -> str:
    """Return a table as CSV, without marks; row keys, if any, are the first column, since labels may repeat.

    The table's notes (unofficial documents, other protocols) follow in rows of the key "note".
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    keyed = any(line.key for line in table.lines)
    names = [plain(table.corner) or "label", *map(plain, table.facts), *column_names(table)]
    writer.writerow(map(in_csv, ["key", *names] if keyed else names))
    for line in table.lines:
        texts = [line.key, plain(line.label), *map(plain, line.facts)][not keyed :]
        writer.writerow(map(in_csv, [*texts, *(cell.value + beside(cell) for cell in line.cells)]))
    for note in table.notes:
        writer.writerow(["note", in_csv(plain(note)), *[""] * (table.width - 2 + keyed)])
    return out.getvalue().rstrip("\n")


def table_content(table: Table) -> dict[str, Any]:
    """Return a table as plain data: rows with their texts by heading and their numbers by column."""
    headings = _unique([plain(table.corner) or "label", *map(plain, table.facts), *column_names(table)])
    corner, facts, columns = headings[0], headings[1 : 1 + len(table.facts)], headings[1 + len(table.facts) :]
    rows = [
        {
            **({"section": plain(section.title)} if section.title else {}),
            **({"key": line.key} if line.key else {}),
            corner: plain(line.label),
            **dict(zip(facts, map(plain, line.facts), strict=True)),
            **dict(zip(columns, map(_content, line.cells), strict=True)),
        }
        for section in table.sections
        for line in section.lines
    ]
    about = {"name": table.name, **({"caption": plain(table.caption)} if table.caption else {}), "rows": rows}
    return about | ({"notes": list(map(plain, table.notes))} if table.notes else {})


def _unique(headings: Sequence[str]) -> list[str]:
    """Return headings as keys of a row: a later one of the same name, or of a row's own key, gets a number."""
    found = ["section", "key"]
    for heading in headings:
        name, number = heading, 2
        while name in found:
            name, number = f"{heading} ({number})", number + 1
        found.append(name)
    return found[2:]


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
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
