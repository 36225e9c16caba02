"""Overview of finished runs in a page: a summary of each suite, then each run, and the figures of each benchmark.

Of each run: results under its rule, how its numbers move under others, subjects, and how it was made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from evalkit.benchmarks.outcomes import LOWER_IS_BETTER, LOWER_NOTE, Metric
from evalkit.benchmarks.registry import benchmark_of, differences
from evalkit.errors import EvalkitError
from evalkit.pages.page import PageFigure, Panel, svg_of
from evalkit.pages.provenance import provenance_panel
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import Cell, ColumnGroup, Line, Section, Table, literal
from evalkit.runs.folder import Run

_NONE = Cell("–")
_PLACES = 4
"""Decimals of values that are not shares."""


class _SummaryColumn(NamedTuple):
    """A task's first metric, or an average, of each run that has it."""

    label: str
    values: Mapping[int, Metric]
    """Place of the run → its value."""

    def cells(self, count: int) -> list[Cell]:
        """Return a cell for each of `count` runs; the best as printed are bold, none where nothing competes."""
        cells = [_cell(self.values[place]) if place in self.values else _NONE for place in range(count)]
        known = {place: metric.value for place, metric in self.values.items() if metric.value is not None}
        better = {metric.higher_is_better for metric in self.values.values()}
        if len(known) < 2 or better not in ({True}, {False}):
            return cells
        best = (max if better == {True} else min)(known, key=lambda place: known[place])
        return [
            cell._replace(bold=place in known and cell.value == cells[best].value) for place, cell in enumerate(cells)
        ]


def _suite_summary(runs: Sequence[Run], names: Sequence[str]) -> Report:
    """Return the summary of named runs of one suite: the first metric of each task, and the averages."""
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
    run = runs[next(iter(values))]
    mark = "*" if any(metric.official is False for metric in values.values()) else ""
    lower = LOWER_IS_BETTER if any(metric.higher_is_better is False for metric in values.values()) else ""
    return f"{benchmark_of(run).label(run, task).short}{mark}{lower}"


def _average_columns(runs: Sequence[Run]) -> list[_SummaryColumn]:
    by_name: dict[str, dict[int, Metric]] = {}
    for place, run in enumerate(runs):
        for average in benchmark_of(run).stored_averages(run):
            mean = Metric(average["name"], "average", 0, average["accuracy"], average["stderr"])
            by_name.setdefault(average["name"], {})[place] = mean
    return [_SummaryColumn(name, values) for name, values in by_name.items()]


def _cell(metric: Metric) -> Cell:
    if metric.value is None:
        return _NONE
    if whole := metric.whole:
        return Cell(percent(metric.value / whole), "" if metric.stderr is None else percent(metric.stderr / whole))
    return Cell(fixed(metric.value, _PLACES), "" if metric.stderr is None else fixed(metric.stderr, _PLACES))


def _notes(runs: Sequence[Run], names: Sequence[str], columns: Sequence[_SummaryColumn]) -> Iterator[str]:
    metrics = [metric for column in columns for metric in column.values.values()]
    measured = ", ".join(dict.fromkeys(metric.name for metric in metrics if metric.n))
    yield f"{measured}; shares in %" if any(metric.whole for metric in metrics) else measured
    if rules := list(dict.fromkeys(run.rule for run in runs if run.rule)):
        yield f"rule: {', '.join(rules)}"
    if any(metric.stderr is not None for metric in metrics):
        yield "±: standard error over documents"
    if any(cell.bold for column in columns for cell in column.cells(len(runs))):
        yield "bold: the best of a column as printed; the comparisons say whether it is better than another run"
    if any(metric.official is False for metric in metrics):
        yield "*: not the official documents of the task"
    if any(metric.higher_is_better is False for metric in metrics):
        yield LOWER_NOTE
    for run, name in zip(runs[1:], names[1:], strict=True):
        if unlike := [(mine, theirs) for mine, theirs in differences(runs[0], run) if mine.refused]:
            listed = "; ".join(f"{mine.name}: {theirs.value}, not {mine.value}" for mine, theirs in unlike)
            yield f"{name} is measured differently than {names[0]} ({listed}), so their numbers do not compare"


def places_by_suite(runs: Sequence[Run]) -> dict[tuple[str, str], list[int]]:
    """Return (kind, suite) → places of its runs, in the order of the first of each."""
    places: dict[tuple[str, str], list[int]] = {}
    for place, run in enumerate(runs):
        places.setdefault((run.kind, run.suite), []).append(place)
    return places


def figure_panels(runs: Sequence[Run], names: Sequence[str]) -> tuple[Panel, ...]:
    """Return a panel with the figures of each benchmark that has any for its runs, which have unique names.

    Figures that cannot be drawn are named with the reason, so that the others are still shown.
    """
    panels: list[Panel] = []
    problems: list[str]
    for kind in dict.fromkeys(run.kind for run in runs):
        members = [(run, name) for run, name in zip(runs, names, strict=True) if run.kind == kind]
        place, problems = f"figures-{anchor(kind)}", []
        figures = tuple(_drawn(place, [run for run, _ in members], [name for _, name in members], problems))
        reports = (Report((), notes=tuple(problems)),) if problems else ()
        if figures or reports:
            panels.append(Panel(place, f"Figures of {kind}", reports, figures))
    return tuple(panels)


def _drawn(name: str, runs: Sequence[Run], names: Sequence[str], problems: list[str]) -> Iterator[PageFigure]:
    """Yield the figures of runs of one benchmark; append to `problems` why others are left out."""
    try:
        figures = benchmark_of(runs[0]).figures(runs, names)
    except EvalkitError as error:
        problems.append(f"the figures cannot be drawn: {error}")
        return
    for figure in figures:
        try:
            yield PageFigure(f"{name}-{figure.name}", figure.words, svg_of(figure.draw))
        except EvalkitError as error:
            problems.append(f"figure {figure.name} cannot be drawn: {error}")


def overview_panels(runs: Sequence[Run], names: Sequence[str]) -> tuple[Panel, ...]:
    """Return a summary of each suite that several runs have, then a panel for each run, which have unique names.

    Raises:
        EvalkitError: a run is not finished, or damaged.
    """
    several = [(suite, places) for (_, suite), places in places_by_suite(runs).items() if len(places) > 1]
    summaries = []
    for number, (suite, places) in enumerate(several, 1):
        report = _suite_summary([runs[place] for place in places], [names[place] for place in places])
        summaries.append(Panel(f"summary-{number}", f"{len(places)} runs of {suite}", (report,)))
    return (*summaries, *map(_run_panel, runs, names))


def anchor(text: str) -> str:
    """Return a text with hyphens in place of what an anchor may not contain."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


def _run_panel(run: Run, name: str) -> Panel:
    run.require_finished()
    report, place = benchmark_of(run).report(run), f"run-{anchor(str(run.manifest['id']))}"
    shown = [table.name for table in report.tables]
    detailed = benchmark_of(run).report(run, detail=True).tables
    subjects = tuple(table for table in detailed if table.name not in shown)
    panels = (Panel(f"{place}-subjects", "Results by subject", (Report(subjects),)),) if subjects else ()
    title = name if name.endswith(f" on {run.suite}") else f"{name}: {run.suite}"
    return Panel(place, title, (report,), panels=(*panels, provenance_panel(run, f"{place}-made")))
