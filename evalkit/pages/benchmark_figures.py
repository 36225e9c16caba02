"""Figures of the benchmarks in a page. In: finished runs and names. Out: a `Panel` for each benchmark with figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evalkit.benchmarks.registry import benchmark_of
from evalkit.errors import EvalkitError
from evalkit.pages.figures import svg_of
from evalkit.pages.overview import anchor
from evalkit.pages.panels import PageFigure, Panel
from evalkit.reporting.report import Report
from evalkit.runs.folder import Run


def figure_panels(runs: Sequence[Run], names: Sequence[str]) -> tuple[Panel, ...]:
    """Return a panel with the figures of each benchmark that has any for its runs.

    Figures that cannot be drawn are named with the reason, so that the others are still shown.

    Args:
        runs: finished runs.
        names: a unique name for each.
    """
    by_kind: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        by_kind.setdefault(run.kind, []).append(place)
    found = (
        _panel(kind, [runs[place] for place in places], [names[place] for place in places])
        for kind, places in by_kind.items()
    )
    return tuple(panel for panel in found if panel.figures or panel.reports)


def _panel(kind: str, runs: Sequence[Run], names: Sequence[str]) -> Panel:
    name = f"figures-{anchor(kind)}"
    problems: list[str] = []
    figures = tuple(_drawn(name, runs, names, problems))
    reports = (Report((), notes=tuple(problems)),) if problems else ()
    return Panel(name, f"Figures of {kind}", reports, figures)


def _drawn(name: str, runs: Sequence[Run], names: Sequence[str], problems: list[str]) -> Iterator[PageFigure]:
    """Yield the figures of runs of one benchmark; append to `problems` why others are left out."""
    try:
        figures = benchmark_of(runs[0]).figures(runs, names)
    except EvalkitError as error:
        problems.append(f"the figures cannot be drawn: {error}")
        return
    for one in figures:
        try:
            yield PageFigure(f"{name}-{one.name}", one.words, svg_of(one.draw))
        except EvalkitError as error:
            problems.append(f"figure {one.name} cannot be drawn: {error}")
