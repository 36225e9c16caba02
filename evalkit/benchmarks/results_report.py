"""Default report of a finished run: its metrics → a `Report` with one line for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from evalkit.reporting.decimals import fixed
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.batch_devices import mixture

if TYPE_CHECKING:
    from evalkit.benchmarks.outcomes import Metric
    from evalkit.runs.folder import Run

LOWER_IS_BETTER = " ↓"
"""Mark after the metric's name, explained by `LOWER_NOTE`."""
LOWER_NOTE = "↓: lower is better"


def run_content(run: Run, **more: Any) -> dict[str, Any]:
    """Return the JSON content of a run: results.json with the run's id, its folder and further keys."""
    return {"run": run.manifest["id"], "folder": str(run.folder)} | more | dict(run.stored)


def metrics_report(run: Run, metrics: Sequence[Metric]) -> Report:
    """Return a report with one line for each metric."""
    headers = ["task", "metric", "n", "value", "± SE"]
    table = simple_table(run.suite, headers, list(map(_cells, metrics)), texts=2)
    notes = [*mixture(run.manifest), *([LOWER_NOTE] if any(m.higher_is_better is False for m in metrics) else [])]
    return Report((table,), notes=tuple(notes), content=run_content(run), records=list(map(asdict, metrics)))


def _cells(metric: Metric) -> list[str]:
    layer = "" if metric.layer is None else f", layer {metric.layer}"
    name = metric.name + layer + (LOWER_IS_BETTER if metric.higher_is_better is False else "")
    task = metric.task + ("*" if metric.official is False else "")
    error = "–" if metric.stderr is None else f"± {fixed(metric.stderr, 4)}"
    return [task, name, f"{metric.n:,}", fixed(metric.value, 4), error]
