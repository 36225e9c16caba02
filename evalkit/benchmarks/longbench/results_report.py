"""Report of LongBench's results.

In: `LongBenchResults`. Out: a `Report`. A score without rows is printed as a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evalkit.benchmarks.longbench.protocol import LABELS
from evalkit.benchmarks.longbench.scores import BUCKETS, LongBenchResults, Mean, Score, TaskScore
from evalkit.reporting.decimals import fixed
from evalkit.reporting.formats import Record
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table

METRICS = {
    "f1": "F1",
    "rouge_l": "ROUGE-L",
    "classification": "accuracy",
    "retrieval": "accuracy",
    "count": "accuracy",
    "edit_similarity": "edit sim.",
}


def longbench_report(
    results: LongBenchResults, notes: Sequence[str] = (), about: Mapping[str, Any] | None = None
) -> Report:
    """Return the report of LongBench's results.

    Args:
        results: the results.
        notes: lines printed after the table.
        about: entries about the run for JSON, if there is a run.
    """
    cells = _cells(results)
    table = simple_table(results.suite, _headers(results), cells, texts=2, ruled={len(cells) - 2})
    return Report(
        (table,),
        notes=(*_footnotes(results), *notes),
        content=dict(about or {}) | results.to_json() | {"notes": list(notes)},
        records=_records(results),
    )


@dataclass(frozen=True)
class _Line:
    """A line of the table: a task, a group's mean or an overall mean."""

    name: str
    metric: str
    scores: tuple[Score, ...]
    """Of all rows, then of each bucket."""
    truncated: int | None


def _lines(results: LongBenchResults) -> list[_Line]:
    """Return tasks by group, the mean of each group with several tasks, then the overall means."""
    lines: list[_Line] = []
    for group in results.groups:
        members = [task for task in results.tasks if group.name.startswith(task.group)]
        lines += [_task_line(task) for task in members]
        if len(members) > 1:
            lines.append(_mean_line(group))
    return [*lines, _mean_line(results.mean_of_groups), _mean_line(results.plain_mean)]


def _task_line(task: TaskScore) -> _Line:
    name = LABELS[task.task] + ("*" if task.official is False else "")
    return _Line(name, METRICS[task.metric], (task.all, *task.buckets), task.truncated)


def _mean_line(mean: Mean) -> _Line:
    return _Line(mean.name, "", (mean.all, *mean.buckets), None)


def _headers(results: LongBenchResults) -> list[str]:
    buckets = list(BUCKETS) if results.suite == "longbench-e" else []
    return ["task", "metric", "n", "score", "95 % interval", *buckets, *(["cut"] if _any_truncated(results) else [])]


def _cells(results: LongBenchResults) -> list[list[str]]:
    cells = []
    for line in _lines(results):
        overall, *buckets = line.scores
        interval = "–" if overall.low is None else f"{_score(overall.low)} to {_score(overall.high)}"
        row = [line.name, line.metric, f"{overall.n:,}", _score(overall.score), interval]
        row += [_score(part.score) for part in buckets]
        cells.append(row + ([str(line.truncated or "")] if _any_truncated(results) else []))
    return cells


def _footnotes(results: LongBenchResults) -> list[str]:
    lines = ["Mean of groups: of the six groups' means (the paper's average). Plain mean: of the tasks."]
    if results.suite == "longbench-e":
        lines.append("Buckets: by the stored length in words, below 4,000, below 8,000, and from there on")
    if any(task.metric == "edit_similarity" for task in results.tasks):
        lines.append(f"edit sim.: {results.edit_similarity}")
    if _any_truncated(results):
        lines.append("cut: documents truncated in the middle, since their prompts were too long")
    if any(task.official is False for task in results.tasks):
        lines.append("*: not the official documents of the task")
    return lines


def _records(results: LongBenchResults) -> list[Record]:
    """Return a record for each task, group and mean, with unrounded numbers."""
    buckets = BUCKETS if results.suite == "longbench-e" else ()

    def record(about: Record, scores: Sequence[Score], truncated: int | None, official: bool | None) -> Record:
        names = ["", *(f"_{bucket}" for bucket in buckets)]
        numbers = {
            f"{field}{name}": getattr(score, field)
            for name, score in zip(names, scores, strict=True)
            for field in ("n", "score", "low", "high")
        }
        return {**about, **numbers, "truncated": truncated, "official": official}

    records = []
    for task in results.tasks:
        variant = results.edit_similarity if task.metric == "edit_similarity" else None
        about = {"kind": "task", "name": task.task, "group": task.group, "metric": task.metric, "variant": variant}
        records.append(record(about, (task.all, *task.buckets), task.truncated, task.official))
    means = [
        *(("group", group) for group in results.groups),
        ("mean", results.mean_of_groups),
        ("mean", results.plain_mean),
    ]
    for kind, mean in means:
        about = {"kind": kind, "name": mean.name, "group": None, "metric": None, "variant": None}
        records.append(record(about, (mean.all, *mean.buckets), None, None))
    return records


def _any_truncated(results: LongBenchResults) -> bool:
    return any(task.truncated for task in results.tasks)


def _score(value: float | None) -> str:
    return fixed(value, 2)
