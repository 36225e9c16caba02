"""Report of LongBench's results, and the figure of scores by length. A score without rows is printed as a dash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from evalkit.benchmarks.generated import about_run
from evalkit.benchmarks.longbench.metrics import EditVariant
from evalkit.benchmarks.longbench.protocol import GROUPS, LABELS, TASKS
from evalkit.benchmarks.longbench.scores import (
    BUCKETS,
    LongBenchResults,
    Mean,
    TaskScore,
    load_generations,
    results_of,
    score_rows,
)
from evalkit.errors import DataError
from evalkit.reporting.decimals import fixed
from evalkit.reporting.figures import RunFigure, check_figure_path, line_look, new_figure, save_figure
from evalkit.reporting.formats import Record
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.folder import Run
from evalkit.stats.estimates import error_of_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRICS = {
    "f1": "F1",
    "rouge_l": "ROUGE-L",
    "classification": "accuracy",
    "retrieval": "accuracy",
    "count": "accuracy",
    "edit_similarity": "edit sim.",
}
BANDS: tuple[str, ...] = ("<2k", "2-4k", "4-8k", "8-16k", "16k+")
"""Bands of the stored length: words of document and question. They include LongBench-E's bucket limits."""
_EDGES = (2000, 4000, 8000, 16000)


def report_of(run: Run, variant: EditVariant = "difflib") -> Report:
    """Return the report of a finished LongBench run, from its stored predictions."""
    about = {"run": run.manifest["id"], "folder": str(run.folder)}
    return longbench_report(results_of(run, variant), about_run(run), about)


def longbench_report(
    results: LongBenchResults, notes: Sequence[str] = (), about: Mapping[str, Any] | None = None
) -> Report:
    """Return the report of LongBench's results, with lines after the table, and entries about their run for JSON."""
    buckets = BUCKETS if results.suite == "longbench-e" else ()
    variants = {"edit_similarity": results.edit_similarity}
    tasks = [
        _record("task", t.task, t, buckets, group=t.group, metric=t.metric, variant=variants.get(t.metric))
        for t in results.tasks
    ]
    groups = [_record("group", mean.name, mean, buckets) for mean in results.groups]
    means = [_record("mean", mean.name, mean, buckets) for mean in (results.mean_of_groups, results.plain_mean)]
    truncated = any(task.truncated for task in results.tasks)
    lines: list[Record] = []
    for group in groups:
        members = [task for task in tasks if group["name"].startswith(task["group"])]
        lines += members + ([group] if len(members) > 1 else [])
    cells = []
    for line in lines + means:
        name = LABELS.get(line["name"], str(line["name"])) + "*" * (line["official"] is False)
        interval = "–" if line["low"] is None else f"{fixed(line['low'], 2)} to {fixed(line['high'], 2)}"
        row = [name, METRICS.get(line["metric"], ""), f"{line['n']:,}", fixed(line["score"], 2), interval]
        row += [fixed(line[f"score_{bucket}"], 2) for bucket in buckets]
        cells.append(row + ([str(line["truncated"] or "")] if truncated else []))
    headers = ["task", "metric", "n", "score", "95 % interval", *buckets, *(["cut"] if truncated else [])]
    return Report(
        (simple_table(results.suite, headers, cells, texts=2, ruled={len(cells) - 2}),),
        notes=(*_footnotes(results, truncated), *notes),
        content=dict(about or {}) | asdict(results) | {"notes": list(notes)},
        records=tasks + groups + means,
    )


def _record(kind: str, name: str, part: TaskScore | Mean, buckets: Sequence[str], **about: Any) -> Record:
    """Return the record of a task, group or mean, with unrounded numbers of all rows and of each bucket."""
    suffixes = ["", *(f"_{bucket}" for bucket in buckets)]
    numbers = {
        f"{field}{suffix}": getattr(score, field)
        for suffix, score in zip(suffixes, (part.all, *part.buckets), strict=True)
        for field in ("n", "score", "low", "high")
    }
    known = {"truncated": getattr(part, "truncated", None), "official": getattr(part, "official", None)}
    return {"kind": kind, "name": name, "group": None, "metric": None, "variant": None} | about | numbers | known


def _footnotes(results: LongBenchResults, truncated: bool) -> list[str]:
    lines = ["Mean of groups: of the six groups' means (the paper's average). Plain mean: of the tasks."]
    if results.suite == "longbench-e":
        lines.append("Buckets: by the stored length in words, below 4,000, below 8,000, and from there on")
    if any(task.metric == "edit_similarity" for task in results.tasks):
        lines.append(f"edit sim.: {results.edit_similarity}")
    if truncated:
        lines.append("cut: documents truncated in the middle, since their prompts were too long")
    if any(task.official is False for task in results.tasks):
        lines.append("*: not the official documents of the task")
    return lines


class BandScore(NamedTuple):
    """The score of one task in one band."""

    task: str
    band: str
    n: int
    score: float
    """Mean, in percent."""
    stderr: float | None
    """Standard error of the mean, in percent; None for a single row."""


def scores_by_length(generations: pd.DataFrame, variant: EditVariant = "difflib") -> tuple[BandScore, ...]:
    """Return mean scores by task and band, tasks in the paper's order; bands without rows are omitted."""
    if generations["length"].isna().any():
        raise DataError("scores by length: some predictions have no field 'length'; leave out --plot")
    bands: list[BandScore] = []
    for name, task in TASKS.items():
        rows = generations[generations["task"] == name]
        scores = 100 * score_rows(task, rows, variant)
        numbers = np.searchsorted(_EDGES, rows["length"].to_numpy(), side="right")
        for number, band in enumerate(BANDS):
            part = scores[numbers == number]
            if n := len(part):
                bands.append(BandScore(name, band, n, float(part.mean()), error_of_mean(part)))
    return tuple(bands)


def run_figures(runs: Sequence[Run], names: Sequence[str]) -> list[RunFigure]:
    """Return the scores by length of each run whose documents have lengths."""
    tables = ((run, name, load_generations(run)) for run, name in zip(runs, names, strict=True))
    return [
        RunFigure(
            f"lengths-{run.manifest['id']}",
            f"Scores of the tasks of {run.suite} by the length of their documents, with standard errors: {name}.",
            partial(draw_by_length, table),
        )
        for run, name, table in tables
        if "length" in table and table["length"].notna().all()
    ]


def draw_by_length(generations: pd.DataFrame, path: Path, variant: EditVariant = "difflib") -> None:
    """Draw each task's score by the stored length of its rows, one panel for each group of tasks."""
    check_figure_path(path)
    bands = scores_by_length(generations, variant)
    present = [group for group in GROUPS if any(TASKS[band.task].group == group for band in bands)]
    columns = min(3, len(present))
    rows = -(-len(present) // columns)
    figure = new_figure(3.4 * columns, 2.9 * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex=True).flat)
    for axes in panels[len(present) :]:
        axes.axis("off")
    for number, (axes, group) in enumerate(zip(panels, present, strict=False)):
        _draw_group(axes, group, bands)
        if number % columns == 0:
            axes.set_ylabel("score")
        if number + columns >= len(present):
            axes.set_xlabel("length in words")
            axes.tick_params(labelbottom=True)
    save_figure(figure, path)


def _draw_group(axes: Axes, group: str, bands: Sequence[BandScore]) -> None:
    """Draw the scores of a group's tasks by length, with standard errors."""
    axes.set_title(group, fontsize=10)
    looks = {name: line_look(place) for place, name in enumerate(t for t in TASKS if TASKS[t].group == group)}
    drawn = list(dict.fromkeys(band.task for band in bands if band.task in looks))
    for place, name in enumerate(drawn):
        points = [band for band in bands if band.task == name]
        offset = 0.1 * (place - (len(drawn) - 1) / 2)  # so that error bars do not overlap
        positions = [BANDS.index(point.band) + offset for point in points]
        means, errors = [point.score for point in points], [point.stderr or 0.0 for point in points]
        axes.errorbar(positions, means, errors, ms=4, lw=1.4, capsize=2, label=LABELS[name], **looks[name])
    axes.set_xticks(range(len(BANDS)), BANDS)
    axes.set_xlim(-0.4, len(BANDS) - 0.6)
    axes.set_ylim(-2, 102)
    axes.grid(axis="y", color="#dddddd", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
