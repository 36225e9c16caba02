"""Numbers from users' runs: a YAML file maps runs, or a CSV, to the rows of a layout.

    rule: acc_norm                     # default: each run's own, which must then be the same
    rows:                              # model of the layout → run folder, or the run folders of its seeds
      vanilla_125m: results/runs/vanilla-…
      intg_125m: [results/runs/seed1-…, results/runs/seed2-…, results/runs/seed3-…]
    values: measured.csv               # numbers without a run; rows and columns named as in the layout

Runs without a mapping are assigned to rows by their models, and numbers of a table with `pairs` are shares of documents
(both in `row_models.py`). Others are read from the runs' results.json, so neither pandas nor the score table is needed.
Runs with different protocols (`benchmarks/registry.py`) are rejected, or marked on request. Differences that change
numbers by rounding only are always marked, as are unofficial documents and a run whose model is not the row's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from evalkit.benchmarks.differences import differences
from evalkit.benchmarks.multiple_choice.suites import filled
from evalkit.benchmarks.registry import benchmark_of
from evalkit.errors import RunError, TableError, UnknownNameError, UsageError
from evalkit.inputs.validated import FileSettings, Named, NonEmpty, read_settings
from evalkit.inputs.values import path as given_path
from evalkit.reporting.decimals import mean, of_float
from evalkit.reporting.table import Text, literal
from evalkit.runs.finding import find_run, root_of_runs
from evalkit.runs.folder import Run
from evalkit.runs.score_table import MARGIN
from evalkit.runs.traits import model_differences, origin_notes, same_checkpoint, summary, unofficial_notes
from evalkit.tables.layout import OneOrMore, TableLayout, rows_by_key
from evalkit.tables.published import Number, read_numbers
from evalkit.tables.row_models import find_rows, row_mismatch

PERCENT = 100


@dataclass(frozen=True)
class Measured:
    """Numbers of a table from runs, with marks and notes."""

    numbers: dict[str, dict[str, Number]]
    runs: dict[str, tuple[Run, ...]]
    """Row → runs, several of a model with several seeds; with `pairs`, of row and size, without baselines."""
    rule: str | None
    """Rule of all runs; None without runs, or where they have different rules."""
    row_marks: dict[str, str]
    notes: tuple[Text, ...]


@dataclass(frozen=True)
class RunMapping:
    """Mapping from rows to runs."""

    rule: str | None
    rows: Mapping[str, Sequence[Path | Run]]
    values: Path | None = None


class _MappingFile(FileSettings):
    rule: NonEmpty | None = None
    rows: Named[Annotated[OneOrMore, Field(min_length=1)]] | None = None
    values: NonEmpty | None = None

    @model_validator(mode="after")
    def _fills_something(self) -> Self:
        if not self.model_fields_set & {"rows", "values"}:
            raise ValueError("it must have 'rows', of models and their run folders, or 'values'")
        return self


def read_mapping(path: Path) -> RunMapping:
    """Read a mapping file; a `TableError` names the invalid key."""
    where, content = f"mapping of runs {path}", read_settings(path, _MappingFile, TableError, "mapping of runs")
    rows = {
        model: tuple(given_path(f"{where}, row '{model}'", run) for run in given)
        for model, given in (content.rows or {}).items()
    }
    values = None if content.values is None else given_path(f"{where}: 'values'", content.values)
    return RunMapping(content.rule, rows, values)


def map_runs(layout: TableLayout, runs: Sequence[Run]) -> RunMapping:
    """Map runs to rows by their models; a `UsageError` where one is of another suite, or fits no row or several."""
    for run in runs:
        _check_suite(layout, run)
    return RunMapping(None, find_rows(layout, runs))


def measure(layout: TableLayout, mapping: RunMapping, rule: str | None = None, mixed: bool = False) -> Measured:
    """Read the numbers of a mapping; `rule` overrides its own.

    With `mixed`, runs with another protocol than the first run's are marked; without, they are rejected.

    Raises:
        UsageError: an unknown row or rule, or runs that do not fit this table or cannot be compared with each other.
        RunError: a folder that is not a finished run; names it and the row.
        TableError: a CSV that cannot be read.
    """
    if unknown := next((model for model in mapping.rows if model not in layout.assigned), None):
        raise UnknownNameError(f"row of table {layout.name}", unknown, layout.assigned)
    runs = {model: tuple(_open(run, model) for run in given) for model, given in mapping.rows.items()}
    rule = rule or mapping.rule
    if rule and layout.pairs:
        raise UsageError(f"the measures of table {layout.name} have their own rules; omit --rule {rule}")
    for model, seeds in runs.items():
        _check_row(layout, model, seeds)
    rules = list(dict.fromkeys(str(run.manifest["rule"]) for seeds in runs.values() for run in seeds))
    if rule == MARGIN:
        if len(rules) > 1:
            given = ", ".join(rules)
            raise UsageError(f"the runs have different rules ({given}), and margins are a rule's; give --rule")
        rule = f"{MARGIN}:{''.join(rules)}"
    letters, notes = _notes(layout, runs, rule, mixed)
    if layout.pairs:
        # Imported here, since it needs numpy
        from evalkit.tables.row_models import paired_numbers

        numbers = paired_numbers(layout, runs)
    else:
        numbers = {
            model: _row_numbers(layout, [accuracies(run, rule) for run in seeds]) for model, seeds in runs.items()
        }
    if mapping.values:
        for model, row in _values(layout, mapping.values).items():
            if model in numbers:
                raise TableError(f"row '{model}' has both a run and numbers in {mapping.values}; remove one of them")
            numbers[model] = row
        notes.append(f"Numbers of {mapping.values} as given there.")
    used = rule or (rules[0] if len(rules) == 1 else None)
    shown = {model: seeds for model, seeds in runs.items() if model in rows_by_key(layout)}
    return Measured(numbers, shown, used, letters, tuple(map(literal, [*_summary(runs, used), *notes])))


def accuracies(run: Run, rule: str | None) -> dict[str, tuple[Fraction, float | None]]:
    """Return task → (value, standard error) under a rule, by default the run's own; shares are in percent.

    Raises:
        UnknownNameError: the run was not scored for that rule.
    """
    values: dict[str, tuple[Fraction, float | None]] = {}
    benchmark = benchmark_of(run)
    _, stands_for = filled(run.suite)
    for metric in benchmark.metrics(run, rule):
        task = stands_for.get(metric.task, metric.task)
        if task not in values and metric.value is not None and metric.layer is None:
            # A value stored in percent is not rescaled, so that its decimals stay exact
            scale = PERCENT / of_float(metric.whole) if metric.whole else Fraction(1)
            error = None if metric.stderr is None else float(scale) * metric.stderr
            values[task] = (scale * of_float(metric.value), error)
    return values


def _open(given: Path | Run, model: str) -> Run:
    if isinstance(given, Run):
        return given
    try:
        return find_run(str(given), root_of_runs())
    except (UsageError, RunError) as error:
        raise (UsageError if isinstance(error, UsageError) else RunError)(f"row '{model}': {error}") from error


def _check_row(layout: TableLayout, model: str, seeds: Sequence[Run]) -> None:
    for run in seeds:
        _check_suite(layout, run, f"row '{model}': ")
        if models := model_differences(seeds[0], run):
            raise UsageError(
                f"row '{model}': the models of runs {seeds[0].folder} and {run.folder} differ in "
                f"{', '.join(models)}; several runs of a row are seeds of one model"
            )
    if same_checkpoint(seeds):
        raise UsageError(f"row '{model}': two runs are of one checkpoint, not of two seeds; remove one")


def _check_suite(layout: TableLayout, run: Run, where: str = "") -> None:
    suite = run.suite
    fills, _ = filled(suite)
    if layout.suite is None:
        raise UsageError(
            f"{where}table {layout.name} shows {', '.join(layout.tasks[:3])} …, which run {run.folder} of suite "
            f"{suite} does not measure; give these numbers as a CSV, with 'values: FILE.csv' in the mapping"
        )
    if layout.suite not in (suite, fills):
        raise UsageError(
            f"{where}run {run.folder} is of suite {suite}, but table {layout.name} shows suite {layout.suite}; "
            "name a run of that suite, or a layout of this one"
        )


def _row_numbers(
    layout: TableLayout, seeds: Sequence[Mapping[str, tuple[Fraction, float | None]]]
) -> dict[str, Number]:
    """Return a row's tasks and averages, with the standard error of one run or the standard deviation over several."""
    # Here, since published tables need no numpy
    from evalkit.stats.estimates import error_of_average

    numbers: dict[str, Number] = {}
    for name, tasks in ({task: (task,) for task in layout.tasks} | layout.averages).items():
        if all(task in seed for seed in seeds for task in tasks):
            means = [mean([seed[task][0] for task in tasks]) for seed in seeds]
            error = error_of_average([seeds[0][task][1] for task in tasks])
            spread = statistics.stdev(map(float, means)) if len(seeds) > 1 else error
            numbers[name] = Number(mean(means), None if spread is None else of_float(spread))
    return numbers


def _values(layout: TableLayout, path: Path) -> dict[str, dict[str, Number]]:
    numbers = read_numbers(path, layout.in_percent)
    for model, row in numbers.items():
        if model not in layout.models:
            raise UnknownNameError(f"row of {path}", model, layout.models)
        if unknown := next((column for column in row if column not in layout.tasks), None):
            why = ": averages are computed, never given" if unknown in layout.averages else ""
            raise TableError(f"{path}: {UnknownNameError('column', unknown, layout.tasks)}{why}")
    return numbers


def _notes(
    layout: TableLayout, runs: Mapping[str, tuple[Run, ...]], rule: str | None, mixed: bool
) -> tuple[dict[str, str], list[str]]:
    """Return letters of rows with notes, and the notes."""
    rows, flat = rows_by_key(layout), [(model, run) for model, seeds in runs.items() for run in seeds]
    letters: dict[str, str] = {}
    notes: list[str] = []
    for model, run in flat:
        first_model, first = flat[0]
        differing = differences(first, run, rule)
        if refused := next(((mine, theirs) for mine, theirs in differing if mine.refused and not mixed), None):
            raise UsageError(
                f"row '{model}': run {run.folder} was measured with {refused[1].words}, row '{first_model}' (run "
                f"{first.folder}) with {refused[0].words}; make them alike, or mark such rows with --allow-mixed"
            )
        remarks = [f"{theirs.words}, not {mine.words}" for mine, theirs in differing if mine.name != "origin"]
        if layout.suite != run.suite:
            benchmark = benchmark_of(run)
            pairs = ([benchmark.label(run, name).full for name in pair] for pair in filled(run.suite)[1].items())
            remarks += [f"{task} in the column of {column}" for task, column in pairs]
        remarks += [*origin_notes(run.manifest), *unofficial_notes(run.manifest)]
        remarks += filter(None, [row_mismatch(layout, model, run)])
        if remarks:
            row = rows.get(model)
            letter = letters.setdefault(row, chr(ord("a") + len(letters))) if row else model
            notes.append(f"{letter}: {run.folder.name}: {'; '.join(remarks)}.")
    return letters, notes


def _summary(runs: Mapping[str, tuple[Run, ...]], rule: str | None) -> list[str]:
    """Describe the runs' protocol in a line, and list rows of several runs."""
    if not runs:
        return []
    first = next(iter(runs.values()))[0]
    several = [f"'{model}' ({len(seeds)} runs)" for model, seeds in runs.items() if len(seeds) > 1]
    means = [f"Means over several runs: {', '.join(several)}."] if several else []
    return [f"evalkit, suite {first.suite}, {summary(first, rule)}.", *means]
