"""Training curves: accuracy, or another outcome, by step.

In: runs of one training. Out: a `Curve` with a confidence interval for every point, and its report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from evalkit.benchmarks.outcomes import Comparable, Measure, flat_fields
from evalkit.comparison.line import line_label, line_name
from evalkit.comparison.pairing import PairedTask, Pairing, pair, sample_names
from evalkit.comparison.sentences import Unit, unit_of
from evalkit.comparison.sides import Side, check_uniform, step_of
from evalkit.errors import UsageError
from evalkit.escape import counted
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.folder import Run
from evalkit.runs.scales import ACCURACY
from evalkit.runs.traits import selection_words
from evalkit.stats.adjusted import at_least_task_intervals, pooled, size_of_differences, with_one_won_and_one_lost
from evalkit.stats.estimates import Estimate, average, interval, mean
from evalkit.stats.significance import cluster_sums
from evalkit.suites.suites import Label


@dataclass(frozen=True)
class Point:
    """Mean score of one checkpoint on a task, a layer of it or on average, with its 95 % interval."""

    step: int
    value: float
    stderr: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """One training."""

    name: str
    model: str
    """Its model, of which other curves may show other seeds."""
    rule: str
    measure: Measure
    runs: tuple[str, ...]
    """Folders, sorted by step."""
    tasks: dict[str, tuple[Point, ...]]
    documents: dict[str, int]
    """Of each task, those that all checkpoints have."""
    selection: str
    """Which documents these are, in words."""
    chance: dict[str, float]
    """Accuracy of a uniform guess on each task, and on average; empty where there are no choices."""
    average: tuple[Point, ...]
    labels: dict[str, Label]


def curve(side: Side, rule: str | None = None, steps_of_runs: Sequence[int] | None = None, model: str = "") -> Curve:
    """Return the mean scores of every checkpoint of a training, on the documents that all of them have.

    `rule` is a scoring rule or a continuous outcome (`runs.continuous.outcome_key`), by default the runs' own;
    `steps_of_runs` by default as `step_of` finds them; `model` the name that its seeds share, by default the side's.
    Runs without a step, with the same one, of another model or of other settings raise `UsageError`.
    """
    by_step = _by_step(side.runs, steps_of_runs or list(map(step_of, side.runs)))
    first, *later = by_step.values()
    graded: dict[str, Comparable] = {}
    pairing = pair(Side(side.name, (first,)), Side(side.name, tuple(later)), graded)
    check_uniform(side, may_differ=("limit",))  # only documents that all runs have count
    rule = pairing.key(rule)
    measure, documents, chance = pairing.measure(rule), pairing.graded[0].documents, {}
    if "choices" in documents and measure.name == ACCURACY:
        guess = 1 / documents["choices"].to_numpy(float)
        chance = {task.task: float(guess[task.rows[0]].mean()) for task in pairing.tasks}
        chance["Average"] = sum(chance.values()) / len(chance)
    tasks, counts, labels = {}, {}, {}
    for task in pairing.tasks:
        for number, layer in enumerate(measure.layers) if measure.layers else [(None, None)]:
            name = line_name(task.task, layer)
            tasks[name] = _points(by_step, _means(pairing, task, rule, measure, number), measure)
            counts[name], labels[name] = task.n, line_label(pairing.label(task.task), layer)
    whole = [_means(pairing, task, rule, measure, None) for task in pairing.tasks]
    samples = sample_names(pairing.tasks)
    averages = [_average(of_step, measure, samples) for of_step in zip(*whole, strict=True)]
    mean_of_tasks = _points(by_step, averages, measure)
    runs = tuple(str(run.folder) for run in by_step.values())
    selection = " and ".join(dict.fromkeys(selection_words(run) or "all documents" for run in by_step.values()))
    return Curve(
        side.name, model or side.name, rule, measure, runs, tasks, counts, selection, chance, mean_of_tasks, labels
    )


def _by_step(runs: Sequence[Run], steps: Sequence[int | None]) -> dict[int, Run]:
    by_step: dict[int, Run] = {}
    for run, step in zip(runs, steps, strict=True):
        if step is None:
            expected = "none in its model's name, such as step1000, nor in a trainer_state.json"
            raise UsageError(f"run {run.folder.name} has no training step: {expected}")
        if (other := by_step.setdefault(step, run)) is not run:
            raise UsageError(f"runs {other.folder.name} and {run.folder.name} both have step {step:,}; remove one")
    if len(by_step) < 2:
        raise UsageError("a curve needs two checkpoints or more; name more runs")
    return dict(sorted(by_step.items()))


class _Mean(NamedTuple):
    """Mean score of one checkpoint, with what its interval is computed from."""

    estimate: Estimate
    sources: float
    size: float
    """Distance of the sources' accuracies from a half, see `size_of_differences`."""
    adjusted: Estimate
    """Of a share: twice the share less one, with four sources added."""


def _means(pairing: Pairing, task: PairedTask, rule: str, measure: Measure, layer: int | None) -> list[_Mean]:
    means = []
    weights = cluster_sums(np.ones(task.n), task.clusters)
    for scores in chain(*pairing.scores(task, rule, layer)):
        size = size_of_differences(cluster_sums(2 * scores - 1, task.clusters), weights)
        means.append(_adjusted(mean(scores, task.clusters, task.strata), len(weights), size, measure))
    return means


def _average(tasks: Sequence[_Mean], measure: Measure, samples: Sequence[str]) -> _Mean:
    sources, size = pooled([task.sources for task in tasks], [task.size for task in tasks], samples)
    of_all = _adjusted(average([task.estimate for task in tasks], samples), sources, size, measure)
    of_tasks = [task.adjusted for task in tasks]
    return of_all._replace(adjusted=at_least_task_intervals(of_all.adjusted, of_tasks, samples=samples))


def _adjusted(estimate: Estimate, sources: float, size: float, measure: Measure) -> _Mean:
    """Adjust a share by adding two correct and two incorrect sources (Agresti and Coull 1998).

    Where nearly all answers are correct, an interval about the share itself is too short; where all are, it has zero
    length.
    """
    if not measure.is_share:
        return _Mean(estimate, sources, size, estimate)
    value, variance, freedom, _ = estimate
    more = Estimate(2 * value - 1, 4 * variance, freedom)
    for n in (sources, sources + 2):
        more = with_one_won_and_one_lost(more, n, size)
    return _Mean(estimate, sources, size, more)


def _points(steps: dict[int, Run], means: Sequence[_Mean], measure: Measure) -> tuple[Point, ...]:
    points = []
    for step, score in zip(steps, means, strict=True):
        low, high = interval(score.adjusted)
        if measure.is_share:
            low, high = (low + 1) / 2, (high + 1) / 2
        if measure.bounds:
            low, high = max(measure.bounds[0], low), min(measure.bounds[1], high)
        points.append(Point(step, score.estimate.value, score.estimate.stderr, low, high))
    return tuple(points)


def curve_unit(curve: Curve) -> Unit:
    points = (point for points in (*curve.tasks.values(), curve.average) for point in points)
    return unit_of(curve.measure, [point.stderr for point in points])


def curve_report(curves: Sequence[Curve]) -> Report:
    """Build the report of training curves: a table of scores by step for each training."""
    verdict, tables, records = [], [], []
    for training in curves:
        first, last = training.average[0], training.average[-1]
        unit, lines = curve_unit(training), counted(len(training.tasks), "layer" if training.measure.layers else "task")
        ends = ", ".join(f"{unit.value(end.value)} at step {end.step:,}" for end in (first, last))
        verdict.append(f"{training.name}: average {ends} ({len(training.average)} checkpoints, {lines})")
        rows = []
        for point, *of_tasks in zip(training.average, *training.tasks.values(), strict=True):
            cells = [unit.value(of_task.value) for of_task in of_tasks]
            rows.append([f"{point.step:,}", *cells, unit.value(point.value), unit.error(point.stderr)])
        headers = ("step", *(training.labels[task].short for task in training.tasks), "Avg.", "± SE")
        tables.append(simple_table("curve", headers, rows, title=training.name if len(curves) > 1 else ""))
        for task, points in [*training.tasks.items(), ("Average", training.average)]:
            about = {"curve": training.name, "rule": training.rule, "task": task, "n": training.documents.get(task)}
            about |= training.measure.scale.entries
            records += [about | asdict(point) for point in points]
    content = {"curves": [asdict(training, dict_factory=flat_fields) for training in curves]}
    notes = (curves[0].measure.words, *dict.fromkeys(map(_documents, curves)))
    return Report(tables, verdict, notes=notes, content=content, records=records)


def _documents(training: Curve) -> str:
    """Return which documents the points of a curve are of, and n of each task."""
    sizes = {training.labels[task].short: f"{n:,}" for task, n in training.documents.items()}
    listed = ", ".join(f"{label} {n}" for label, n in sizes.items())
    return f"{training.selection}, those that all checkpoints have; n: {listed}"
