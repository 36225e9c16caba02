"""Numbers of a table from runs.

In: a layout and its `RunMapping` (`rows.py`). Out: numbers with their errors, marks of rows and notes. Numbers are read
from the runs' results.json, so the score table is not needed, except for shares of documents on which a model exceeds
its baseline (section 5.3 of the paper) and for significant leads. Runs with different protocols
(`benchmarks/registry.py`) are rejected, or marked on request. Differences that change numbers by rounding only are
always marked, as are unofficial documents and a run whose model is not the row's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evalkit.benchmarks.differences import differences
from evalkit.benchmarks.outcomes import Comparable
from evalkit.benchmarks.registry import results_of
from evalkit.benchmarks.run_listing import documents_words
from evalkit.comparison.comparison import p_value
from evalkit.comparison.pairing import Pairing, pair
from evalkit.comparison.sides import Side
from evalkit.errors import TableError, UnknownNameError, UsageError, check_known
from evalkit.reporting.decimals import mean, of_float
from evalkit.reporting.table import Text, literal
from evalkit.runs.continuous import lacks_rule
from evalkit.runs.folder import Run
from evalkit.runs.notes import run_notes
from evalkit.runs.traits import (
    model_differences,
    same_checkpoint,
    summary,
)
from evalkit.stats.adjusted import with_one_won_and_one_lost
from evalkit.stats.estimates import error_of_average, known_error
from evalkit.stats.estimates import mean as mean_over_documents
from evalkit.stats.power import ALPHA
from evalkit.stats.significance import holm
from evalkit.suites.suites import filled
from evalkit.tables.fill import CellKey, Number, leads, published_numbers, read_numbers
from evalkit.tables.layout import BASELINE, TableLayout, rows_by_key, run_key, without_baseline
from evalkit.tables.rows import RunMapping, check_suite, row_mismatch

PERCENT = 100


class Measured(NamedTuple):
    numbers: dict[str, dict[str, Number]]
    runs: dict[str, tuple[Run, ...]]
    """Row → runs; with `pairs`, of row and size, without baselines."""
    rule: str | None
    """Rule of all runs; None without runs, or where they have different rules."""
    row_marks: dict[str, str]
    notes: tuple[Text, ...]


def measure(layout: TableLayout, mapping: RunMapping, rule: str | None = None, mixed: bool = False) -> Measured:
    """Read the numbers of a mapping; `rule` overrides its own.

    With `mixed`, runs with another protocol than the first run's are marked; without, they are rejected.
    """
    check_known(f"row of table {layout.name}", mapping.rows, layout.assigned)
    rule = rule or mapping.rule
    if rule and layout.pairs:
        raise UsageError(f"the measures of table {layout.name} have their own rules; omit --rule {rule}")
    runs = {row: tuple(seeds) for row, seeds in mapping.rows.items()}
    for row, seeds in runs.items():
        _check_seeds(layout, row, seeds)
    rules = list(dict.fromkeys(str(run.manifest["rule"]) for seeds in runs.values() for run in seeds))
    if rule is not None and lacks_rule(rule):
        if len(rules) > 1:
            raise UsageError(f"outcome {rule} is a rule's, and the runs have several ({', '.join(rules)}); give --rule")
        rule = f"{rule}:{''.join(rules)}"
    row_marks, notes = _notes(layout, runs, rule, mixed)
    if layout.pairs:
        numbers = _paired_numbers(layout, runs)
    else:
        numbers = {row: _row_numbers(layout, [task_values(run, rule) for run in seeds]) for row, seeds in runs.items()}
    if mapping.values:
        values = _values(layout, mapping.values)
        if twice := [row for row in values if row in numbers]:
            raise TableError(f"row '{twice[0]}' has both a run and numbers in {mapping.values}; remove one of them")
        numbers |= values
        notes.append(f"Numbers of {mapping.values.name} as given there.")
    used = rule or (rules[0] if len(rules) == 1 else None)
    heading = _heading(runs, used)
    if several := [f"'{row}' ({len(seeds)} runs)" for row, seeds in runs.items() if len(seeds) > 1]:
        heading.append(f"Means over several runs: {', '.join(several)}.")
    shown = {row: seeds for row, seeds in runs.items() if row in rows_by_key(layout)}
    return Measured(numbers, shown, used, row_marks, tuple(map(literal, [*heading, *notes])))


def _heading(runs: Mapping[str, Sequence[Run]], rule: str | None) -> list[str]:
    """Return what was measured, and n of each task; empty without runs."""
    every = [run for seeds in runs.values() for run in seeds]
    if not every:
        return []
    metrics = [metric for run in every for metric in results_of(run).metrics(rule) if metric.layer is None]
    sizes = documents_words(every, metrics).partition("; ")[2]  # the settings name the documents
    return [f"evalkit, suite {every[0].suite}, {summary(every[0], rule)}; {sizes}."]


def with_quoted(layout: TableLayout, measured: Measured) -> Measured:
    """Add the published numbers of rows that belong to no named model and have no run, with a mark and a note."""
    rows = [key for key, item in layout.model_items.items() if item.no_model and key not in measured.numbers]
    if not rows or not layout.data_file.is_file():
        return measured
    published, letter = published_numbers(layout), chr(ord("a") + len(measured.row_marks))
    note = f"{letter}: published numbers, not measured here and perhaps under another protocol."
    return measured._replace(
        numbers=measured.numbers | {row: published[row] for row in rows if row in published},
        row_marks=measured.row_marks | dict.fromkeys(rows, letter),
        notes=(*measured.notes, literal(note)),
    )


def task_values(run: Run, rule: str | None) -> dict[str, tuple[Fraction, float | None]]:
    """Task → (value, standard error) under a rule, by default the run's own; shares are in percent."""
    values: dict[str, tuple[Fraction, float | None]] = {}
    _, stands_for = filled(run.suite)
    for metric in results_of(run).metrics(rule):
        task = stands_for.get(metric.task, metric.task)
        if task not in values and metric.value is not None and metric.layer is None:
            # A value stored in percent is not rescaled, so that its decimals stay exact
            scale = PERCENT / of_float(metric.whole) if metric.whole else Fraction(1)
            error = None if metric.stderr is None else float(scale) * metric.stderr
            values[task] = (scale * of_float(metric.value), error)
    return values


def _check_seeds(layout: TableLayout, row: str, seeds: Sequence[Run]) -> None:
    for run in seeds:
        check_suite(layout, run, f"row '{row}': ")
        if models := model_differences(seeds[0], run):
            runs = f"the models of runs {seeds[0].folder} and {run.folder}"
            raise UsageError(f"row '{row}': {runs} differ in {', '.join(models)}; give seeds of one model")
    if same_checkpoint(seeds):
        raise UsageError(f"row '{row}': two runs are of one checkpoint, not of two seeds; remove one")


def _notes(
    layout: TableLayout, runs: Mapping[str, tuple[Run, ...]], rule: str | None, mixed: bool
) -> tuple[dict[str, str], list[str]]:
    rows, flat = rows_by_key(layout), [(key, run) for key, seeds in runs.items() for run in seeds]
    letters, notes = dict[str, str](), list[str]()
    for key, run in flat:
        first_key, first = flat[0]
        differing = differences(first, run, rule)
        if refused := next(((mine, theirs) for mine, theirs in differing if mine.refused and not mixed), None):
            rows_differ = f"row '{key}' (run {run.folder}) was measured with {refused[1].words}, row '{first_key}'"
            raise UsageError(f"{rows_differ} with {refused[0].words}; mark such rows with --allow-mixed")
        remarks = [f"{theirs.words}, not {mine.words}" for mine, theirs in differing if mine.name != "origin"]
        if layout.suite != run.suite:
            results = results_of(run)
            pairs = ([results.label(task).full for task in pair] for pair in filled(run.suite)[1].items())
            remarks += [f"{task} in the column of {column}" for task, column in pairs]
        remarks += run_notes(run.manifest)
        remarks += filter(None, [row_mismatch(layout, key, run)])
        if remarks:
            row = rows.get(key)
            letter = letters.setdefault(row, chr(ord("a") + len(letters))) if row else key
            notes.append(f"{letter}: {run.folder.name}: {'; '.join(remarks)}.")
    return letters, notes


def _row_numbers(
    layout: TableLayout, seeds: Sequence[Mapping[str, tuple[Fraction, float | None]]]
) -> dict[str, Number]:
    numbers: dict[str, Number] = {}
    for name, tasks in ({task: (task,) for task in layout.tasks} | layout.averages).items():
        if all(task in seed for seed in seeds for task in tasks):
            means = [mean([seed[task][0] for task in tasks]) for seed in seeds]
            numbers[name] = _over_seeds(means, error_of_average([seeds[0][task][1] for task in tasks]))
    return numbers


def _over_seeds(values: Sequence[Fraction], error: float | None) -> Number:
    """Return the mean over seeds with their standard deviation, or the number of one run with its standard error."""
    spread = known_error(statistics.stdev(map(float, values))) if len(values) > 1 else error
    return Number(mean(values), None if spread is None else of_float(spread))


def _values(layout: TableLayout, path: Path) -> dict[str, dict[str, Number]]:
    numbers = read_numbers(path, layout.in_percent)
    for row, values in numbers.items():
        if row not in layout.model_items:
            raise UnknownNameError(f"row of {path}", row, layout.model_items)
        if unknown := [column for column in values if column not in layout.tasks]:
            raise TableError(f"{path}: {UnknownNameError('column', unknown[0], layout.tasks)}")
    return numbers


def _paired_numbers(layout: TableLayout, runs: Mapping[str, tuple[Run, ...]]) -> dict[str, dict[str, Number]]:
    """Row → measure → share of documents in percent, of the runs of each row, size and baseline."""
    for key, size in without_baseline(layout, runs).items():
        baseline = f"{' or '.join(layout.pairs[size].baseline)}; give its run (row '{run_key(BASELINE, size)}')"
        raise UsageError(f"table {layout.name}: row '{key}' has a run, but its baseline has none: {baseline}")
    graded: dict[str, Comparable] = {}
    numbers: dict[str, dict[str, Number]] = {}
    for row in layout.model_items:
        for size, compared in layout.pairs.items():
            if (key := run_key(row, size)) not in runs:
                continue
            baseline = run_key(BASELINE, size)
            pairing = pair(Side(baseline, runs[baseline]), Side(key, runs[key]), graded)
            if lost := [*pairing.left_out, *(task.task for task in pairing.tasks if task.dropped)]:
                documents = f"the same documents of {', '.join(lost)} as its baseline {runs[baseline][0].folder.name}"
                raise UsageError(f"row '{key}': run {runs[key][0].folder.name} was not measured on {documents}")
            for measure, rule in compared.measures.items():
                try:
                    numbers.setdefault(row, {})[measure] = _exceeding_share(pairing, rule)
                except UsageError as error:
                    raise UsageError(f"table {layout.name}, '{measure}' of row '{key}': {error}") from error
    return numbers


def _exceeding_share(pairing: Pairing, rule: str) -> Number:
    """Return the share of documents on which B exceeds A under a rule, in percent, with its standard error.

    The error of one run of B is over documents, clustered by their sources, with the tasks as strata. One document won
    and one lost are added, as in the interval of a comparison, so that it is not 0 at 0 and 100 %. Of several seeds it
    is the standard deviation of their shares.
    """
    tasks = pairing.tasks
    scores = [pairing.scores(task, rule) for task in tasks]
    baseline, ours = (np.concatenate(side, axis=1) for side in zip(*scores, strict=True))
    exceeds = ours[:, None] > baseline[None]  # [runs of B, runs of A, documents]
    shares = [PERCENT * Fraction(int(of_run.sum()), of_run.size) for of_run in exceeds]
    clusters = np.concatenate([np.arange(task.n) if task.clusters is None else task.clusters for task in tasks])
    strata = np.repeat(np.arange(len(tasks)), [task.n for task in tasks])
    won_or_lost = mean_over_documents(2.0 * exceeds[0].mean(axis=0) - 1, clusters, strata)
    error = with_one_won_and_one_lost(won_or_lost, sum(task.sources for task in tasks)).stderr / 2
    return _over_seeds(shares, None if math.isnan(error) else PERCENT * error)


def significant_leads(layout: TableLayout, measured: Measured) -> set[CellKey]:
    """Numbers of runs whose lead over the next best is significant, corrected over all leads of the table."""
    runs = measured.runs
    tested = [lead for lead in leads(layout, measured.numbers) if lead[0] in runs and lead[1] in runs]
    if tested and measured.rule is None:
        raise UsageError("--significance tests all rows under one rule, but the runs have several; give --rule")
    graded: dict[str, Comparable] = {}
    pairings: dict[tuple[str, str], Pairing] = {}
    ps = []
    for best, runner_up, measure in tested:
        if (best, runner_up) not in pairings:
            pairings[best, runner_up] = pair(Side(best, runs[best]), Side(runner_up, runs[runner_up]), graded)
        pairing, tasks = pairings[best, runner_up], layout.averages.get(measure, (measure,))
        if dropped := [task.task for task in pairing.tasks if task.task in tasks and task.dropped]:
            rows = f"rows '{best}' and '{runner_up}' were not measured on the same documents of {dropped[0]}"
            raise UsageError(f"{rows}, so --significance cannot test their lead; omit it")
        ps.append(p_value(pairing, tasks, str(measured.rule)))
    return {(best, measure) for (best, _, measure), p in zip(tested, holm(ps), strict=True) if p <= ALPHA}
