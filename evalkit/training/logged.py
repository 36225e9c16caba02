"""Metrics of a finished run as a trainer logs them: name → number."""

from __future__ import annotations

import math
from collections.abc import Iterator

from evalkit.benchmarks.registry import benchmark_of
from evalkit.runs.folder import Run


def logged_metrics(run: Run, rule: str) -> dict[str, float]:
    """Return the metrics of a finished run, named `evalkit/<suite>/<task>` and `evalkit/<suite>/<average>`.

    A task's main metric has the task's name; its further ones have their own name after it. The error of the last
    average is `…_stderr`. Values have the benchmark's own unit (accuracies are fractions). Numbers that are not finite
    are left out: a file of logged numbers must be valid JSON.

    Args:
        run: the run.
        rule: of the plan: a finished run may have been started under another one.
    """
    found = _numbers(run, run.other_rule(rule))
    return {f"evalkit/{run.suite}/{name}": value for name, value in found if math.isfinite(value)}


def _numbers(run: Run, rule: str | None) -> Iterator[tuple[str, float]]:
    seen: set[str] = set()
    for metric in benchmark_of(run).metrics(run, rule):
        if metric.layer is not None:
            continue
        name = metric.task if metric.task not in seen else f"{metric.task}/{metric.name}"
        seen.add(metric.task)
        if metric.value is not None:
            yield name, float(metric.value)
    averages = benchmark_of(run).stored_averages(run, rule)
    for average in averages:
        yield average["name"], float(average["accuracy"])
    if averages and averages[-1]["stderr"] is not None:
        yield f"{averages[-1]['name']}_stderr", float(averages[-1]["stderr"])
