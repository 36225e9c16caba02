"""LongBench's generations table and its scores.

In: the generations table, one row for each (task, document) with columns `task`, `length`, `prediction`, `answers` and
`all_classes` (both JSON lists) and `truncated`. Out: the score of every task, group and mean, each with an interval.

Scores are 100 times the mean over rows, rounded to two decimals, as the official code prints them. Intervals are 95 %
percentile bootstrap intervals over documents (rows with the same `source`; over rows if the table has no such column)
with a fixed seed. Those of means treat the tasks as fixed. Comparisons of checkpoints need paired statistics.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import isnan, nan
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import pandas as pd

from evalkit.benchmarks.longbench.benchmark import GENERATIONS
from evalkit.benchmarks.longbench.metrics import EditVariant, score_prediction
from evalkit.benchmarks.longbench.protocol import GROUPS, TASKS, SuiteName, Task, find_task, suite_tasks
from evalkit.benchmarks.outcomes import GradedAnswers, Measure
from evalkit.display import doing
from evalkit.errors import DataError, RunError
from evalkit.runs.folder import LONGBENCH, Run
from evalkit.runs.traits import max_prompt_tokens
from evalkit.stats.estimates import percentile_interval, resampled_means

if TYPE_CHECKING:
    from evalkit.benchmarks.generated import DocumentPlan, GeneratedAnswer
    from evalkit.benchmarks.longbench.data import LongBenchDocument
    from evalkit.runs.writing import RunWriter

SOURCE = "source"
"""Column of the generations table with a hash of the context; equal for rows with the same document."""
BUCKETS: tuple[str, ...] = ("0-4k", "4-8k", "8k+")
"""LongBench-E's buckets by the stored length in words: below 4,000, below 8,000, and 8,000 or more."""

MEAN_OF_GROUPS, PLAIN_MEAN = "Mean of groups", "Plain mean"

_EDGES = (4000, 8000)
_SEED, _RESAMPLES = 20240, 2000


@dataclass(frozen=True)
class Score:
    """A mean score over rows, in percent, with its interval."""

    n: int
    """Number of rows; for a mean over tasks, of all its tasks."""
    score: float | None
    """Rounded to two decimals; None without rows, and for a mean if one of its tasks has no rows."""
    low: float | None
    high: float | None
    """Bounds of the 95 % interval, clustered by document; None for fewer than two documents."""


@dataclass(frozen=True)
class TaskScore:
    """The scores of one task."""

    task: str
    group: str
    metric: str
    all: Score
    """Score of all its rows."""
    buckets: tuple[Score, ...]
    """Scores in the order of `BUCKETS`; empty for LongBench, which has no buckets."""
    truncated: int
    """Number of rows whose prompt was truncated."""
    official: bool | None
    """Whether the documents are the official ones; None if unknown."""


@dataclass(frozen=True)
class Mean:
    """An unweighted mean of tasks or of groups."""

    name: str
    """A group's name, `MEAN_OF_GROUPS` or `PLAIN_MEAN`; with "(2 of 3 tasks)" if tasks are missing."""
    all: Score
    buckets: tuple[Score, ...]


@dataclass(frozen=True)
class LongBenchResults:
    """All scores of a generations table."""

    suite: SuiteName
    edit_similarity: EditVariant
    """The variant used for code completion."""
    tasks: tuple[TaskScore, ...]
    """In the paper's order."""
    groups: tuple[Mean, ...]
    mean_of_groups: Mean
    """The average of the LongBench paper and its README."""
    plain_mean: Mean
    """The mean over tasks, which some papers report instead."""


def save_generations(plan: DocumentPlan, answers: Mapping[str, Sequence[GeneratedAnswer]], writer: RunWriter) -> None:
    """Write the generations table, a row for each document in the order of tasks and files, and the results."""
    parts = []
    for task, documents in plan.tasks.items():
        pairs = zip(documents, answers[task], strict=True)
        part = pd.DataFrame([_table_row(row, answer) for row, answer in pairs])
        part["score"] = score_rows(TASKS[task], part)
        parts.append(part)
    table = pd.concat(parts, ignore_index=True)
    writer.save_table(GENERATIONS, table)
    results = score_generations(table, plan.request.suite, "difflib", _official(plan.manifest))
    averages = [
        {"name": mean.name, "accuracy": (mean.all.score or 0.0) / 100, "stderr": None}
        for mean in (results.plain_mean, results.mean_of_groups)
    ]
    writer.save_results(asdict(results) | {"averages": averages})


def _table_row(row: LongBenchDocument, answer: GeneratedAnswer) -> dict[str, Any]:
    return {
        "task": row.task,
        "index": row.index,
        **{"prediction" if name == "text" else name: value for name, value in answer._asdict().items()},
        "length": row.length,
        # Rows with several questions on one document are not independent
        SOURCE: hashlib.sha256(row.context.encode()).hexdigest()[:16],
        "answers": json.dumps(row.answers, ensure_ascii=False),
        "all_classes": json.dumps(row.all_classes, ensure_ascii=False),
    }


def _official(manifest: Mapping[str, Any]) -> dict[str, bool]:
    return {task: about["official"] for task, about in manifest["documents"].items()}


def load_generations(run: Run, columns: Collection[str] = ("task", "id")) -> pd.DataFrame:
    """Return the generations table of a finished LongBench run; `columns` have to be in it."""
    if run.kind != LONGBENCH:
        raise RunError(f"{run.folder} is not a LongBench run")
    return run.table(GENERATIONS, columns)


def results_of(run: Run, variant: EditVariant = "difflib") -> LongBenchResults:
    """Return the scores of a finished LongBench run, from its stored predictions."""
    columns = ("task", "id", "prediction", "answers", "all_classes", "length", "truncated")
    return score_generations(
        load_generations(run, columns), run.manifest["specification"]["suite"], variant, _official(run.manifest)
    )


class LongBenchAnswers(GradedAnswers):
    """The scores of a LongBench run by document, for comparison."""

    def __init__(self, run: Run) -> None:
        tasks = suite_tasks(run.suite)
        groups = {group: [task.name for task in tasks if task.group == group] for group in GROUPS}
        load = partial(load_generations, run, ("task", "id", "answers", "score", SOURCE))
        description = (
            "LongBench's own score of each task (F1, ROUGE-L, accuracy, edit similarity) in %, averaged over tasks"
        )
        super().__init__(run, load, ("answers",), groups, {LONGBENCH: Measure(description, True)})

    def must_agree(self, task: str) -> dict[str, str]:
        # Truncation at another length makes another prompt
        return {"prompt tokens": str(max_prompt_tokens(self.run.manifest["specification"]))} | super().must_agree(task)


def score_generations(
    generations: pd.DataFrame,
    suite: SuiteName = "longbench",
    variant: EditVariant = "difflib",
    official: Mapping[str, bool] | None = None,
) -> LongBenchResults:
    """Score a generations table.

    Args:
        generations: the generations table, see the module.
        suite: the benchmark; LongBench-E has scores by length too.
        variant: of the edit similarity.
        official: task → whether its documents are the official ones; unknown for missing tasks.
    """
    if generations.empty:
        raise DataError("there are no generations to score")
    known = {str(name): rows for name, rows in generations.groupby("task", sort=False)}
    tasks: dict[str, TaskScore] = {}
    means: dict[str, np.ndarray] = {}
    for task in sorted((find_task(name) for name in known), key=list(TASKS.values()).index):
        rows = known[task.name]
        with doing(f"scoring {task.name}"):
            scores = score_rows(task, rows, variant)
        masks = [np.ones(len(scores), bool)]
        if suite == "longbench-e":
            buckets = bucket(rows["length"].to_numpy())
            masks += [buckets == number for number in range(len(BUCKETS))]
        # Predictions of the official code have no column `source`
        sources = rows[SOURCE].to_numpy() if SOURCE in rows else np.arange(len(rows))
        means[task.name] = np.stack(
            [_means(task.name, part, scores[mask], sources[mask]) for part, mask in enumerate(masks)]
        )
        overall, *by_length = _scores([int(mask.sum()) for mask in masks], means[task.name])
        truncated = int(rows["truncated"].astype(bool).sum())
        known_official = (official or {}).get(task.name)
        tasks[task.name] = TaskScore(
            task.name, task.group, task.metric, overall, tuple(by_length), truncated, known_official
        )
    full = suite_tasks(suite)
    members = {name: [task for task in tasks if tasks[task].group == name] for name in GROUPS}
    members = {name: names for name, names in members.items() if names}
    by_group = {name: np.mean([means[task] for task in names], axis=0) for name, names in members.items()}

    def mean(name: str, names: Collection[str], parts: Collection[np.ndarray], size: int) -> Mean:
        """Return the unweighted mean of rounded scores, which readers can recompute; NaN if a part has no rows."""
        sizes = [sum(column) for column in zip(*(_sizes(tasks[task]) for task in names), strict=True)]
        overall, *buckets = _scores(sizes, np.mean(list(parts), axis=0))
        return Mean(name if len(names) == size else f"{name} ({len(names)} of {size} tasks)", overall, tuple(buckets))

    return LongBenchResults(
        suite=suite,
        edit_similarity=variant,
        tasks=tuple(tasks.values()),
        groups=tuple(
            mean(name, names, [by_group[name]], sum(task.group == name for task in full))
            for name, names in members.items()
        ),
        # A missing task changes its group's mean too, so tasks are counted and not groups
        mean_of_groups=mean(MEAN_OF_GROUPS, tasks, by_group.values(), len(full)),
        plain_mean=mean(PLAIN_MEAN, tasks, means.values(), len(full)),
    )


def score_rows(task: Task, rows: pd.DataFrame, variant: EditVariant = "difflib") -> np.ndarray:
    """Return the score of each row, from 0 to 1, in the table's order."""
    scores = np.empty(len(rows))
    columns = zip(rows["prediction"], rows["answers"], rows["all_classes"], strict=True)
    for number, (prediction, answers, classes) in enumerate(columns):
        try:
            scores[number] = score_prediction(
                task, prediction, json.loads(answers), (json.loads(classes) if classes else None) or (), variant
            )
        except (DataError, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"generations of {task.name}, row {number + 1} cannot be scored: {error}") from error
    return scores


def bucket(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the index of LongBench-E's bucket for each stored length, from 0."""
    return np.searchsorted(_EDGES, np.asarray(lengths), side="right")


def _means(task: str, part: int, scores: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """Return [1 + resamples] the rounded mean in percent and resampled means, whole documents at a time.

    NaN without rows; without an interval, for a single document, all but the first are NaN.
    """
    means = np.full(1 + _RESAMPLES, nan)
    if len(scores):
        means[0] = round(100 * float(np.mean(scores)), 2)
        codes, names = pd.factorize(sources)
        if len(names) > 1:
            # Seeded by task, so that its interval does not depend on the other tasks in the table
            means[1:] = resampled_means(scores, codes, _RESAMPLES, [_SEED, crc32(task.encode()), part], 100)
    return means


def _scores(sizes: Sequence[int], means: np.ndarray) -> list[Score]:
    """Return the scores of all rows and of each bucket from their means, [parts, 1 + resamples]."""
    scores = []
    for n, part in zip(sizes, means, strict=True):
        numbers = (float(part[0]), *percentile_interval(part[1:]))
        scores.append(Score(n, *(None if isnan(number) else round(number, 2) for number in numbers)))
    return scores


def _sizes(task: TaskScore) -> list[int]:
    return [score.n for score in (task.all, *task.buckets)]
