"""One self-contained HTML file: static panels, and an explorer of documents where the page has them.

In: a `Page`. Out: HTML with its styles, scripts, figures and data inline. Its content security policy permits only the
inline scripts that are written here, by their hashes, and no request. The documents of a task are a block: a JSON
header and number arrays, compressed, as base64.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from evalkit.benchmarks.document_views import Piece, TaskView
from evalkit.data.sampling import DocumentSample
from evalkit.escape import in_json, printable
from evalkit.paths import replace_file
from evalkit.reporting.formats import html_lines, html_table
from evalkit.reporting.report import Report, render
from evalkit.reporting.table import SUFFIXES, Format, Table
from evalkit.runs.folder import Run
from evalkit.runs.score_table import SEGMENTS

DocumentName: TypeAlias = tuple[str, Any]
"""Subtask, and the document's id in it."""


@dataclass(frozen=True)
class ViewOfRun:
    """A run's view of a task."""

    number: int
    """Place of the run in the page."""
    run: Run
    view: TaskView


class Union:
    """The documents of several runs of one task, given in order, or a sample of them."""

    def __init__(self, task: str, by_run: Sequence[Sequence[DocumentName]], sample: DocumentSample | None) -> None:
        every = list(dict.fromkeys(name for names in by_run for name in names))
        taken = range(len(every)) if sample is None else sample.places(task, [subtask for subtask, _ in every])
        self.total = len(every)
        self.names = [every[number] for number in taken]
        self.subtasks = list(dict.fromkeys(subtask for subtask, _ in self.names))
        self._places = {name: place for place, name in enumerate(self.names)}

    def places(self, names: Sequence[DocumentName]) -> NDArray[np.int64]:
        """Return the place of each document, -1 of those that are not taken."""
        return np.fromiter((self._places.get(name, -1) for name in names), np.int64, len(names))

    def subtask_numbers(self) -> NDArray[np.int64]:
        """Return the number of each document's subtask in `subtasks`."""
        number = {subtask: place for place, subtask in enumerate(self.subtasks)}
        return np.fromiter((number[subtask] for subtask, _ in self.names), np.int64, len(self.names))

    def about(self) -> dict[str, Any]:
        """Return the entries of the page's index."""
        return {"documents": len(self.names), "of": self.total, "subtasks": self.subtasks}


def indexed(pieces: Iterable[Piece]) -> list[list[Any]]:
    """Return [place of the segment in `SEGMENTS`, −1 for another one, text] of each piece."""
    return [[SEGMENTS.index(piece.segment) if piece.segment in SEGMENTS else -1, piece.text] for piece in pieces]


def problem_of(views: Iterable[TaskView]) -> str:
    """Return the distinct problems of a task's views, joined."""
    return "; ".join(dict.fromkeys(view.problem for view in views if view.problem))


_ALIGNED = 8


@dataclass(frozen=True)
class DocumentData:
    """Documents of a page."""

    index: Mapping[str, Any]
    """Runs and tasks, JSON-compatible; "block" of a task is a place in `blocks`."""
    blocks: Sequence[str]


def encoded(header: Mapping[str, Any], arrays: Mapping[str, tuple[str, NDArray[Any]]]) -> str:
    """Return a block as base64: JSON-compatible content, and name → (u1, u2, i4, f4 or f8; values of any shape).

    Raises:
        OverflowError: an integer does not fit its type.
    """
    table: dict[str, list[Any]] = {}
    parts: list[bytes] = []
    offset = 0
    for name, (kind, values) in arrays.items():
        data = _packed(name, kind, values)
        table[name] = [kind, offset, int(np.size(values))]
        data += bytes(-len(data) % _ALIGNED)
        parts.append(data)
        offset += len(data)
    text = in_json(json.dumps({**header, "arrays": table}, ensure_ascii=False, separators=(",", ":")))
    start = text.encode("utf-8", "replace")  # a lone surrogate is shown as a question mark
    start += b" " * (-(4 + len(start)) % _ALIGNED)
    content = b"".join((len(start).to_bytes(4, "little"), start, *parts))
    return base64.b64encode(gzip.compress(content, mtime=0)).decode("ascii")


def _packed(name: str, kind: str, values: NDArray[Any]) -> bytes:
    flat = np.asarray(values).ravel()
    if kind.startswith(("u", "i")) and flat.size:
        limits = np.iinfo(np.dtype(kind))
        if flat.min() < limits.min or flat.max() > limits.max:
            raise OverflowError(f"array {name}: values from {flat.min()} to {flat.max()} do not fit {kind}")
    return flat.astype(f"<{kind}").tobytes()


@dataclass(frozen=True)
class PageFigure:
    """A figure of a page."""

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


def svg_of(draw: Callable[[Path], None]) -> str:
    """Return what a function draws into a file that ends in .svg; the same figure gives the same text."""
    with TemporaryDirectory(prefix="evalkit-") as folder:
        path = Path(folder) / "figure.svg"
        draw(path)
        return path.read_text(encoding="utf-8")


_ASSETS = Path(__file__).parent / "assets"
_TABULATOR = "vendor/tabulator.min"
_DOCUMENT_SCRIPTS = ("blocks.js", "task.js", "filters.js", "table.js", "document.js", "controls.js", "explorer.js")
"""Scripts of the explorer, in the order of their definitions."""
_COPIED: tuple[tuple[Format, str], ...] = (("latex", "LaTeX"), ("markdown", "Markdown"), ("csv", "CSV"))
_SOURCE_MAP = re.compile(r"^(//# sourceMappingURL=.*|/\*# sourceMappingURL=.*\*/)$", re.MULTILINE)
_ENDS_SCRIPT = re.compile(r"</script|<!--", re.IGNORECASE)


@dataclass(frozen=True)
class Page:
    """Content of a page."""

    title: str
    made: str
    """By what and when the page was made, in one sentence."""
    overview: tuple[Panel, ...] = ()
    comparisons: tuple[Panel, ...] = ()
    results: tuple[Panel, ...] = ()
    """Results with panels of their own: LongBench, needle tests, figures of attention."""
    sources: tuple[Panel, ...] = ()
    """Sources and licences of the documents."""
    documents: DocumentData | None = None

    @property
    def chapters(self) -> list[tuple[str, str, tuple[Panel, ...]]]:
        """Return anchor, title and panels of each chapter that has panels, and of the documents."""
        chapters = [
            ("overview", "Overview", self.overview),
            ("comparisons", "Comparisons", self.comparisons),
            ("results", "Results", self.results),
            ("documents", "Documents", ()),
            ("sources", "Sources", self.sources),
        ]
        without_panels = {"documents"} if self.documents is not None else set()
        return [chapter for chapter in chapters if chapter[2] or chapter[0] in without_panels]


class _CopiedTables:
    """Tables in the order of the page, with the texts that their buttons copy."""

    def __init__(self) -> None:
        self._texts: list[dict[str, str]] = []
        self._names: Counter[str] = Counter()

    def add(self, table: Table) -> dict[str, Any]:
        """Return number, name and HTML of the next table; its anchor is the number, since names may repeat."""
        number = len(self._texts)
        self._names[table.name] += 1
        # LaTeX's label is the name, so that two tables of a page can stand in one paper
        count = self._names[table.name]
        report = Report(tables=(table if count == 1 else table._replace(name=f"{table.name}-{count}"),))
        self._texts.append({form: render(report, form) for form, _ in _COPIED})
        element = Markup(html_table(table._replace(name=f"table-{number}")))
        return {"number": number, "name": printable(table.name), "html": element}

    def json(self) -> Markup:
        """Return the texts of all tables added so far."""
        return _json(self._texts)


def render_page(page: Page) -> str:
    """Return the page as HTML."""
    return "".join(_chunks(page))


def write_page(page: Page, path: Path) -> None:
    """Write the page atomically; characters that UTF-8 cannot represent are written by their code."""
    replace_file(path, (chunk.encode("utf-8", "backslashreplace") for chunk in _chunks(page)))


def _chunks(page: Page) -> Iterator[str]:
    with_documents = page.documents is not None
    script, style = _script(with_documents), _style(with_documents)
    return _environment().get_template("page.html.j2").generate(
        page=page,
        tables=_CopiedTables(),
        index=_json(page.documents.index) if page.documents else "",
        script=Markup(script),
        style=Markup(style),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )  # fmt: skip


@cache
def _environment() -> Environment:
    environment = Environment(loader=FileSystemLoader(_ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True,
                              undefined=StrictUndefined)  # fmt: skip
    environment.filters["printable"] = printable
    environment.filters["prompt"] = lambda text: printable(text, "\n\t")
    environment.globals |= {
        "lines": lambda lines, element: Markup(html_lines(lines, element)),
        "picture": _picture,
        "formats": [(form, label, SUFFIXES[form]) for form, label in _COPIED],
    }
    return environment


def _picture(figure: PageFigure) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(figure.svg.encode("utf-8", "replace")).decode()


def _json(content: Any) -> Markup:
    """Return JSON that cannot end the element it is in, with changes of direction by their codes."""
    text = in_json(json.dumps(content, separators=(",", ":"), allow_nan=False, ensure_ascii=False))
    return Markup(text.replace("<", "\\u003c"))


def _script(with_documents: bool) -> str:
    """Return the page's one script."""
    names = ["elements.js", *(_DOCUMENT_SCRIPTS if with_documents else ()), "page.js"]
    body = "\n".join(map(_asset, names))
    library = _asset(f"{_TABULATOR}.js") if with_documents else ""
    script = f'\n{library}\n(() => {{\n"use strict";\n{body}\n}})();\n'
    if _ENDS_SCRIPT.search(script):
        raise ValueError("a script of evalkit/pages/assets has '</script' or '<!--' in it")
    return script


def _style(with_documents: bool) -> str:
    names = [f"{_TABULATOR}.css", "page.css", "documents.css"] if with_documents else ["page.css"]
    return "\n".join(map(_asset, names))


@cache
def _asset(name: str) -> str:
    return _SOURCE_MAP.sub("", (_ASSETS / name).read_text(encoding="utf-8"))
