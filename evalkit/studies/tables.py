"""Tables of a study.

In: a study's results. Out: its own tables, models × tasks; or, for a `TableRequest`, a layout that is filled, or the
reason why the study has no run for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evalkit.benchmarks.run_listing import Summarised, summary_report
from evalkit.comparison.sides import Side, check_uniform
from evalkit.errors import UnknownNameError, UsageError
from evalkit.escape import printable
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table
from evalkit.runs.continuous import lacks_rule
from evalkit.runs.folder import Run
from evalkit.studies.results import StudyResults, steps_note
from evalkit.studies.study import Selected, Study, StudyBenchmark, StudyTable, select
from evalkit.suites.suites import filled
from evalkit.tables.layout import TableLayout, layout_names, rows_by_key, without_baseline
from evalkit.tables.request import TableRequest, check_options, made_of_runs, requested_layout
from evalkit.tables.rows import RunMapping, rows_of

_YAML = (".yaml", ".yml")
_ASSIGN = "name its row under 'tables'"


@dataclass(frozen=True)
class FilledTable:
    """A table that is filled from a study's runs."""

    name: str
    table: Table | None
    """None: the study has no run for it."""
    why: str = ""
    """Why there is no table."""
    without_row: tuple[str, ...] = ()
    """A sentence for each model of the study that is not in the table."""
    waits: bool = False
    """Whether a run that may fill it is not finished."""


def study_table(results: StudyResults, request: TableRequest, benchmark: str | None) -> FilledTable:
    """Fill a table from a study; the request's own runs and mapping are not used.

    `benchmark`: whose runs fill it; None: that of the study's `tables`, else the only one that fits.

    Raises:
        EvalkitError: the layout, the study's settings of it, the runs or the combination of options is invalid.
    """
    check_options(request)
    study, name = results.study, request.name
    given = study.tables.get(name, StudyTable())
    if name.endswith(_YAML):  # a file is the same by any path
        path = Path(name) if Path(name).is_file() else study.path.parent / name
        files = {(study.path.parent / key).resolve(): table for key, table in study.tables.items()}
        name, given = str(path), files.get(path.resolve(), StudyTable())
    layout = requested_layout(replace(request, name=name))
    where = f"study {study.path}, table '{layout.name}'"
    layout = layout.retitled(given.caption, given.titles, where)
    chosen = _fitting(results, layout, benchmark or given.benchmark, where)
    if isinstance(chosen, str):
        return FilledTable(layout.name, None, chosen)
    models, without_row = _assigned(results, layout, given, chosen, where)
    rows: dict[str, Sequence[Run]] = {
        row: runs for row, model in models.items() if (runs := results.runs(model.checkpoints, chosen))
    }
    # Only rows that can be compared with their baseline
    alone = without_baseline(layout, rows)
    checkpoints = [checkpoint for model in models.values() for checkpoint in model.checkpoints]
    missing = [checkpoint.label for checkpoint in results.missing(checkpoints, chosen)]
    remarks = [*steps_note(list(models.values())), *([f"Not finished: {', '.join(missing)}."] if missing else [])]
    remarks += results.changes(checkpoints, chosen)
    remarks += [
        f"No finished run of {' or '.join(layout.pairs[size].baseline)}, the baseline of "
        f"{', '.join(key for key, other in alone.items() if other == size)}."
        for size in dict.fromkeys(alone.values())
    ]
    rows = {key: runs for key, runs in rows.items() if key not in alone}
    if not rows.keys() & rows_by_key(layout).keys():
        why = "; ".join([*(text.rstrip(".") for text in remarks), *without_row])
        planned = [checkpoint for name in study.names_on(chosen) for checkpoint in select(study, name).checkpoints]
        waits = bool(results.missing(planned, chosen))
        return FilledTable(layout.name, None, f"no row has a finished run on {chosen.name} ({why})", waits=waits)
    default = chosen.rule if lacks_rule(request.other_outcome) else None
    request = replace(request, drop_empty=request.drop_empty or given.drop_empty, rule=request.rule or default)
    table = made_of_runs(layout, RunMapping(None, rows), request, tuple(remarks))
    return FilledTable(layout.name, table, without_row=without_row)


def own_tables(results: StudyResults, benchmark: str | None, rule: str | None, errors: bool) -> Report:
    """Return a table of each benchmark of a study, or of one: a line for each model at its last step, with its seeds.

    `rule` is for the benchmarks that have rules. `errors`: with ±, see `summary_report`.
    """
    study, parts, has_rule = results.study, [], False
    for each in [study.benchmark(benchmark)] if benchmark else study.benchmarks:
        models = [select(study, name) for name in study.names_on(each)]
        entries = []
        for model in models:
            runs = results.runs(model.checkpoints, each)
            if runs:
                check_uniform(Side(model.name, runs))
            applies = any(run.rule for run in runs)
            has_rule |= applies
            state = "finished" if len(runs) == len(model.checkpoints) else "not finished"
            entries.append(Summarised(model.name, runs, (rule if applies else None) or each.rule, state))
        checkpoints = [checkpoint for model in models for checkpoint in model.checkpoints]
        notes = *steps_note(models), *results.unfinished(checkpoints, each), *results.changes(checkpoints, each)
        parts.append(summary_report(entries, each.name, errors).with_notes(notes))
    if rule and not has_rule:
        raise UsageError(f"--rule {rule}: no finished run of study {study.path} has rules; leave it out")
    return Report((), content=[part.content for part in parts], parts=tuple(parts)) if len(parts) > 1 else parts[0]


def study_layouts(study: Study) -> list[str]:
    """Return all layouts: evalkit's own by name, and the files under the study's `tables`."""
    return [*layout_names(), *(str(study.path.parent / name) for name in study.tables if name.endswith(_YAML))]


def _fitting(results: StudyResults, layout: TableLayout, given: str | None, where: str) -> StudyBenchmark | str:
    """Return the benchmark whose runs fill a layout, or why none does."""
    if layout.suite is None:
        return "it has no suite, so no run fills it"
    named = [results.study.benchmark(given)] if given else list(results.study.benchmarks)
    fitting = [benchmark for benchmark in named if _suite(benchmark) == layout.suite]
    fitting = fitting or [benchmark for benchmark in named if _fills(results, benchmark) == layout.suite]
    if len(fitting) > 1:
        names = [benchmark.name for benchmark in fitting]
        both, either = " and ".join(names), " | ".join(names)
        raise UsageError(f"{where}: benchmarks {both} both fill it; give --benchmark {either}")
    if not fitting:
        which = f"benchmark {given} is" if given else "no benchmark of the study is"
        return f"it shows suite {layout.suite}, and {which} of that suite"
    return fitting[0]


def _suite(benchmark: StudyBenchmark) -> str:
    return Path(benchmark.suite).stem if benchmark.suite.endswith(_YAML) else benchmark.suite


def _fills(results: StudyResults, benchmark: StudyBenchmark) -> str | None:
    """Return the other suite whose tables a benchmark fills, from any of its runs; None if none is finished."""
    runs = (results.run(checkpoint, benchmark) for checkpoint in results.study.checkpoints)
    return next((filled(run.suite)[0] for run in runs if run is not None), None)


def _assigned(
    results: StudyResults, layout: TableLayout, given: StudyTable, benchmark: StudyBenchmark, where: str
) -> tuple[dict[str, Selected], tuple[str, ...]]:
    """Return row → model, in the layout's order, and a sentence for each reason why models have no row.

    Rows are assigned by the study's settings, then by names, then by the shapes of models.
    """
    study, keys = results.study, list(layout.assigned)
    if unknown := next((row for row in given.rows if row not in keys), None):
        raise UsageError(f"{where}: {UnknownNameError('row', unknown, keys)}")
    chosen = {row: select(study, name) for row, name in given.rows.items()}
    used = {model.checkpoints[0].name for model in chosen.values()}
    names = study.names_on(benchmark)
    for name in names:
        if name in keys and name not in used and name not in chosen:
            chosen[name] = select(study, name)
            used.add(name)
    reasons: dict[str, list[str]] = {}
    by_shape: dict[str, str] = {}
    for name in names:
        if name in used:
            continue
        row, why = _row_by_shape(results, layout, benchmark, name, chosen, where)
        if row is None:
            reasons.setdefault(why, []).append(name)
        elif (other := by_shape.setdefault(row, name)) != name:
            raise UsageError(f"{where}: {other} and {name} have the model of row '{row}'; {_ASSIGN}")
    chosen |= {row: select(study, name) for row, name in by_shape.items()}
    sentences = tuple(printable(f"{', '.join(names)}: {why}") for why, names in reasons.items())
    return {key: chosen[key] for key in keys if key in chosen}, sentences


def _row_by_shape(
    results: StudyResults,
    layout: TableLayout,
    benchmark: StudyBenchmark,
    name: str,
    chosen: Mapping[str, Selected],
    where: str,
) -> tuple[str | None, str]:
    """Return the row of a model by its shape, or None and why it has none."""
    try:
        runs = results.runs(select(results.study, name).checkpoints, benchmark)
    except UsageError as error:
        return None, str(error)
    if not runs:
        return None, "no run is finished, so the row of this model is unknown"
    if not (runs[0].manifest.get("loaded") or {}).get("shape"):
        return None, f"the run does not store the model's shape; {_ASSIGN}"
    rows = rows_of(layout, runs[0])
    if len(rows) > 1:
        raise UsageError(f"{where}: {name} has the model of rows {' and '.join(rows)}; {_ASSIGN}")
    if not rows:
        return None, "no row has this model"
    if rows[0] in chosen:
        return None, f"row '{rows[0]}' of this model is that of {chosen[rows[0]].name}"
    return rows[0], ""
