"""Summary of several runs of one suite. In: finished runs and their names. Out: a `Report` with a line for each run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from evalkit.benchmarks.alike import differences
from evalkit.benchmarks.outcomes import Metric
from evalkit.benchmarks.registry import benchmark_of
from evalkit.benchmarks.results_report import LOWER_IS_BETTER, LOWER_NOTE
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
    """Return the summary of runs of one suite: the first metric of each task, and the averages.

    Args:
        runs: finished runs of one benchmark and suite.
        names: a name for each run.
    """
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
