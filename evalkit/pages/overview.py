"""Overview of finished runs in a page. In: runs and their names. Out: `Panel`s: a summary of each suite, then each run.

Of each run: results under its rule, how its numbers move under others, subjects, and how it was made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from evalkit.benchmarks.registry import benchmark_of
from evalkit.pages.contents import places_by_suite
from evalkit.pages.panels import Panel
from evalkit.pages.provenance import provenance_panel
from evalkit.pages.suite_summary import suite_summary
from evalkit.reporting.report import Report
from evalkit.runs.folder import Run


def overview_panels(runs: Sequence[Run], names: Sequence[str]) -> tuple[Panel, ...]:
    """Return a summary of each suite that several runs have, then a panel for each run.

    Args:
        runs: finished runs.
        names: a unique name for each.

    Raises:
        EvalkitError: a run is not finished, or damaged.
    """
    panels = (_run_panel(run, name) for run, name in zip(runs, names, strict=True))
    return (*_summary_panels(runs, names), *panels)


def anchor(text: str) -> str:
    """Return a text with hyphens in place of what an anchor may not contain."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


def _summary_panels(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Panel]:
    several = [(suite, places) for (_, suite), places in places_by_suite(runs).items() if len(places) > 1]
    for number, (suite, places) in enumerate(several, 1):
        report = suite_summary([runs[place] for place in places], [names[place] for place in places])
        yield Panel(f"summary-{number}", f"{len(places)} runs of {suite}", (report,))


def _run_panel(run: Run, name: str) -> Panel:
    run.require_finished()
    report, place = benchmark_of(run).report(run), f"run-{anchor(str(run.manifest['id']))}"
    panels = (*_subject_panels(run, report, place), provenance_panel(run, f"{place}-made"))
    title = name if name.endswith(f" on {run.suite}") else f"{name}: {run.suite}"
    return Panel(place, title, (report,), panels=panels)


def _subject_panels(run: Run, report: Report, place: str) -> Iterator[Panel]:
    """Yield a panel with the tables that only the detailed report of a run has."""
    shown = [table.name for table in report.tables]
    tables = [table for table in benchmark_of(run).report(run, detail=True).tables if table.name not in shown]
    if tables:
        yield Panel(f"{place}-subjects", "Results by subject", (Report(tuple(tables)),))
