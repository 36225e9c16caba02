"""Reports of commands in every format: sentences, tables and notes for readers, records and content for programs.

All commands print by `render`, so that all support the same formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from evalkit.errors import UsageError
from evalkit.escape import PACKAGES, in_markdown
from evalkit.reporting import formats
from evalkit.reporting.latex import latex_comments, latex_document, latex_table
from evalkit.reporting.table import Format, Table, literal, plain

_FOLDERS = re.compile(r"^(\w+: .*) \([^()]*\)$")
"""A side of a comparison with its run folders, which a paper does not print."""
_PARENTS = re.compile(r"(?<![^\s(\"'])/(?:[^\s/]+/)*(?=[^\s/])")
"""The folders of an absolute path, which are this machine's."""


@dataclass(frozen=True)
class Report:
    """Printed content of a run, a comparison, a table or a list."""

    tables: Sequence[Table]
    verdict: Sequence[str] = ()
    facts: Sequence[str] = ()
    notes: Sequence[str] = ()
    content: Any = None
    """Content of JSON; None: that of the tables."""
    records: Sequence[formats.Record] | None = None
    """Content of CSV; None: that of the table."""
    parts: tuple[Report, ...] = ()
    """Reports that are printed one after the other, in place of sentences and tables."""
    caution: tuple[str, ...] = ()
    """Sentences without which the tables mislead; the verdict begins with them."""

    @property
    def all_notes(self) -> list[str]:
        notes = [*(plain(note) for table in self.tables for note in table.notes), *self.notes]
        return notes + [note for part in self.parts for note in part.all_notes]

    def tables_alone(self) -> Report:
        """Return the report without sentences and notes, but its caution; JSON and CSV stay the same."""
        tables = tuple(table.with_notes() for table in self.tables)
        parts = tuple(part.tables_alone() for part in self.parts)
        return replace(self, tables=tables, verdict=self.caution, facts=(), notes=(), parts=parts)

    def with_caution(self, sentence: str) -> Report:
        """Return the report with a first sentence without which its tables mislead; empty: the report itself."""
        return replace(self, verdict=(sentence, *self.verdict), caution=(sentence,)) if sentence else self

    def with_notes(self, lines: Sequence[str]) -> Report:
        """Return the report with further notes, at its end and in its JSON."""
        if not lines:
            return self
        content = self.content
        if isinstance(content, dict):
            content = content | {"notes": [*content.get("notes", ()), *lines]}
        *parts, last = self.parts or (self,)
        last = replace(last, notes=(*last.notes, *lines))
        return replace(self, parts=(*parts, last), content=content) if self.parts else replace(last, content=content)


def render(report: Report, form: Format, *, standalone: bool = False, width: int | None = None) -> str:
    """Render a report as text, without a newline at the end.

    With `standalone`, LaTeX is a complete document, and HTML a complete page. Without a `width` of the terminal,
    sentences are not wrapped. CSV can contain one table only: of a report with several it is a `UsageError`.
    """
    parts = report.parts or (report,)
    if form == "json":
        return formats.json_text(_content(report))
    if form == "csv":
        return _csv(report)
    if form == "terminal":
        from evalkit.reporting.terminal import terminal_table, wrapped

        def lines(texts: Sequence[str]) -> str:
            return "\n".join(wrapped(text, width) for text in texts)

        tables = partial(terminal_table, width=width)
        return "\n\n\n".join("\n\n".join(_blocks(part, lines, lines, tables)) for part in parts)
    if form == "markdown":
        written = [_blocks(part, _paragraphs, _list, formats.markdown_table) for part in parts]
        return "\n\n".join(chain(*written))
    if form == "latex":
        body = "\n\n".join(block for part in parts for block in _latex_blocks(part))
        return latex_document(body) if standalone else f"% needs {PACKAGES}\n{body}"
    sentences, listed = partial(formats.html_lines, element="p"), partial(formats.html_lines, element="ul")
    body = "\n".join(block for part in parts for block in _blocks(part, sentences, listed, formats.html_table))
    title = next((table.name for part in parts for table in part.tables), "evalkit")
    return formats.html_page(title, body) if standalone else body


_Lines: TypeAlias = Callable[[Sequence[str]], str]


def _blocks(part: Report, sentences: _Lines, listed: _Lines, table: Callable[[Table], str]) -> list[str]:
    above = [write(lines) for write, lines in ((sentences, part.verdict), (listed, part.facts)) if lines]
    return [*above, *map(table, part.tables), *([listed(part.notes)] if part.notes else [])]


def _paragraphs(texts: Sequence[str]) -> str:
    first, *others = map(in_markdown, texts)
    return "\n\n".join([f"**{first}**", *others])


def _list(texts: Sequence[str]) -> str:
    return "\n".join(f"- {in_markdown(text)}" for text in texts)


def _latex_blocks(part: Report) -> list[str]:
    tables = list(part.tables)
    facts = [_FOLDERS.sub(r"\1", fact) for fact in part.facts]
    remarks = [_PARENTS.sub("", note) for note in part.notes]
    if tables:  # the first has the first sentence as its caption if it has none, and below it what its marks mean
        marks = (*facts, *(note for note in part.notes if note.startswith(("*", "†", "↓"))))
        notes = (*tables[0].notes, *map(literal, marks))
        tables[0] = tables[0]._replace(caption=tables[0].caption or literal("".join(part.verdict[:1])), notes=notes)
    above = latex_comments((*part.verdict, *facts))
    below = latex_comments(remarks)
    return [*filter(None, [above]), *map(latex_table, tables), *filter(None, [below])]


def _content(report: Report) -> Any:
    if report.content is not None:
        return report.content
    if report.parts:
        return list(map(_content, report.parts))
    if len(report.tables) == 1 and not (report.verdict or report.facts or report.notes):
        return formats.table_content(report.tables[0])
    lines = {"verdict": report.verdict, "facts": report.facts, "notes": report.notes}
    tables = list(map(formats.table_content, report.tables))
    return {"tables": tables} | {name: text for name, text in lines.items() if text}


def _csv(report: Report) -> str:
    if report.records is not None:
        return formats.records_csv(report.records)
    tables = [table for part in report.parts or (report,) for table in part.tables]
    if len(tables) != 1:
        names = ", ".join(table.name for table in tables)
        raise UsageError(f"--format csv can contain one table, not several ({names}); name one, or use json")
    return formats.table_csv(tables[0])
