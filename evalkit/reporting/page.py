"""Tables as text: for a terminal, Markdown, LaTeX (booktabs), CSV and JSON.

Of comparisons and of LongBench; the paper's tables, with markup and marks, have writers of their own (`tables/`).

In: a `Page`, whose cells are strings as they are to be read; or records, for the forms that programs read.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import SEPARATING_LINE, tabulate

from evalkit.reporting.escape import PACKAGES, SHRUNK, in_csv, in_latex, in_markdown, printable

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """One table; its first column is text, all others are numbers or short words."""

    headers: Row
    rows: tuple[Row, ...]
    ruled: frozenset[int] = frozenset()
    """Rows that a line stands above."""
    title: str = ""


@dataclass(frozen=True)
class Page:
    """What is printed of one comparison, curve or benchmark."""

    verdict: tuple[str, ...]
    """In words, what was found and what that says."""
    facts: tuple[str, ...]
    """Lines above the tables: what was compared."""
    tables: tuple[Table, ...]
    notes: tuple[str, ...]


def aligned(rows: Iterable[Any], headers: Sequence[str] = (), **options: Any) -> str:
    """Columns for a terminal: nothing is taken for a number, and no name breaks its line."""
    shown = [row if row == SEPARATING_LINE else [_on_one_line(cell) for cell in row] for row in rows]
    return tabulate(shown, list(map(printable, headers)), disable_numparse=True, **options)


def terminal(page: Page) -> str:
    """Aligned columns."""
    blocks = ["\n".join(map(printable, lines)) for lines in (page.verdict, page.facts) if lines]
    for table in page.tables:
        rows: list[Any] = []
        for place, row in enumerate(table.rows):
            rows += [SEPARATING_LINE, row] if place in table.ruled else [row]
        sides = ["left"] + ["right"] * (len(table.headers) - 1)
        text = aligned(rows, table.headers, tablefmt="simple", colalign=sides)
        blocks.append(f"{printable(table.title)}\n\n{text}" if table.title else text)
    return "\n\n".join([*blocks, "\n".join(map(printable, page.notes))])


def markdown(page: Page) -> str:
    """Pipe tables, as GitHub shows them."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(map(in_markdown, cells)) + " |"

    blocks = [*(f"**{in_markdown(text)}**" for text in page.verdict[:1]), *map(in_markdown, page.verdict[1:])]
    blocks += ["\n".join(f"- {in_markdown(fact)}" for fact in page.facts)] if page.facts else []
    for table in page.tables:
        blocks += [in_markdown(table.title)] if table.title else []
        under = "|---|" + "---:|" * (len(table.headers) - 1)
        blocks.append("\n".join([line(table.headers), under, *map(line, table.rows)]))
    return "\n\n".join([*blocks, "\n".join(f"- {in_markdown(note)}" for note in page.notes)])


def latex(page: Page) -> str:
    """Tabulars with booktabs' rules; what stands above and below is in comments, for a caption."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join(map(_latex_cell, cells)) + r" \\"

    about = (f"needs {PACKAGES}", *page.verdict, *page.facts)
    blocks = ["\n".join(f"% {printable(text)}" for text in about)]
    for table in page.tables:
        body = [
            *([f"% {printable(table.title)}"] if table.title else []),
            r"\medskip\noindent" + SHRUNK,
            rf"\begin{{tabular}}{{l{'r' * (len(table.headers) - 1)}}}",
            r"\toprule",
            line(table.headers),
            r"\midrule",
        ]
        for place, row in enumerate(table.rows):
            body += [r"\midrule", line(row)] if place in table.ruled else [line(row)]
        blocks.append("\n".join([*body, r"\bottomrule", r"\end{tabular}}"]))
    return "\n\n".join([*blocks, "\n".join(f"% {printable(note)}" for note in page.notes)])


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """One line a record, numbers in full; what is not known is empty."""
    held = io.StringIO()
    writer = csv.DictWriter(held, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: in_csv(value) for name, value in record.items()} for record in records)
    return held.getvalue().rstrip("\n")


def json_text(content: Any) -> str:
    """Indented; what is not known is null."""
    return json.dumps(_plain(content), indent=2, ensure_ascii=False, allow_nan=False)


PAGES: dict[str, Callable[[Page], str]] = {"terminal": terminal, "markdown": markdown, "latex": latex}
"""How a page is written, by --format."""


def _on_one_line(cell: Any) -> Any:
    return printable(cell) if isinstance(cell, str) else cell


_MINUS = re.compile(r"(?<![^ ])-(?=\d| )")


def _latex_cell(text: str) -> str:
    """What is a minus and no hyphen becomes one."""
    return in_latex(_MINUS.sub("−", text))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
