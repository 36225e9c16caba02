"""Overview of finished runs in a page: a summary of each suite, then each run, and the figures of each benchmark.

Of each run: results under its rule, how its numbers move under others, subjects, and how it was made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from evalkit.benchmarks.differences import differences
from evalkit.benchmarks.outcomes import LOWER_IS_BETTER, LOWER_NOTE, Metric
from evalkit.benchmarks.registry import benchmark_of
from evalkit.errors import EvalkitError
from evalkit.pages.page import PageFigure, Panel, svg_of
from evalkit.pages.provenance import provenance_panel
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import Cell, ColumnGroup, Line, Section, Table, literal
from evalkit.runs.folder import Run

_PLACES = 4
"""Decimals of values that are not shares."""


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


def places_by_suite(runs: Sequence[Run]) -> dict[tuple[str, str], list[int]]:
    """Return (kind, suite) → places of its runs, in the order of the first of each."""
    places: dict[tuple[str, str], list[int]] = {}
    for place, run in enumerate(runs):
        places.setdefault((run.kind, run.suite), []).append(place)
    return places


def _suite_summary(runs: Sequence[Run], names: Sequence[str]) -> Report:
    """Return the summary of named runs of one suite: the first metric of each task, and the averages."""
    tasks: dict[str, dict[int, Metric]] = {}
    averages: dict[str, dict[int, Metric]] = {}
    for place, run in enumerate(runs):
        for metric in benchmark_of(run).metrics(run):
            tasks.setdefault(metric.task, {}).setdefault(place, metric)
        for average in benchmark_of(run).stored_averages(run):
            mean = Metric(average["name"], "average", 0, average["accuracy"], average["stderr"])
            averages.setdefault(average["name"], {})[place] = mean
    headings = [*(_heading(runs, task, values) for task, values in tasks.items()), *averages]
    columns = [_cells(values, len(runs)) for values in (*tasks.values(), *averages.values())]
    rows = zip(*columns, strict=True) if columns else [()] * len(runs)
    lines = tuple(Line("", literal(name), False, (), tuple(row)) for name, row in zip(names, rows, strict=True))
    table = Table(
        name=f"summary-{runs[0].suite}",
        caption=(),
        corner=literal("run"),
        facts=(),
        columns=(ColumnGroup((), tuple(map(literal, headings))),),
        sections=(Section((), "line", lines),),
        notes=(),
    )
    metrics = [metric for values in (*tasks.values(), *averages.values()) for metric in values.values()]
    bold = any(cell.bold for column in columns for cell in column)
    return Report((table,), notes=tuple(_notes(runs, names, metrics, bold)))


def _heading(runs: Sequence[Run], task: str, values: Mapping[int, Metric]) -> str:
    run = runs[next(iter(values))]
    mark = "*" if any(metric.official is False for metric in values.values()) else ""
    lower = LOWER_IS_BETTER if any(metric.higher_is_better is False for metric in values.values()) else ""
    return f"{benchmark_of(run).label(run, task).short}{mark}{lower}"


def _cells(values: Mapping[int, Metric], count: int) -> list[Cell]:
    """Return a cell for each of `count` runs; the best as printed are bold, none where nothing competes."""
    cells = [_cell(values[place]) if place in values else Cell("–") for place in range(count)]
    known = {place: metric.value for place, metric in values.items() if metric.value is not None}
    better = {metric.higher_is_better for metric in values.values()}
    if len(known) < 2 or better not in ({True}, {False}):
        return cells
    best = (max if better == {True} else min)(known, key=lambda place: known[place])
    return [cell._replace(bold=place in known and cell.value == cells[best].value) for place, cell in enumerate(cells)]


def _cell(metric: Metric) -> Cell:
    if metric.value is None:
        return Cell("–")
    if whole := metric.whole:
        return Cell(percent(metric.value / whole), "" if metric.stderr is None else percent(metric.stderr / whole))
    return Cell(fixed(metric.value, _PLACES), "" if metric.stderr is None else fixed(metric.stderr, _PLACES))


def _notes(runs: Sequence[Run], names: Sequence[str], metrics: Sequence[Metric], bold: bool) -> Iterator[str]:
    measured = ", ".join(dict.fromkeys(metric.name for metric in metrics if metric.n))
    yield f"{measured}; shares in %" if any(metric.whole for metric in metrics) else measured
    if rules := list(dict.fromkeys(run.rule for run in runs if run.rule)):
        yield f"rule: {', '.join(rules)}"
    if any(metric.stderr is not None for metric in metrics):
        yield "±: standard error over documents"
    if bold:
        yield "bold: the best of a column as printed; the comparisons say whether it is better than another run"
    if any(metric.official is False for metric in metrics):
        yield "*: not the official documents of the task"
    if any(metric.higher_is_better is False for metric in metrics):
        yield LOWER_NOTE
    for run, name in zip(runs[1:], names[1:], strict=True):
        if unlike := [(mine, theirs) for mine, theirs in differences(runs[0], run) if mine.refused]:
            listed = "; ".join(f"{mine.name}: {theirs.value}, not {mine.value}" for mine, theirs in unlike)
            yield f"{name} is measured differently than {names[0]} ({listed}), so their numbers do not compare"


def _run_panel(run: Run, name: str) -> Panel:
    run.require_finished()
    report, place = benchmark_of(run).report(run), f"run-{anchor(str(run.manifest['id']))}"
    shown = [table.name for table in report.tables]
    detailed = benchmark_of(run).report(run, detail=True).tables
    subjects = tuple(table for table in detailed if table.name not in shown)
    panels = (Panel(f"{place}-subjects", "Results by subject", (Report(subjects),)),) if subjects else ()
    title = name if name.endswith(f" on {run.suite}") else f"{name}: {run.suite}"
    return Panel(place, title, (report,), panels=(*panels, provenance_panel(run, f"{place}-made")))


def figure_panels(runs: Sequence[Run], names: Sequence[str]) -> tuple[Panel, ...]:
    """Return a panel with the figures of each benchmark that has any for its runs, which have unique names.

    Figures that cannot be drawn are named with the reason, so that the others are still shown.
    """
    panels = []
    for kind in dict.fromkeys(run.kind for run in runs):
        members = [(run, name) for run, name in zip(runs, names, strict=True) if run.kind == kind]
        place, figures, problems = f"figures-{anchor(kind)}", [], []
        try:
            drawn = benchmark_of(members[0][0]).figures([run for run, _ in members], [name for _, name in members])
        except EvalkitError as error:
            drawn, problems = [], [f"the figures cannot be drawn: {error}"]
        for figure in drawn:
            try:
                figures.append(PageFigure(f"{place}-{figure.name}", figure.words, svg_of(figure.draw)))
            except EvalkitError as error:
                problems.append(f"figure {figure.name} cannot be drawn: {error}")
        if figures or problems:
            reports = (Report((), notes=tuple(problems)),) if problems else ()
            panels.append(Panel(place, f"Figures of {kind}", reports, tuple(figures)))
    return tuple(panels)


def anchor(text: str) -> str:
    """Return a text with hyphens in place of what an anchor may not contain."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")
