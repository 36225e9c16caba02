"""One self-contained HTML file: static panels, and an explorer of documents where the page has them.

In: a `Page`. Out: HTML with its styles, scripts, figures and data inline. Its content security policy permits only the
inline scripts that are written here, by their hashes, and no request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from evalkit.escape import in_json, printable
from evalkit.pages.documents import DocumentData
from evalkit.paths import replace_file
from evalkit.reporting.formats import html_lines, html_table
from evalkit.reporting.report import Report, render
from evalkit.reporting.table import SUFFIXES, Format, Table
from evalkit.suites.templates import Piece


@dataclass(frozen=True)
class PageFigure:
    name: str
    """Unique in the page, and the name of the file that a reader saves."""
    words: str
    """What it shows, in one sentence: the caption, and the text in place of the picture."""
    svg: str


@dataclass(frozen=True)
class Panel:
    """A titled part of a page."""

    name: str
    """Anchor, unique in the page: letters, digits, hyphens."""
    title: str
    reports: tuple[Report, ...] = ()
    """Sentences, tables and notes; each table can be copied as LaTeX, Markdown and CSV."""
    figures: tuple[PageFigure, ...] = ()
    prompts: tuple[tuple[str, tuple[Piece, ...]], ...] = ()
    """Rendered examples, with a title each."""
    panels: tuple[Panel, ...] = ()
    """Further parts, closed until the reader opens them."""


@dataclass(frozen=True)
class Page:
    """Content of a page."""

    title: str
    made: str
    """By what and when the page was made, in one sentence."""
    chapters: Mapping[str, Sequence[Panel]]
    """Title → panels, in their order; chapters without panels are left out, but for Documents if there are any."""
    documents: DocumentData | None = None

    @property
    def verdicts(self) -> list[Panel]:
        """Comparisons that are not curves."""
        compared = self.chapters.get("Comparisons", ())
        return [panel for panel in compared if panel.reports and not panel.name.startswith("curves")]


def svg_of(draw: Callable[[Path], None]) -> str:
    """Return what a function draws into a file that ends in .svg; the same figure gives the same text."""
    with TemporaryDirectory(prefix="evalkit-") as folder:
        path = Path(folder) / "figure.svg"
        draw(path)
        return path.read_text(encoding="utf-8")


_ASSETS = Path(__file__).parent / "assets"
_TABULATOR = "vendor/tabulator.min"
_PICTURE = "data:image/svg+xml;base64,"
_DOCUMENT_SCRIPTS = ("blocks.js", "task.js", "filters.js", "table.js", "document.js", "controls.js", "explorer.js")
"""Scripts of the explorer, in the order of their definitions."""
_COPIED: tuple[tuple[Format, str], ...] = (("latex", "LaTeX"), ("markdown", "Markdown"), ("csv", "CSV"))
_SOURCE_MAP = re.compile(r"^(//# sourceMappingURL=.*|/\*# sourceMappingURL=.*\*/)$", re.MULTILINE)
_ENDS_SCRIPT = re.compile(r"</script|<!--", re.IGNORECASE)


class _CopiedTables:
    """Tables in the order of the page, with the texts that their buttons copy."""

    def __init__(self) -> None:
        self._texts: list[dict[str, str]] = []
        self._names: list[str] = []

    def add(self, table: Table) -> dict[str, Any]:
        """Return number, name and HTML of the next table; its anchor is the number, since names may repeat."""
        # LaTeX's label is the name, so that two tables of a page can stand in one paper
        number, count = len(self._names), self._names.count(table.name) + 1
        report = Report((table if count == 1 else table._replace(name=f"{table.name}-{count}"),))
        self._names.append(table.name)
        self._texts.append({form: render(report, form) for form, _ in _COPIED})
        element = Markup(html_table(table._replace(name=f"table-{number}")))
        return {"number": number, "name": printable(table.name), "html": element}

    def json(self) -> Markup:
        return _json(self._texts)


def write_page(page: Page, path: Path) -> None:
    """Write the page atomically; characters that UTF-8 cannot represent are written by their code."""
    scripts, styles, library, explored = ["elements.js", "page.js"], ["page.css"], "", list[str]()
    if page.documents is not None:
        explored = ["Documents"]
        scripts[1:1], library = _DOCUMENT_SCRIPTS, _asset(f"{_TABULATOR}.js")
        styles = [f"{_TABULATOR}.css", "page.css", "documents.css"]
    body = "\n".join(map(_asset, scripts))
    script = f'\n{library}\n(() => {{\n"use strict";\n{body}\n}})();\n'
    if _ENDS_SCRIPT.search(script):
        raise ValueError("a script of evalkit/pages/assets has '</script' or '<!--' in it")
    dark = partial(re.sub, r"<svg\b[^>]*>", rf'\g<0><style class="dark">{_asset("figure.css")}</style>', count=1)
    environment = Environment(loader=FileSystemLoader(_ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True,
                              undefined=StrictUndefined)  # fmt: skip
    environment.filters["printable"] = printable
    environment.filters["prompt"] = lambda text: printable(text, "\n\t")
    chunks = environment.get_template("page.html.j2").generate(
        page=page,
        chapters=[(name.lower(), name, panels) for name, panels in page.chapters.items() if panels or name in explored],
        tables=_CopiedTables(),
        index=_json(page.documents.index) if page.documents else "",
        script=Markup(script),
        style=Markup("\n".join(map(_asset, styles))),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        lines=lambda lines, element: Markup(html_lines(lines, element)),
        picture=lambda figure: _PICTURE + base64.b64encode(dark(figure.svg).encode("utf-8", "replace")).decode(),
        formats=[(form, label, SUFFIXES[form]) for form, label in _COPIED],
    )
    replace_file(path, (chunk.encode("utf-8", "backslashreplace") for chunk in chunks))


def _json(content: Any) -> Markup:
    """Return JSON that cannot end the element it is in, with changes of direction by their codes."""
    text = in_json(json.dumps(content, separators=(",", ":"), allow_nan=False, ensure_ascii=False))
    return Markup(text.replace("<", "\\u003c"))


def _asset(name: str) -> str:
    return _SOURCE_MAP.sub("", (_ASSETS / name).read_text(encoding="utf-8"))
