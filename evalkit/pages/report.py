"""`evalkit report`: finished runs → one HTML file.

In: `PageContents` and a `PageRequest`. Out: the file. Static parts are `Panel`s (`overview.py`, `comparisons.py`,
`benchmark_figures.py`, `sources.py`), documents are blocks (`documents.py`); `page.py` turns both into HTML.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from evalkit import __version__
from evalkit.benchmarks.remembered import remembering
from evalkit.comparison.curves import curve
from evalkit.data.sampling import DocumentSample
from evalkit.display import doing
from evalkit.errors import EvalkitError, RunError, UsageError
from evalkit.pages.comparisons import comparison_panels, curve_panel
from evalkit.pages.contents import PageComparison, PageContents
from evalkit.pages.documents import document_data
from evalkit.pages.overview import figure_panels, overview_panels
from evalkit.pages.page import Page, Panel, write_page
from evalkit.pages.provenance import sources_panel
from evalkit.reporting.report import Report

_NAMED = 3
"""Most runs that the default title names."""


@dataclass(frozen=True)
class PageRequest:
    """What a page of runs contains besides results."""

    title: str | None = None
    """None: the names of the runs."""
    documents: bool = True
    sample: DocumentSample | None = None
    """Which documents of each task; None: all."""


def write_report(contents: PageContents, request: PageRequest, path: Path, say: Callable[[str], None]) -> int:
    """Write the page of finished runs, and return its size in bytes.

    Args:
        contents: the runs, their names, and what is compared.
        request: title and documents.
        path: the file.
        say: called with messages for the user.

    Raises:
        EvalkitError: a run is damaged, or the file cannot be written.
    """
    _prepare(path)
    runs, names = contents.runs, contents.names
    with remembering():
        with doing("results"):
            overview = overview_panels(runs, names)
            results = figure_panels(runs, names)
            sources = (sources_panel(runs),)
        with doing("comparisons"):
            several = len(contents.comparisons) > 1
            compared = tuple(
                panel for number, one in enumerate(contents.comparisons, 1) for panel in _compared(one, number, several)
            )
        documents = None
        if request.documents:
            with doing("documents"):
                documents = document_data(runs, names, say, request.sample)
    title = request.title or ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if names[_NAMED:] else "")
    with doing("writing the page"):
        page = Page(title, _made(contents), overview, compared, results, sources, documents)
        try:
            write_page(page, path)
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
    return path.stat().st_size


def _prepare(path: Path) -> None:
    """Make the page's folder; raise a `UsageError` before the runs are read if the page cannot be there."""
    try:
        if path.is_dir():
            raise UsageError(f"{path} cannot be written: it is a folder; name a file in it, as {path / 'report.html'}")
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}; name another file") from error


def _compared(one: PageComparison, number: int, several: bool) -> list[Panel]:
    """Return the panels of a comparison and of its curves; titles of several name the suite."""
    suite = one.title if several else ""
    found: list[Panel] = []
    if len(one.sides) > 1:
        found += comparison_panels(one.sides, one.rule, suite, f"comparison-{number}")
    if one.trainings:
        name = f"curves-{number}"
        try:
            curves = [curve(each.side, one.rule, each.steps) for each in one.trainings]
            found.append(curve_panel(curves, suite, name))
        except EvalkitError as error:
            found.append(Panel(name, "Training curves", (Report((), facts=(f"There are no curves: {error}",)),)))
    return found


def _made(contents: PageContents) -> str:
    """Return by what and when the page was made, and what it lacks."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return " ".join([f"Made by evalkit {__version__} on {now}.", *contents.notes])
