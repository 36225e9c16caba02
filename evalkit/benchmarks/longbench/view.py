"""LongBench's results as a person reads them: on a terminal, in Markdown and LaTeX, as JSON and CSV.

In: results. Out: text. What has no rows is a dash.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from evalkit.benchmarks.longbench.protocol import LABELS
from evalkit.benchmarks.longbench.scores import BUCKETS, LongBenchResults, Mean, Score, TaskScore
from evalkit.reporting.escape import in_csv
from evalkit.reporting.page import PAGES, Page, Table

Form = Literal["terminal", "markdown", "latex", "json", "csv"]
FORMS: tuple[Form, ...] = ("terminal", "markdown", "latex", "json", "csv")

METRICS = {
    "f1": "F1",
    "rouge_l": "ROUGE-L",
    "classification": "accuracy",
    "retrieval": "accuracy",
    "count": "accuracy",
    "edit_similarity": "edit sim.",
}

_DASH = "–"


def render(results: LongBenchResults, form: Form = "terminal", notes: Sequence[str] = ()) -> str:
    """The results in one of the forms.

    Args:
        results: what to show.
        form: one of `FORMS`.
        notes: lines for the reader, after the table; in LaTeX comments, in JSON a field, in CSV left out.
    """
    if form == "json":
        return json.dumps(results.to_json() | {"notes": list(notes)}, indent=2, ensure_ascii=False)
    if form == "csv":
        return _csv(results)
    table = Table(tuple(_headers(results)), tuple(map(tuple, _cells(results))))
    return PAGES[form](Page((), (), (table,), (*_explained(results), *notes)))


@dataclass(frozen=True)
class _Line:
    """A line of the table: a task, a group's mean or a mean of all."""

    name: str
    metric: str
    scores: tuple[Score, ...]
    """Over all rows, then of each bucket."""
    truncated: int | None


def _lines(results: LongBenchResults) -> list[_Line]:
    """Tasks by group, each group of several with its mean, then the means over everything."""
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
    return ["task", "metric", "n", "score", "95 % interval", *buckets, *(["cut"] if _any_cut(results) else [])]


def _cells(results: LongBenchResults) -> list[list[str]]:
    cells = []
    for line in _lines(results):
        overall, *buckets = line.scores
        interval = _DASH if overall.low is None else f"{_number(overall.low)} to {_number(overall.high)}"
        row = [line.name, line.metric, str(overall.n), _number(overall.score), interval]
        row += [_number(part.score) for part in buckets]
        cells.append(row + ([str(line.truncated or "")] if _any_cut(results) else []))
    return cells


def _explained(results: LongBenchResults) -> list[str]:
    lines = ["Mean of groups: of the six groups' means (the paper's average). Plain mean: of the tasks."]
    if results.suite == "longbench-e":
        lines.append("Buckets: by the stored length in words, below 4,000, below 8,000, and from there on")
    if any(task.metric == "edit_similarity" for task in results.tasks):
        lines.append(f"edit sim.: {results.edit_similarity}")
    if _any_cut(results):
        lines.append("cut: documents that lost their middle to fit the window")
    if any(task.official is False for task in results.tasks):
        lines.append("*: not the official documents of the task")
    return lines


def _csv(results: LongBenchResults) -> str:
    buckets = BUCKETS if results.suite == "longbench-e" else ()
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    fields = ["n", "score", "low", "high"]
    per_bucket = [f"{field}_{name}" for name in buckets for field in fields]
    writer.writerow(["kind", "name", "group", "metric", "variant", *fields, *per_bucket, "truncated", "official"])
    for task in results.tasks:
        scores = _flat((task.all, *task.buckets))
        variant = results.edit_similarity if task.metric == "edit_similarity" else ""
        about = ["task", task.task, task.group, task.metric, variant]
        official = "" if task.official is None else task.official
        writer.writerow(map(in_csv, [*about, *scores, task.truncated, official]))
    for kind, mean in [*(("group", group) for group in results.groups), ("mean", results.mean_of_groups),
                       ("mean", results.plain_mean)]:  # fmt: skip
        writer.writerow(map(in_csv, [kind, mean.name, "", "", "", *_flat((mean.all, *mean.buckets)), "", ""]))
    return out.getvalue().rstrip("\n")


def _flat(scores: Sequence[Score]) -> list[str]:
    values = [value for score in scores for value in (score.n, score.score, score.low, score.high)]
    return ["" if value is None else str(value) for value in values]


def _any_cut(results: LongBenchResults) -> bool:
    return any(task.truncated for task in results.tasks)


def _number(value: float | None) -> str:
    return _DASH if value is None else f"{value:.2f}"
