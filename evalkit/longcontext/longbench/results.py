"""LongBench's scores: a generations table → the score of every task, group and mean, their report and figures.

In: a generations table, one row for each (task, document) with columns `task`, `length`, `prediction`, `answers` and
`all_classes` (both JSON lists) and `truncated`. Scores are 100 times the mean over rows, rounded to two decimals, as
the official code prints them. Intervals are 95 % percentile bootstrap intervals over documents (rows with the same
`source`; over rows if the table has no such column) with a fixed seed. Those of means treat the tasks as fixed.
Comparisons of checkpoints need paired statistics.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from evalkit.benchmarks.answer_metrics import EditVariant
from evalkit.benchmarks.generated import about_run
from evalkit.display import doing
from evalkit.errors import DataError, reading_as
from evalkit.longcontext.longbench.official import score_prediction
from evalkit.longcontext.longbench.protocol import GROUPS, TASKS, SuiteName, Task, find_task, suite_tasks
from evalkit.reporting.figures import RunFigure, check_figure_path, line_look, new_figure, save_figure
from evalkit.reporting.numbers import PERCENTAGES, UNKNOWN
from evalkit.reporting.report import Report
from evalkit.reporting.table import filled_table
from evalkit.runs.folder import Run
from evalkit.runs.scales import PERCENT, Scale
from evalkit.stats.estimates import (
    Floats,
    error_of_average,
    error_of_mean,
    known_error,
    percentile_interval,
    resampled_means,
)
from evalkit.stats.estimates import mean as mean_of

if TYPE_CHECKING:
    import pandas as pd

GENERATIONS = "generations.parquet"
SOURCE = "source"
"""Column of the generations table with a hash of the context; equal for rows with the same document."""
BUCKETS: tuple[str, ...] = ("0-4k", "4-8k", "8k+")
"""LongBench-E's buckets by the stored length in words: below 4,000, below 8,000, and 8,000 or more."""
BANDS: tuple[str, ...] = ("<2k", "2-4k", "4-8k", "8-16k", "16k+")
"""Bands of the stored length in the figure. They include LongBench-E's bucket limits."""
_BUCKET_EDGES, _BAND_EDGES = (4000, 8000), (2000, 4000, 8000, 16000)
_SEED, _RESAMPLES = 20240, 2000
_MEAN = Scale("score", PERCENT)
"""Scale of a mean over tasks of several metrics."""
_METRICS = {
    "f1": "F1",
    "rouge_l": "ROUGE-L",
    "classification": "accuracy",
    "retrieval": "accuracy",
    "count": "accuracy",
    "edit_similarity": "edit sim.",
}


def score_generations(
    generations: pd.DataFrame,
    suite: SuiteName = "longbench",
    variant: EditVariant = "difflib",
    documents: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Score a generations table, with a variant of the edit similarity.

    Returns the scores as in results.json: `tasks` in the paper's order, `groups`, `mean_of_groups` (the average of the
    LongBench paper) and `plain_mean` (over tasks). Each has `all` and, for LongBench-E, `buckets` in the order of
    `BUCKETS`, with `n` rows; `value` in percent, rounded to two decimals, None without rows, also of a part of a
    mean; its standard error `stderr`, and `low` and `high`, the bounds of the interval, None for fewer than two
    documents and for equal scores. The name
    of a mean has "(2 of 3 tasks)" if tasks are missing. `official` is that of `documents`, a manifest's; None without
    them.
    """
    if generations.empty:
        raise DataError("there are no generations to score")
    rows_of = {find_task(str(name)): rows for name, rows in generations.groupby("task", sort=False)}
    tasks: dict[str, dict[str, Any]] = {}
    means: dict[str, Floats] = {}
    errors: dict[str, list[float | None]] = {}
    sizes_of: dict[str, list[int]] = {}
    for task in sorted(rows_of, key=list(TASKS.values()).index):
        rows = rows_of[task]
        with doing(f"scoring {task.name}"):
            scores = _score_rows(task, rows, variant)
        parts = [np.ones(len(rows), bool)]
        if suite == "longbench-e":
            buckets = np.searchsorted(_BUCKET_EDGES, rows["length"].to_numpy(), side="right")
            parts += [buckets == number for number in range(len(BUCKETS))]
        # Predictions of the official code have no column `source`
        sources = rows[SOURCE].to_numpy() if SOURCE in rows else np.arange(len(rows))
        means[task.name] = np.stack(
            [_resampled(task.name, number, scores[part], sources[part]) for number, part in enumerate(parts)]
        )
        errors[task.name] = [_error(scores[part], sources[part]) for part in parts]
        sizes_of[task.name] = [int(part.sum()) for part in parts]
        about = {"task": task.name, "group": task.group} | Scale(task.metric, PERCENT).entries
        truncated = int(rows["truncated"].astype(bool).sum())
        known = {"truncated": truncated, "official": documents[task.name]["official"] if documents else None}
        tasks[task.name] = about | _scores(sizes_of[task.name], means[task.name], errors[task.name]) | known

    def mean(name: str, members: Sequence[str], size: int, parts: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Return the unweighted mean over parts of the means of their tasks.

        It is that of rounded scores, which readers can recompute; NaN if a part has no rows.
        """
        sizes = np.sum([sizes_of[task] for task in members], axis=0)
        shown = name if len(members) == size else f"{name} ({len(members)} of {size} tasks)"
        of_parts = [np.mean([means[task] for task in part], axis=0) for part in parts]
        errors_of_parts = [map(error_of_average, zip(*(errors[task] for task in part), strict=True)) for part in parts]
        error = list(map(error_of_average, zip(*errors_of_parts, strict=True)))
        return {"name": shown} | _MEAN.entries | _scores(sizes.tolist(), np.mean(of_parts, axis=0), error)

    full = suite_tasks(suite)
    by_group = {group: [name for name in tasks if TASKS[name].group == group] for group in GROUPS}
    by_group = {group: members for group, members in by_group.items() if members}
    full_sizes = Counter(task.group for task in full)
    every = list(tasks)
    return {
        "suite": suite,
        "edit_similarity": variant,
        "tasks": list(tasks.values()),
        "groups": [mean(group, members, full_sizes[group], [members]) for group, members in by_group.items()],
        # A missing task changes its group's mean too, so tasks are counted and not groups
        "mean_of_groups": mean("Mean of groups", every, len(full), list(by_group.values())),
        "plain_mean": mean("Plain mean", every, len(full), [every]),
    }


def _score_rows(task: Task, rows: pd.DataFrame, variant: EditVariant) -> Floats:
    scores = np.empty(len(rows))
    columns = zip(rows["prediction"], rows["answers"], rows["all_classes"], strict=True)
    for number, (prediction, answers, classes) in enumerate(columns):
        with reading_as(f"generations of {task.name}, row {number + 1}", "a prediction", DataError):
            labels = json.loads(classes) or ()
            scores[number] = score_prediction(task, prediction, json.loads(answers), labels, variant)
    return scores


def _error(scores: Floats, sources: np.ndarray) -> float | None:
    """Return the standard error of the mean in percent, over documents; None if it is not known."""
    return (
        known_error(100 * mean_of(scores, np.unique(sources, return_inverse=True)[1]).stderr) if len(scores) else None
    )


def _resampled(task: str, part: int, scores: Floats, sources: np.ndarray) -> Floats:
    """Return [1 + resamples] the rounded mean in percent and resampled means, by document; NaN what does not exist."""
    import pandas as pd

    means = np.full(1 + _RESAMPLES, nan)
    if len(scores):
        means[0] = round(100 * float(np.mean(scores)), 2)
        codes, names = pd.factorize(sources)
        if len(names) > 1:
            # Seeded by task, so that its interval does not depend on the other tasks in the table
            means[1:] = resampled_means(scores, codes, _RESAMPLES, [_SEED, crc32(task.encode()), part], 100)
    return means


def _scores(sizes: Sequence[int], means: Floats, errors: Sequence[float | None]) -> dict[str, Any]:
    """Return the scores of all rows and of each bucket from their means, [parts, 1 + resamples], and errors."""
    parts = []
    for n, part, error in zip(sizes, means, errors, strict=True):
        numbers = (float(part[0]), *percentile_interval(part[1:]))
        value, low, high = (None if isnan(number) else round(number, 2) for number in numbers)
        if np.ptp(part[1:]) < 1e-9:  # resampling equal scores says nothing of the next document's
            low = high = None
        stderr = None if error is None else round(error, 4)
        parts.append({"n": n, "value": value, "stderr": stderr, "low": low, "high": high})
    return {"all": parts[0], "buckets": parts[1:]}


def report_of(run: Run, variant: EditVariant = "difflib") -> Report:
    suite: Any = run.suite
    results = score_generations(run.table(GENERATIONS), suite, variant, run.manifest["documents"])
    return longbench_report(results, about_run(run), {"run": run.manifest["id"], "folder": str(run.folder)})


def longbench_report(
    results: Mapping[str, Any], notes: Sequence[str] = (), about: Mapping[str, Any] | None = None
) -> Report:
    """Return the report of LongBench's results, with lines after the table, and entries about their run for JSON."""
    buckets = BUCKETS if results["suite"] == "longbench-e" else ()
    tasks, groups = ([_record(kind, scored, results) for scored in results[f"{kind}s"]] for kind in ("task", "group"))
    means = [_record("mean", results[name], results) for name in ("mean_of_groups", "plain_mean")]
    lines: list[dict[str, Any]] = []
    for group in groups:
        members = [task for task in tasks if group["name"].startswith(task["group"])]
        lines += members + ([group] if len(members) > 1 else [])
    truncated = any(task["truncated"] for task in tasks)
    cells = []
    for line in lines + means:
        name = TASKS[line["name"]].label if line["kind"] == "task" else line["name"]
        bounds = [PERCENTAGES.value(line[bound]) for bound in ("low", "high")]
        interval = UNKNOWN if line["low"] is None else " to ".join(bounds)
        row = [name + "*" * (line["official"] is False), _METRICS.get(line["metric"], ""), f"{line['n']:,}"]
        of_buckets = [PERCENTAGES.value(line[f"value_{bucket}"]) for bucket in buckets]
        row += [PERCENTAGES.value(line["value"]), PERCENTAGES.error(line["stderr"]), interval, *of_buckets]
        cells.append([*row, str(line["truncated"] or "")])
    headers = ["task", "metric", "n", "score", "± SE", "95 % interval", *buckets, "cut"]
    footnotes = {
        "Mean of groups: of the six groups' means (the paper's average). Plain mean: of the tasks.": True,
        "Buckets: by the stored length in words, below 4,000, below 8,000, and from there on": bool(buckets),
        "–: unknown, of a single document or scores that are all equal": any(line["low"] is None for line in lines),
        f"edit sim.: {results['edit_similarity']}": any(task["variant"] for task in tasks),
        "cut: documents truncated in the middle, since their prompts were too long": truncated,
    }
    return Report(
        (filled_table(results["suite"], headers, cells, texts=2, ruled={len(cells) - 2}),),
        notes=(*(note for note, applies in footnotes.items() if applies), *notes),
        content=dict(about or {}) | dict(results) | {"notes": list(notes)},
        records=tasks + groups + means,
    )


def _record(kind: str, scored: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a task, group or mean, with the numbers of all rows and of each bucket."""
    variant = results["edit_similarity"] if scored["metric"] == "edit_similarity" else None
    record = {"kind": kind, "name": scored["task" if kind == "task" else "name"]}
    record |= {"group": scored.get("group"), "metric": scored["metric"], "variant": variant}
    record |= {name: scored[name] for name in ("unit", "higher_is_better")} | scored["all"]
    for bucket, part in zip(BUCKETS, scored["buckets"], strict=False):
        record |= {f"{name}_{bucket}": number for name, number in part.items()}
    return record | {"truncated": scored.get("truncated"), "official": scored.get("official")}


def scores_by_length(
    generations: pd.DataFrame, variant: EditVariant = "difflib"
) -> dict[str, list[tuple[int, float, float | None]]]:
    """Return task → (index in `BANDS`, mean score in percent, standard error) of each band with rows.

    The error is None for a single row.
    """
    if generations["length"].isna().any():
        raise DataError("scores by length: some predictions have no field 'length'; leave out --plot")
    points = {}
    for name, rows in generations.groupby("task", sort=False):
        scores = 100 * _score_rows(TASKS[str(name)], rows, variant)
        bands = np.searchsorted(_BAND_EDGES, rows["length"].to_numpy(), side="right")
        parts = [(band, scores[bands == band]) for band in np.unique(bands).tolist()]
        points[str(name)] = [(band, float(part.mean()), error_of_mean(part)) for band, part in parts]
    return points


def run_figures(runs: Sequence[Run], names: Sequence[str], models: Sequence[str]) -> list[RunFigure]:
    figures = []
    for run, name in zip(runs, names, strict=True):
        words = f"Scores of the tasks of {run.suite} by the length of their documents, with standard errors: {name}."
        draw = partial(draw_by_length, run.table(GENERATIONS))
        figures.append(RunFigure(f"lengths-{run.manifest['id']}", words, draw))
    return figures


def draw_by_length(generations: pd.DataFrame, path: Path, variant: EditVariant = "difflib") -> None:
    """Draw each task's score by the stored length of its rows, one panel for each group of tasks."""
    check_figure_path(path)
    points = scores_by_length(generations, variant)
    groups = [group for group in GROUPS if any(TASKS[name].group == group for name in points)]
    columns = min(3, len(groups))
    rows = -(-len(groups) // columns)
    figure = new_figure(3.4 * columns, 2.9 * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex=True).flat)
    for axes in panels[len(groups) :]:
        axes.axis("off")
    for number, (axes, group) in enumerate(zip(panels, groups, strict=False)):
        members = [name for name in TASKS if TASKS[name].group == group]
        drawn = [name for name in members if name in points]
        for line, name in enumerate(drawn):
            bands, means, errors = zip(*points[name], strict=True)
            offset = 0.1 * (line - (len(drawn) - 1) / 2)  # so that error bars do not overlap
            positions, halves = [band + offset for band in bands], [error or 0.0 for error in errors]
            look = line_look(members.index(name))
            axes.errorbar(positions, means, halves, ms=4, lw=1.4, capsize=2, label=TASKS[name].label, **look)
        axes.set_title(group, fontsize=10)
        axes.set_xticks(range(len(BANDS)), BANDS)
        axes.set_xlim(-0.4, len(BANDS) - 0.6)
        axes.set_ylim(-2, 102)
        axes.grid(axis="y", color="#dddddd", lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
        if number % columns == 0:
            axes.set_ylabel("score")
        if number + columns >= len(groups):
            axes.set_xlabel("length in words")
            axes.tick_params(labelbottom=True)
    save_figure(figure, path)
