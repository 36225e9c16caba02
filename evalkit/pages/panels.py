"""Parts of a page that are readable without scripts: sentences, tables, figures, prompts."""

from __future__ import annotations

from dataclasses import dataclass

from evalkit.benchmarks.document_views import Piece
from evalkit.reporting.report import Report


@dataclass(frozen=True)
class PageFigure:
    """A figure of a page."""

    name: str
    """Unique in the page, and the name of the file that a reader saves."""
    words: str
    """What it shows, in one sentence: the caption, and the text in place of the picture."""
    svg: str
    """A complete SVG document, text as text."""


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
