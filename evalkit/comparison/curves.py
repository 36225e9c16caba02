"""Training curves: accuracy, or another outcome, by step.

In: runs of one training, with steps from their revisions, checkpoints or names. Out: a `Curve` with a confidence
interval for every point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from evalkit.benchmarks.outcomes import Comparable, Label, Measure
from evalkit.comparison.differences import Unit, unit_of
from evalkit.comparison.line import line_label, line_name
from evalkit.comparison.pairing import PairedTask, Pairing, pair
from evalkit.comparison.sides import Side, check_uniform, step_of
from evalkit.errors import UsageError
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.continuous import ACCURACY, MARGIN, with_default_rule
from evalkit.runs.folder import Run
from evalkit.stats.adjusted import at_least_task_intervals, pooled, size_of_differences, with_one_won_and_one_lost
from evalkit.stats.estimates import Estimate, average, interval, mean
from evalkit.stats.significance import cluster_sums


@dataclass(frozen=True)
class Point:
    """Accuracy of one checkpoint on a task, a layer of it or on average, with its 95 % interval."""

    step: int
    accuracy: float
    stderr: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """One training."""

    name: str
    rule: str
    measure: Measure
    runs: tuple[str, ...]
    """Run folders, sorted by step."""
    tasks: dict[str, tuple[Point, ...]]
    documents: dict[str, int]
    """Number of documents of each task that all checkpoints have."""
    chance: dict[str, float]
    """Accuracy of a uniform guess on each task, and on average; empty where there are no choices."""
    average: tuple[Point, ...]
    labels: dict[str, Label]
    """Line → printed label."""


def curve(side: Side, rule: str | None = None, steps_of_runs: Sequence[int] | None = None) -> Curve:
    """Return the accuracy of every checkpoint of a training, on the documents that all of them have.

    Args:
        side: the training.
        rule: scoring rule, or a continuous outcome (`runs.outcomes.outcome_key`); None: the runs' own rule.
        steps_of_runs: step of each run; None: as `step_of` finds it.

    Raises:
        UsageError: a run has no step, two have the same, there is only one run, or the runs differ in model, documents
            or measurement settings.
    """
    by_step: dict[int, Run] = {}
    for run, step in zip(side.runs, steps_of_runs or map(step_of, side.runs), strict=True):
        if step is None:
            raise UsageError(
                f"run {run.folder.name} has no training step; expected one in its model's folder or revision "
                "(step1000, checkpoint-500) or in its trainer_state.json"
            )
        if step in by_step:
            raise UsageError(
                f"runs {by_step[step].folder.name} and {run.folder.name} both have step {step:,}; remove one"
            )
        by_step[step] = run
    if len(by_step) < 2:
        raise UsageError("a curve needs two checkpoints or more; name more runs")
    steps = sorted(by_step)
    first, *later = (by_step[step] for step in steps)
    graded: dict[str, Comparable] = {}
    pairing = pair(Side(side.name, (first,)), Side(side.name, tuple(later)), graded)
    check_uniform(side, may_differ=("limit",))  # only documents that all runs have count
    rules = {run.manifest["rule"] for run in by_step.values()}
    if rule in (None, MARGIN) and len(rules) > 1:
        raise UsageError(
            f"the runs have different rules ({', '.join(sorted(rules))}); name one with --rule: "
            f"all runs support {', '.join(pairing.rules)}"
        )
    chosen = with_default_rule(rule, str(rules.pop())) or ""
    measure, documents, chance = pairing.measure(chosen), pairing.graded[0].documents, {}
    if "choices" in documents and measure.name == ACCURACY:
        guess = 1 / documents["choices"].to_numpy(float)
        chance = {task.task: float(guess[task.rows[0]].mean()) for task in pairing.tasks}
        chance["Average"] = sum(chance.values()) / len(chance)
    lines = [
        (task, place, line_name(task.task, layer), line_label(pairing.label(task.task), layer))
        for task in pairing.tasks
        for place, layer in (enumerate(measure.layers) if measure.layers else [(None, None)])
    ]
    whole = [_by_step(pairing, task, chosen, measure, None) for task in pairing.tasks]
    return Curve(
        name=side.name,
        rule=chosen,
        measure=measure,
        runs=tuple(str(by_step[step].folder) for step in steps),
        tasks={
            name: _points(steps, _by_step(pairing, task, chosen, measure, place), measure)
            for task, place, name, _ in lines
        },
        documents={name: task.n for task, _, name, _ in lines},
        chance=chance,
        average=_points(steps, [_average(list(of_step), measure) for of_step in zip(*whole, strict=True)], measure),
        labels={name: label for _, _, name, label in lines},
    )


class _Accuracy(NamedTuple):
    """Accuracy of one checkpoint, with what its interval is computed from."""

    estimate: Estimate
    sources: float
    size: float
    """Distance of the sources' accuracies from a half, see `size_of_differences`."""
    adjusted: Estimate
    """Of a share: twice the share less one, with four sources added."""


def _by_step(pairing: Pairing, task: PairedTask, rule: str, measure: Measure, layer: int | None) -> list[_Accuracy]:
    found = []
    weights = cluster_sums(np.ones(task.n), task.clusters)
    for scores in chain(*pairing.scores(task, rule, layer)):
        size = size_of_differences(cluster_sums(2 * scores - 1, task.clusters), weights)
        found.append(_accuracy(mean(scores, task.clusters, task.strata), len(weights), size, measure))
    return found


def _average(tasks: Sequence[_Accuracy], measure: Measure) -> _Accuracy:
    pool = pooled([one.sources for one in tasks], [one.size for one in tasks])
    found = _accuracy(average([one.estimate for one in tasks]), *pool, measure)
    return found._replace(adjusted=at_least_task_intervals(found.adjusted, [one.adjusted for one in tasks]))


def _points(steps: Sequence[int], found: Sequence[_Accuracy], measure: Measure) -> tuple[Point, ...]:
    points = []
    for step, one in zip(steps, found, strict=True):
        low, high = interval(one.adjusted)
        if measure.is_share:
            low, high = (low + 1) / 2, (high + 1) / 2
        if measure.bounds:
            low, high = max(measure.bounds[0], low), min(measure.bounds[1], high)
        points.append(Point(step, one.estimate.value, one.estimate.stderr, low, high))
    return tuple(points)


def _accuracy(estimate: Estimate, sources: float, size: float, measure: Measure) -> _Accuracy:
    """Adjust a share by adding two correct and two incorrect sources (Agresti and Coull 1998).

    Where nearly all answers are correct, an interval about the share itself is too short; where all are, it has zero
    length.
    """
    if not measure.is_share:
        return _Accuracy(estimate, sources, size, estimate)
    value, variance, freedom = estimate
    more = Estimate(2 * value - 1, 4 * variance, freedom)
    for n in (sources, sources + 2):
        more = with_one_won_and_one_lost(more, n, size)
    return _Accuracy(estimate, sources, size, more)


def curve_report(curves: Sequence[Curve]) -> Report:
    """Build the report of training curves: a table of accuracy by step for each training."""
    lead, tables = [], []
    for one in curves:
        first, last = one.average[0], one.average[-1]
        unit, noun = curve_unit(one), "layer" if one.measure.layers else "task"
        lead.append(
            f"{one.name}: average {unit.value(first.accuracy)} at step {first.step:,}, "
            f"{unit.value(last.accuracy)} at step {last.step:,} ({len(one.average)} checkpoints, "
            f"{len(one.tasks)} {noun}{'s' * (len(one.tasks) > 1)})"
        )
        rows = tuple(
            (
                f"{point.step:,}",
                *(unit.value(points[place].accuracy) for points in one.tasks.values()),
                unit.value(point.accuracy),
                unit.error(point.stderr),
            )
            for place, point in enumerate(one.average)
        )
        headers = ("step", *(one.labels[task].short for task in one.tasks), "Avg.", "± SE")
        tables.append(simple_table("curve", headers, rows, title=one.name if len(curves) > 1 else ""))
    return Report(
        tuple(tables),
        verdict=tuple(lead),
        notes=(curves[0].measure.words,),
        content={"curves": [asdict(one) for one in curves]},
        records=list(_records(curves)),
    )


def curve_unit(one: Curve) -> Unit:
    """Return the unit that a curve is printed in."""
    return unit_of(one.measure, [point.stderr for points in (*one.tasks.values(), one.average) for point in points])


def _records(curves: Sequence[Curve]) -> Iterator[dict[str, Any]]:
    """Yield a record for each task and step."""
    for one in curves:
        for task, points in [*one.tasks.items(), ("Average", one.average)]:
            for point in points:
                yield {"curve": one.name, "rule": one.rule, "task": task, "n": one.documents.get(task)} | asdict(point)
