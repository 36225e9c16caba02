"""Tables of a study.

In: a study's results, and a `TableRequest`. Out: a filled table, or the reason why the study has no run for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evalkit.benchmarks.registry import benchmark_of
from evalkit.errors import UnknownNameError, UsageError
from evalkit.escape import printable
from evalkit.reporting.table import Table
from evalkit.runs.folder import Run
from evalkit.runs.outcomes import ACCURACY, MARGIN
from evalkit.studies.results import StudyResults, steps_note
from evalkit.studies.study import Selected, Study, StudyBenchmark, StudyTable, select
from evalkit.tables.layout import TableLayout, layout_names, rows_by_key, without_baseline
from evalkit.tables.measured import RunMapping
from evalkit.tables.request import TableRequest, check_options, made_of_runs, requested_layout, retitled
from evalkit.tables.row_models import rows_of


@dataclass(frozen=True)
class StudyRows:
    """Models and runs of a table's rows."""

    runs: Mapping[str, Sequence[Run]]
    """Row → its finished runs, in the layout's order; only rows with runs."""
    remarks: tuple[str, ...]
    """Notes for readers of the table: steps, runs that are not finished, checkpoints that have changed."""
    without_row: tuple[str, ...]
    """Models that have no row, with the reason."""


def assign(results: StudyResults, layout: TableLayout, given: StudyTable, benchmark: StudyBenchmark) -> StudyRows:
    """Assign a study's models to the rows of a layout.

    Raises:
        UnknownNameError: `rows` names a row that the layout does not have, or a step that a model does not have.
        UsageError: two models have the shape of one row, or one model that of several.
        RunError: a run is damaged.
    """
    where = f"study {results.study.path}, table '{layout.name}'"
    keys = [item.key for item in layout.assigned]
    if unknown := next((row for row in given.rows if row not in keys), None):
        raise UsageError(f"{where}: {UnknownNameError('row', unknown, keys)}")
    chosen = {row: select(results.study, name) for row, name in given.rows.items()}
    used = {one.checkpoints[0].name for one in chosen.values()}
    for name in results.study.names:
        if name in keys and name not in used and name not in chosen:
            chosen[name] = select(results.study, name)
            used.add(name)
    without_row = _by_shape(results, layout, benchmark, chosen, used, where)
    ordered = {key: chosen[key] for key in keys if key in chosen}
    runs = {row: results.runs(one.checkpoints, benchmark) for row, one in ordered.items()}
    return StudyRows(
        {row: found for row, found in runs.items() if found},
        _remarks(results, list(ordered.values()), benchmark),
        tuple(printable(f"{', '.join(names)}: {why}") for why, names in without_row.items()),
    )


def with_baselines(layout: TableLayout, rows: StudyRows) -> StudyRows:
    """Return the rows that can be compared with their baseline, and a note that names the others."""
    alone = without_baseline(layout, rows.runs)
    sizes = {size.name: size for size in alone.values()}
    notes = [
        f"No finished run of {' or '.join(size.baseline)}, the baseline of "
        f"{', '.join(key for key, other in alone.items() if other is size)}."
        for size in sizes.values()
    ]
    runs = {key: found for key, found in rows.runs.items() if key not in alone}
    return replace(rows, runs=runs, remarks=(*rows.remarks, *notes))


def _by_shape(
    results: StudyResults,
    layout: TableLayout,
    benchmark: StudyBenchmark,
    chosen: dict[str, Selected],
    used: set[str],
    where: str,
) -> dict[str, list[str]]:
    """Add the models that are not `used` to `chosen` by their shapes; return reason → models without a row."""
    left: dict[str, list[str]] = {}
    found: dict[str, list[Selected]] = {}
    for name in results.study.names:
        if name in used:
            continue
        try:
            one = select(results.study, name)
        except UsageError as error:
            left.setdefault(str(error), []).append(name)
            continue
        if not (runs := results.runs(one.checkpoints, benchmark)):
            left.setdefault("no run is finished, so the row of this model is unknown", []).append(name)
        elif not (runs[0].manifest.get("loaded") or {}).get("shape"):
            left.setdefault("the run does not store the model's shape; name its row under 'tables'", []).append(name)
        elif len(rows := rows_of(layout, runs[0])) > 1:
            raise UsageError(
                f"{where}: {name} has the model of rows {' and '.join(rows)}; write {_written(layout, {rows[0]: name})}"
            )
        elif not rows:
            left.setdefault("no row has this model", []).append(name)
        elif rows[0] in chosen:
            left.setdefault(f"row '{rows[0]}' of this model is that of {chosen[rows[0]].name}", []).append(name)
        else:
            found.setdefault(rows[0], []).append(one)
    if several := {row: [one.name for one in members] for row, members in found.items() if len(members) > 1}:
        listed = ", ".join(f"'{row}' ({', '.join(names)})" for row, names in several.items())
        first = {row: names[0] for row, names in several.items()}
        raise UsageError(
            f"{where}: several checkpoints have the model of one row: {listed}; write which one you mean, as in "
            f"{_written(layout, first)}"
        )
    chosen |= {row: one for row, [one] in found.items()}
    return left


def _written(layout: TableLayout, rows: Mapping[str, str]) -> str:
    """Return what a study file says to assign rows."""
    table = layout.name if layout.name in layout_names() else layout.path.name
    listed = ", ".join(f"{row}: {name}" for row, name in rows.items())
    return f"'tables: {{{table}: {{rows: {{{listed}}}}}}}'"


def _remarks(results: StudyResults, shown: Sequence[Selected], benchmark: StudyBenchmark) -> tuple[str, ...]:
    checkpoints = [checkpoint for one in shown for checkpoint in one.checkpoints]
    missing = [run.checkpoint.label for run in results.missing(checkpoints, benchmark)]
    unfinished = [f"Not finished: {', '.join(missing)}."] if missing else []
    return (*steps_note(shown), *unfinished, *results.changes(checkpoints, benchmark))


_YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class FilledTable:
    """A table that a study has runs for."""

    table: Table
    without_row: tuple[str, ...]
    """A sentence for each model of the study that is not in the table."""


@dataclass(frozen=True)
class UnfilledTable:
    """A table that a study has no run for."""

    name: str
    why: str


def study_table(results: StudyResults, request: TableRequest, benchmark: str | None) -> FilledTable | UnfilledTable:
    """Fill a table from a study.

    Args:
        results: of the study.
        request: the table and its options; its runs and mapping are not used.
        benchmark: name of the benchmark whose runs fill it; None: that of the study's `tables`, else the only one that
            fits.

    Raises:
        EvalkitError: the layout, the study's settings of it, the runs or the combination of options is invalid.
    """
    check_options(request)
    study = results.study
    located = _located(study, request.name)
    given, layout = _settings(study, located), requested_layout(replace(request, name=located))
    where = f"study {study.path}, table '{layout.name}'"
    layout = retitled(layout, given.caption, given.titles, where)
    chosen = _fitting(results, layout, benchmark or given.benchmark, where)
    if isinstance(chosen, str):
        return UnfilledTable(layout.name, chosen)
    rows = with_baselines(layout, assign(results, layout, given, chosen))
    if not rows.runs.keys() & rows_by_key(layout).keys():
        why = "; ".join([*(text.rstrip(".") for text in rows.remarks), *rows.without_row])
        return UnfilledTable(layout.name, f"no row has a finished run on {chosen.name} ({why})")
    default = chosen.rule if request.outcome in (None, ACCURACY, MARGIN) else None
    request = replace(request, drop_empty=request.drop_empty or given.drop_empty, rule=request.rule or default)
    made = made_of_runs(layout, RunMapping(None, rows.runs), request, rows.remarks)
    return FilledTable(made, rows.without_row)


def study_layouts(study: Study) -> list[str]:
    """Return all layouts: evalkit's own by name, and the files under the study's `tables`."""
    return [*layout_names(), *(str(study.path.parent / name) for name in study.tables if name.endswith(_YAML))]


def _located(study: Study, name: str) -> str:
    """Return a layout's name, or the path of its file, which may be relative to the study file."""
    beside = study.path.parent / name
    return str(beside) if name.endswith(_YAML) and beside.is_file() and not Path(name).is_file() else name


def _settings(study: Study, layout: str) -> StudyTable:
    """Return the study's settings of a located layout; a file is the same by any path."""
    if not layout.endswith(_YAML):
        return study.tables.get(layout, StudyTable())
    files = {(study.path.parent / key).resolve(): table for key, table in study.tables.items()}
    return files.get(Path(layout).resolve(), StudyTable())


def _fitting(results: StudyResults, layout: TableLayout, given: str | None, where: str) -> StudyBenchmark | str:
    """Return the benchmark whose runs fill a layout, or why none does."""
    if layout.suite is None:
        return "it has no suite, so no run fills it"
    named = [results.study.benchmark(given)] if given else list(results.study.benchmarks)
    fitting = [one for one in named if _suite(one) == layout.suite]
    fitting = fitting or [one for one in named if _fills(results, one) == layout.suite]
    if len(fitting) > 1:
        names = [one.name for one in fitting]
        raise UsageError(
            f"{where}: benchmarks {' and '.join(names)} both fill it; give --benchmark {' | '.join(names)}, or write "
            f"'tables: {{{layout.name}: {{benchmark: {names[0]}}}}}'"
        )
    if not fitting:
        which = f"benchmark {given} is" if given else "no benchmark of the study is"
        return f"it shows suite {layout.suite}, and {which} of that suite"
    return fitting[0]


def _suite(benchmark: StudyBenchmark) -> str:
    """Return the name of a benchmark's suite; that of a file is the file's."""
    return Path(benchmark.suite).stem if benchmark.suite.endswith(_YAML) else benchmark.suite


def _fills(results: StudyResults, benchmark: StudyBenchmark) -> str | None:
    """Return the other suite whose tables a benchmark fills, from any of its runs; None if none is finished."""
    found = (results.run(one, benchmark) for one in results.study.checkpoints)
    run: Run | None = next((one for one in found if one is not None), None)
    return None if run is None else benchmark_of(run).fills(run)[0]
