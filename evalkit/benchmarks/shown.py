"""A finished run of any benchmark as text, where the benchmark has no view of its own: its metrics, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evalkit.reporting.escape import printable
from evalkit.reporting.page import aligned
from evalkit.runs.batch_devices import mixture

if TYPE_CHECKING:
    from evalkit.benchmarks.outcomes import Metric
    from evalkit.runs.folder import Run


def as_json(run: Run, **more: Any) -> str:
    """What results.json holds, with the run's id and folder, and more keys."""
    about = {"run": run.manifest["id"], "folder": str(run.folder)}
    return json.dumps(about | more | run.stored, indent=2)


def as_table(run: Run, metrics: Sequence[Metric]) -> str:
    """A line for each metric."""
    headers = ["task", "n", "metric", "value", "± SE"]
    table = aligned(
        [_cells(metric) for metric in metrics], headers, colalign=("left", "right", "left", "right", "right")
    )
    notes = [
        *mixture(run.manifest),
        *(["↓: lower is better"] if any(m.higher_is_better is False for m in metrics) else []),
    ]
    return "\n".join([table, *(["", *map(printable, notes)] if notes else [])])


def _cells(metric: Metric) -> list[str]:
    layer = "" if metric.layer is None else f", layer {metric.layer}"
    name = printable(metric.name) + layer + (" ↓" if metric.higher_is_better is False else "")
    task = printable(metric.task) + ("*" if metric.official is False else "")
    value = "–" if metric.value is None else f"{metric.value:.4f}"
    return [task, f"{metric.n:,}", name, value, "–" if metric.stderr is None else f"± {metric.stderr:.4f}"]
