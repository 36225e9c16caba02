"""Tables of a study.

In: a study's results, and a `TableRequest`. Out: a filled table, or the reason why the study has no run for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from evalkit.benchmarks.registry import benchmark_of
from evalkit.errors import UsageError
from evalkit.reporting.table import Table
from evalkit.runs.folder import Run
from evalkit.scores.outcomes import ACCURACY, MARGIN
from evalkit.studies.results import StudyResults
from evalkit.studies.study import Study, StudyBenchmark, StudyTable
from evalkit.studies.table_rows import assign, with_baselines
from evalkit.tables.adjusted_layout import retitled
from evalkit.tables.layout import TableLayout, layout_names
from evalkit.tables.measured import RunMapping
from evalkit.tables.paired_sizes import rows_by_key
from evalkit.tables.request import TableRequest, check_options, made_of_runs, requested_layout

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
