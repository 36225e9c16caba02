"""The table of a benchmark in a page: models × tasks, with the seeds of a model above their average.

In: a `PageBenchmark`. Out: a `Report`. The numbers are those of `evalkit table --study` (`Summarised`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from evalkit.benchmarks.differences import differences
from evalkit.benchmarks.outcomes import LOWER_NOTE, Metric
from evalkit.benchmarks.run_listing import AVERAGE, Summarised, column_heading, formatted
from evalkit.comparison.sides import Side, check_uniform
from evalkit.errors import UsageError
from evalkit.reporting.report import Report
from evalkit.reporting.table import Cell, ColumnGroup, Line, Section, Table, literal
from evalkit.runs.folder import Run
from evalkit.studies.results import StudyTraining


@dataclass(frozen=True)
class PageBenchmark:
    """Finished runs of one suite, or of a benchmark of a study."""

    title: str
    """The suite, or the benchmark's name in the study."""
    sides: tuple[Side, ...]
    """Models with their seeds; the first is the baseline of comparisons."""
    names: tuple[tuple[str, ...], ...]
    """Names of each side's runs, unique in the page."""
    rule: str | None = None
    """Rule or outcome of the comparisons; None: the runs' own."""
    table_rule: str | None = None
    """Rule of the table; None: the runs' own."""
    trainings: tuple[StudyTraining, ...] = ()
    """Trainings with two finished steps or more, drawn as curves."""


class _Row(NamedTuple):
    side: Side
    label: str
    runs: tuple[Run, ...]
    """One run, or all of the side, whose average the row has."""
    metrics: Mapping[str, Metric]
    """Task, or name of an average over tasks → its number."""


def benchmark_report(benchmark: PageBenchmark) -> Report:
    """Return the table: the first metric of each task, and averages; the best are bold among rows that compare."""
    first, *others = benchmark.sides
    unlike = {side.name: words for side in others if (words := _differences(first, side, benchmark.table_rule))}
    problems = [f"{name} is measured differently than {first.name} ({words}), so their numbers do not compare"
                for name, words in unlike.items()]  # fmt: skip
    rows = list[_Row]()
    for side, names in zip(benchmark.sides, benchmark.names, strict=True):
        for name, run in zip(names, side.runs, strict=True):
            label = name.removesuffix(f" on {benchmark.title}")
            label = label.removeprefix(side.name).strip() if len(side.runs) > 1 else label
            rows.append(_Row(side, label, (run,), _metrics(benchmark, run)))
        try:
            check_uniform(side)
            rows += [_Row(side, "average", side.runs, _metrics(benchmark, *side.runs))] if len(side.runs) > 1 else []
        except UsageError as error:
            problems.append(f"{side.name} has no average: {error}")
    metrics = {name: metric for row in reversed(rows) for name, metric in row.metrics.items()}
    names_of_columns = dict.fromkeys(name for row in rows for name in row.metrics)
    ordered = sorted(names_of_columns, key=lambda name: metrics[name].name == AVERAGE)
    columns = [_column(name, rows, unlike) for name in ordered]
    has_seeds = any(len(side.runs) > 1 for side in benchmark.sides)
    lines = [
        Line(row.side.name * has_seeds, literal(row.label), len(row.side.runs) > 1, (), tuple(cells))
        for row, *cells in zip(rows, *(cells for _, cells in columns), strict=True)
    ]
    sections = []
    for name, members in groupby(lines, lambda line: line.key if line.indent else ""):
        sections.append(Section(literal(name), "heading" if name else "line", tuple(members)))
    group = ColumnGroup((), tuple(literal(heading) for heading, _ in columns))
    table = Table("summary", (), literal("run"), (), (group,), tuple(sections))
    return Report((table,), notes=(*_notes(benchmark, rows, table), *problems))


def _metrics(benchmark: PageBenchmark, *runs: Run) -> dict[str, Metric]:
    results = Summarised("", runs, benchmark.table_rule)
    return results.metrics() | results.averages()


def _differences(a: Side, b: Side, rule: str | None) -> str:
    """Describe in which settings and documents two sides do not compare; empty if they do."""
    pairs = [(mine, theirs) for mine, theirs in differences(a.runs[0], b.runs[0], rule) if mine.refused]
    return "; ".join(f"{mine.name}: {theirs.value}, not {mine.value}" for mine, theirs in pairs)


def _column(name: str, rows: Sequence[_Row], unlike: Collection[str]) -> tuple[str, list[Cell]]:
    """Return heading and cells; the best as printed are bold, of single runs and averages that compare."""
    metrics = {number: row.metrics[name] for number, row in enumerate(rows) if name in row.metrics}
    first, better = next(iter(metrics)), {metric.higher_is_better for metric in metrics.values()}
    is_average = metrics[first].name == AVERAGE
    heading = name if is_average else column_heading(rows[first].runs[0], [*metrics.values()])
    cells = [Cell(*formatted(metrics.get(number))) for number in range(len(rows))]
    rivals: dict[int, float] = {}
    for number, metric in metrics.items():
        row = rows[number]
        if row.runs == row.side.runs and row.side.name not in unlike and metric.value is not None:
            rivals[number] = metric.value
    if len(rivals) > 1 and better in ({True}, {False}):
        best = cells[(max if better == {True} else min)(rivals, key=rivals.__getitem__)].value
        for number in rivals:
            cells[number] = cells[number]._replace(bold=cells[number].value == best)
    return heading, cells


def _notes(benchmark: PageBenchmark, rows: Sequence[_Row], table: Table) -> Iterator[str]:
    metrics = [metric for row in rows for metric in row.metrics.values()]
    measured = ", ".join(dict.fromkeys(metric.name for metric in metrics if metric.name != AVERAGE))
    yield f"{measured}; shares in %" if any(metric.whole for metric in metrics) else measured
    if rules := dict.fromkeys(str(benchmark.table_rule or row.runs[0].rule) for row in rows if row.runs[0].rule):
        yield f"rule: {', '.join(rules)}"
    if any(metric.stderr is not None for metric in metrics):
        over_seeds = "; of averages over seeds their standard deviation" * any(len(row.runs) > 1 for row in rows)
        yield f"±: standard error over documents{over_seeds}"
    if any(cell.bold for line in table.lines for cell in line.cells):
        compared = " of single runs and averages" * any(len(row.runs) > 1 for row in rows)
        yield f"bold: the best{compared} of a column as printed; the comparisons say whether it is better than another"
    if any(metric.official is False for metric in metrics):
        yield "*: not the official documents of the task"
    if any(metric.higher_is_better is False for metric in metrics):
        yield LOWER_NOTE
