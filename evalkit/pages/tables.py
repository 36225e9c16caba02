"""The table of a benchmark in a page: models × tasks, with the seeds of a model above their average.

In: a `PageBenchmark`. Out: a `Report`. The numbers are those of `evalkit table --study` (`Summarised`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from evalkit.benchmarks.differences import differences
from evalkit.benchmarks.outcomes import Metric
from evalkit.benchmarks.run_listing import Summarised, column_heading, documents_words
from evalkit.comparison.sides import Side, check_uniform
from evalkit.errors import UsageError
from evalkit.reporting.numbers import UNKNOWN
from evalkit.reporting.report import Report
from evalkit.reporting.table import Cell, ColumnGroup, Line, Section, Table, literal
from evalkit.runs.folder import Run
from evalkit.runs.notes import error_note, notes_of_runs
from evalkit.studies.results import StudyTraining


@dataclass(frozen=True)
class PageBenchmark:
    """Finished runs of one suite, or of a benchmark of a study."""

    title: str
    """The suite, or the benchmark's name in the study."""
    sides: tuple[Side, ...]
    """Models with their seeds; the first is the baseline of comparisons."""
    names: tuple[str, ...]
    """Names of the sides' runs, in their order, unique in the page."""
    rule: str | None = None
    """Rule or outcome of the comparisons; None: the runs' own."""
    trainings: tuple[StudyTraining, ...] = ()
    """Trainings with two finished steps or more, drawn as curves."""
    in_pairs: bool = False
    """Whether the n-th seeds of all sides are pairs."""

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for side in self.sides for run in side.runs)

    @property
    def table_rule(self) -> str | None:
        """Return the rule if all runs have results under it; None for their own rules."""
        return self.rule if all(self.rule in run.stored.get("rules", ()) for run in self.runs) else None


class _PageRow(NamedTuple):
    side: Side
    label: str
    runs: tuple[Run, ...]
    """One run, or all of the side, whose average the row has."""
    competes: bool
    """Whether it stands for its side, and compares with the baseline: the best of these rows is bold."""
    metrics: Mapping[str, Metric]
    """Task, or name of an average over tasks → its number."""


def benchmark_report(benchmark: PageBenchmark) -> Report:
    """Return the table: the first metric of each task, and averages; the best are bold among rows that compare."""
    rows, remarks = list[_PageRow](), list[str]()
    baseline, rule = benchmark.sides[0], benchmark.table_rule
    for side in benchmark.sides:
        several = len(side.runs) > 1
        unlike = [(a, b) for a, b in differences(baseline.runs[0], side.runs[0], rule) if a.refused]
        if unlike:
            listed = "; ".join(f"{a.name}: {b.value}, not {a.value}" for a, b in unlike)
            remarks.append(f"{side.name} is not measured as {baseline.name}, so none of its numbers is bold ({listed})")
        for run, mark in zip(side.runs, side.marks, strict=True):
            label = mark.strip() if several else side.name
            rows.append(_PageRow(side, label, (run,), not (several or unlike), _metrics(rule, run)))
        try:
            check_uniform(side)
            rows += [_PageRow(side, "average", side.runs, not unlike, _metrics(rule, *side.runs))] if several else []
        except UsageError as error:
            remarks.append(f"{side.name} has no average: {error}")
    metrics = {name: metric for row in reversed(rows) for name, metric in row.metrics.items()}
    every = dict.fromkeys(name for row in rows for name in row.metrics)
    columns = [_column(name, rows) for name in sorted(every, key=lambda name: metrics[name].n == 0)]
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
    return Report((table,), notes=(*_notes(rule, rows, table), *remarks))


def _metrics(rule: str | None, *runs: Run) -> dict[str, Metric]:
    results = Summarised("", runs, rule)
    return results.metrics() | results.averages()


def _column(name: str, rows: Sequence[_PageRow]) -> tuple[str, list[Cell]]:
    """Return heading and cells of a column; of rows that compete, and differ as printed, the best are bold."""
    metrics = {number: row.metrics[name] for number, row in enumerate(rows) if name in row.metrics}
    first, better = next(iter(metrics)), {metric.higher_is_better for metric in metrics.values()}
    runs = [run for number in metrics for run in rows[number].runs]
    heading = name if metrics[first].n == 0 else column_heading(runs, [*metrics.values()])
    cells = [Cell(UNKNOWN)] * len(rows)
    for number, metric in metrics.items():
        cells[number] = Cell(metric.format.value(metric.value), metric.format.spread(metric.stderr))
    rivals = {number: metric.value for number, metric in metrics.items()
              if rows[number].competes and metric.value is not None}  # fmt: skip
    differ = len({cells[number].value for number in rivals}) > 1
    if differ and better in ({True}, {False}):
        best = cells[(max if better == {True} else min)(rivals, key=rivals.__getitem__)].value
        cells = [cell._replace(bold=number in rivals and cell.value == best) for number, cell in enumerate(cells)]
    return heading, cells


def _notes(rule: str | None, rows: Sequence[_PageRow], table: Table) -> Iterator[str]:
    metrics = [metric for row in rows for metric in row.metrics.values()]
    tasks = [metric for metric in metrics if metric.n]
    yield documents_words((run for row in rows for run in row.runs), tasks)
    measured = ", ".join(dict.fromkeys(metric.name for metric in tasks))
    yield f"{measured}; shares in %" if any(metric.whole for metric in metrics) else measured
    if rules := dict.fromkeys(str(rule or row.runs[0].rule) for row in rows if row.runs[0].rule):
        yield f"rule: {', '.join(rules)}"
    if any(metric.stderr is not None for metric in metrics):
        yield error_note([len(row.runs) > 1 for row in rows])
    if any(cell.bold for line in table.lines for cell in line.cells):
        yield "bold: the best model of a column as printed; the comparisons say whether it is better than another"
    manifests = [(row.side.name, run.manifest) for row in rows for run in row.runs]
    yield from notes_of_runs(manifests, [metric.higher_is_better for metric in metrics])
