"""Rows of a layout → models of a study.

In: a layout, a study's settings of it, and its finished runs on one benchmark. Out: the runs of each row. A model has
the row that the study's `rows` gives it, else the row with its name as key, else the row of its model's shape
(`tables/row_models.py`). Several models of one shape are an error, since no name says which is meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from evalkit.errors import UnknownNameError, UsageError
from evalkit.reporting.escape import printable
from evalkit.runs.folder import Run
from evalkit.studies.results import StudyResults, steps_note
from evalkit.studies.selection import Selected, select
from evalkit.studies.study import StudyBenchmark, StudyTable
from evalkit.tables.layout import TableLayout, layout_names
from evalkit.tables.paired_sizes import without_baseline
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
