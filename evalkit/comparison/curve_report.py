"""Reports of training curves.

In: `Curve`s. Out: a `Report` with accuracy by step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from evalkit.comparison.curves import Curve
from evalkit.comparison.units import Unit, unit_of
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table


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
