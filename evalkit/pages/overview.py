"""Overview of finished runs in a page. In: runs and their names. Out: `Panel`s: a summary of each suite, then each run.

Of each run: results under its rule, how its numbers move under others, subjects, and how it was made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from evalkit.benchmarks.alike import differences
from evalkit.benchmarks.outcomes import LOWER_IS_BETTER, LOWER_NOTE, Metric
from evalkit.benchmarks.registry import benchmark_of
from evalkit.errors import EvalkitError
from evalkit.pages.contents import places_by_suite
from evalkit.pages.page import PageFigure, Panel, svg_of
from evalkit.pages.provenance import provenance_panel
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.markup import literal
from evalkit.reporting.report import Report
from evalkit.reporting.table import Cell, ColumnGroup, Line, Section, Table
from evalkit.runs.folder import Run

_NONE = Cell("–")
_PLACES = 4
"""Decimals of values that are not shares."""


@dataclass(frozen=True)
class _SummaryColumn:
    """A task's first metric, or an average, of each run."""

    label: str
    values: Mapping[int, Metric]
    """Place of the run → its value."""

    def cells(self, count: int) -> list[Cell]:
        """Return a cell for each of `count` runs, with the best ones as printed in bold."""
        best = self._best()
        return [_cell(self.values[place], place in best) if place in self.values else _NONE for place in range(count)]

    def _best(self) -> set[int]:
        """Return the places of the best values; of equally printed ones all, and none where nothing competes."""
        known = {place: one.value for place, one in self.values.items() if one.value is not None}
        better = {one.higher_is_better for one in self.values.values()}
        if len(known) < 2 or better not in ({True}, {False}):
            return set()
        best = (max if better == {True} else min)(known, key=lambda place: known[place])
        shown = _cell(self.values[best]).value
        return {place for place in known if _cell(self.values[place]).value == shown}


def suite_summary(runs: Sequence[Run], names: Sequence[str]) -> Report:
    """Return the summary of runs of one suite: the first metric of each task, and the averages."""
    columns = [*_task_columns(runs), *_average_columns(runs)]
    cells = [column.cells(len(runs)) for column in columns]
    lines = tuple(
        Line("", literal(name), False, (), tuple(column[place] for column in cells)) for place, name in enumerate(names)
    )
    table = Table(
        name=f"summary-{runs[0].suite}",
        caption=(),
        corner=literal("run"),
        facts=(),
        columns=(ColumnGroup((), tuple(literal(column.label) for column in columns)),),
        sections=(Section((), "line", lines),),
        notes=(),
    )
    return Report((table,), notes=tuple(_notes(runs, names, columns)))


def _task_columns(runs: Sequence[Run]) -> list[_SummaryColumn]:
    by_task: dict[str, dict[int, Metric]] = {}
    for place, run in enumerate(runs):
        for metric in benchmark_of(run).metrics(run):
            by_task.setdefault(metric.task, {}).setdefault(place, metric)
    return [_SummaryColumn(_heading(runs, task, values), values) for task, values in by_task.items()]


def _heading(runs: Sequence[Run], task: str, values: Mapping[int, Metric]) -> str:
    """Return a task's label, with marks for unofficial documents and for a metric of which lower is better."""
    run = runs[next(iter(values))]
    mark = "*" if any(one.official is False for one in values.values()) else ""
    lower = LOWER_IS_BETTER if any(one.higher_is_better is False for one in values.values()) else ""
    return f"{benchmark_of(run).label(run, task).short}{mark}{lower}"


def _average_columns(runs: Sequence[Run]) -> list[_SummaryColumn]:
    by_name: dict[str, dict[int, Metric]] = {}
    for place, run in enumerate(runs):
        for one in benchmark_of(run).stored_averages(run):
            mean = Metric(one["name"], "average", 0, one["accuracy"], one["stderr"])
            by_name.setdefault(one["name"], {})[place] = mean
    return [_SummaryColumn(name, values) for name, values in by_name.items()]


def _cell(metric: Metric, bold: bool = False) -> Cell:
    if metric.value is None:
        return _NONE
    if whole := metric.whole:
        error = "" if metric.stderr is None else percent(metric.stderr / whole)
        return Cell(percent(metric.value / whole), error, bold=bold)
    return Cell(fixed(metric.value, _PLACES), "" if metric.stderr is None else fixed(metric.stderr, _PLACES), bold=bold)


def _notes(runs: Sequence[Run], names: Sequence[str], columns: Sequence[_SummaryColumn]) -> Iterator[str]:
    metrics = [one for column in columns for one in column.values.values()]
    measured = ", ".join(dict.fromkeys(one.name for one in metrics if one.n))
    yield f"{measured}; shares in %" if any(one.whole for one in metrics) else measured
    if rules := list(dict.fromkeys(run.rule for run in runs if run.rule)):
        yield f"rule: {', '.join(rules)}"
    if any(one.stderr is not None for one in metrics):
        yield "±: standard error over documents"
    if any(cell.bold for column in columns for cell in column.cells(len(runs))):
        yield "bold: the best of a column as printed; the comparisons say whether it is better than another run"
    if any(one.official is False for one in metrics):
        yield "*: not the official documents of the task"
    if any(one.higher_is_better is False for one in metrics):
        yield LOWER_NOTE
    for run, name in zip(runs[1:], names[1:], strict=True):
        if found := [(mine, theirs) for mine, theirs in differences(runs[0], run) if mine.refused]:
            listed = "; ".join(f"{mine.name}: {theirs.value}, not {mine.value}" for mine, theirs in found)
            yield f"{name} is measured differently than {names[0]} ({listed}), so their numbers do not compare"


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
