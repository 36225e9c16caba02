"""Metrics of a log, computed again from its documents.

In: a `LoggedTask`. Out: the metrics that follow from the values of its documents, or a `DataError` if the results file
beside it says otherwise. How lm-eval combines other metrics, its results file does not say, so these are not shown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evalkit.errors import DataError
from evalkit.importing.log_files import LoggedTask
from evalkit.importing.log_lines import MetricValue
from evalkit.reporting.escape import printable

_TOLERANCE = 1e-6
"""Relative difference of two computations of a metric."""
_MEANS = ("acc", "exact_match")
"""Beginnings of the names of metrics that are means, where the log does not say it."""
_DEFAULTS = {
    "perplexity": "perplexity",
    "word_perplexity": "weighted_perplexity",
    "byte_perplexity": "weighted_perplexity",
    "bits_per_byte": "bits_per_byte",
}
"""Metric → its aggregation in lm-eval where the log does not say it, as in all logs of wikitext."""


@dataclass(frozen=True)
class RecomputedMetric:
    """A metric of a task under a filter of its answers."""

    filter: str
    metric: str
    value: float
    stderr: float | None
    """Of a mean, from the sample's standard deviation; None for other metrics."""


def check_results(log: LoggedTask) -> None:
    """Raise `DataError` if the results file beside a sample file has another value of a metric than its documents."""
    logged = logged_values(log)
    for one in means(log):
        expected = logged.get((one.metric, one.filter), one.value)
        if log.summary is not None and not _is_close(one.value, expected):
            raise DataError(
                f"{log.summary.path} has {printable(one.metric)[:60]} {expected:.6g} for {log.task}, but the documents "
                f"in {log.path.name} have {one.value:.6g}; a file was changed, so restore the original"
            )


def means(log: LoggedTask) -> list[RecomputedMetric]:
    """Return the metrics whose values can be computed from those of the documents.

    Without a results file, these are the metrics whose values are shares; with one, a metric that it does not call a
    mean is one if its value is the mean.
    """
    values: dict[tuple[str, str], list[MetricValue]] = {}
    for sample in log.samples:
        for metric, value in sample.metrics.items():
            values.setdefault((metric, sample.filter), []).append(value)
    logged, found = logged_values(log), []
    for (metric, rule), members in values.items():
        kind = _aggregation(log, metric)
        try:
            value = _AGGREGATIONS[kind or "mean"](members)
        except (KeyError, TypeError, ArithmeticError, ValueError):  # unknown, other values, or out of range
            continue
        numbers = [one for one in members if isinstance(one, float)] if kind in (None, "mean") else []
        if kind is None:
            shares = all(0 <= one <= 1 for one in numbers)
            expected = logged.get((metric, rule), value if shares else None)
            if expected is None or not _is_close(value, expected):
                continue
        error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
        found.append(RecomputedMetric(rule, metric, value, error))
    return found


def logged_values(log: LoggedTask) -> dict[tuple[str, str], float]:
    """Return (metric, filter) → value in the results file."""
    found = {} if log.results is None else log.results.results.get(log.task, {})
    parts = {key: key.rpartition(",") for key, value in found.items() if isinstance(value, (int, float))}
    return {
        (metric, rule): float(found[key])
        for key, (metric, comma, rule) in parts.items()
        if comma and not metric.endswith("_stderr")
    }


def _aggregation(log: LoggedTask, metric: str) -> str | None:
    """Return lm-eval's name of how a metric's values are combined; None if it is unknown."""
    listed = None if log.results is None else log.results.configs.get(log.task, {}).get("metric_list")
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and entry.get("metric") == metric and isinstance(entry.get("aggregation"), str):
            return str(entry["aggregation"])
    return "mean" if metric.startswith(_MEANS) else _DEFAULTS.get(metric)


def _is_close(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _per_weight(values: Sequence[Any]) -> float:
    return math.fsum(total for total, _ in values) / math.fsum(weight for _, weight in values)


_AGGREGATIONS: Mapping[str, Callable[[Sequence[Any]], float]] = {
    "mean": statistics.fmean,
    "perplexity": lambda values: math.exp(-statistics.fmean(values)),
    "weighted_perplexity": lambda values: math.exp(-_per_weight(values)),
    "bits_per_byte": lambda values: -_per_weight(values) / math.log(2),
}
"""lm-eval's name of an aggregation → its formula (`lm_eval.api.metrics`)."""
