"""LongBench's generations table and its scores.

In: the generations table, one row for each (task, document) with columns `task`, `length`, `prediction`, `answers` and
`all_classes` (both JSON lists) and `truncated`. Out: frozen records with the score of every task, group and mean, each
with an interval. No model is needed: a stored table is scored again in seconds.

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
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np
import pandas as pd

from evalkit.benchmarks.longbench import GENERATIONS
from evalkit.benchmarks.longbench.metrics import EditVariant, score_prediction
from evalkit.benchmarks.longbench.protocol import GROUPS, TASKS, SuiteName, Task, find_task, suite_tasks
from evalkit.benchmarks.outcomes import GradedAnswers, Measure
from evalkit.display import doing
from evalkit.errors import DataError, RunError
from evalkit.runs.folder import LONGBENCH, Run
from evalkit.runs.traits import max_prompt_tokens
from evalkit.stats.estimates import percentile_interval, resampled_means

if TYPE_CHECKING:
    from evalkit.benchmarks.generated import GeneratedAnswer
    from evalkit.benchmarks.longbench.data import LongBenchDocument
    from evalkit.benchmarks.longbench.plan import LongBenchPlan
    from evalkit.runs.writing import RunWriter

SOURCE = "source"
"""Column of the generations table with a hash of the context; equal for rows with the same document."""
_READ = ("task", "id", "prediction", "answers", "all_classes", "length", "truncated")
"""Columns of the generations table that scoring needs."""

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
    """Lower bound of the 95 % interval, clustered by document; None for fewer than two documents."""
    high: float | None
    """Upper bound of the 95 % interval."""


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


def save_generations(plan: LongBenchPlan, answers: Mapping[str, Sequence[GeneratedAnswer]], writer: RunWriter) -> None:
    """Write the generations table, a row for each document in the order of tasks and files, and the results."""
    parts = []
    for task, loaded in plan.rows.items():
        pairs = zip(loaded.rows, answers[task.name], strict=True)
        part = pd.DataFrame([_table_row(row, answer) for row, answer in pairs])
        part["score"] = score_rows(task, part)
        parts.append(part)
    table = pd.concat(parts, ignore_index=True)
    writer.save_table(GENERATIONS, table)
    official = {task.name: loaded.official for task, loaded in plan.rows.items()}
    results = score_generations(table, plan.request.suite, "difflib", official)
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


def load_generations(run: Run, columns: Collection[str] = ("task", "id")) -> pd.DataFrame:
    """Return the generations table of a finished LongBench run; `columns` have to be in it."""
    if run.kind != LONGBENCH:
        raise RunError(f"{run.folder} is not a LongBench run")
    return run.table(GENERATIONS, columns)


def results_of(run: Run, variant: EditVariant = "difflib") -> LongBenchResults:
    """Return the scores of a finished LongBench run, from its stored predictions."""
    official = {task: about["official"] for task, about in run.manifest["documents"].items()}
    return score_generations(load_generations(run, _READ), run.manifest["specification"]["suite"], variant, official)


class LongBenchAnswers(GradedAnswers):
    """The scores of a LongBench run by document, for comparison."""

    def __init__(self, run: Run) -> None:
        tasks = suite_tasks(run.manifest["specification"]["suite"])
        groups = {group: [task.name for task in tasks if task.group == group] for group in GROUPS}
        load = partial(load_generations, run, ("task", "id", "answers", "score", SOURCE))
        description = (
            "LongBench's own score of each task (F1, ROUGE-L, accuracy, edit similarity) in %, averaged over tasks"
        )
        super().__init__(run, load, ("answers",), groups, {LONGBENCH: Measure(description, True)})

    def must_agree(self, task: str) -> dict[str, str]:
        """See `Comparable`. Truncation at another length makes another prompt."""
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

    Raises:
        UnknownNameError: a task is not known.
        DataError: the table is empty, or a row cannot be scored.
        UsageError: the variant's package is not installed.
    """
    if generations.empty:
        raise DataError("there are no generations to score")
    known = {str(name): rows for name, rows in generations.groupby("task", sort=False)}
    present = sorted((find_task(name) for name in known), key=list(TASKS.values()).index)
    tasks: dict[str, TaskScore] = {}
    samples: dict[str, _Cells] = {}
    for task in present:
        rows = known[task.name]
        with doing(f"scoring {task.name}"):
            scores = score_rows(task, rows, variant)
        masks = [np.ones(len(scores), bool)]
        if suite == "longbench-e":
            buckets = bucket(rows["length"].to_numpy())
            masks += [buckets == number for number in range(len(BUCKETS))]
        # Predictions of the official code have no column `source`
        sources = rows[SOURCE].to_numpy() if SOURCE in rows else np.arange(len(rows))
        cells = [_resampled(task.name, number, scores[mask], sources[mask]) for number, mask in enumerate(masks)]
        samples[task.name] = cells
        tasks[task.name] = TaskScore(
            task=task.name,
            group=task.group,
            metric=task.metric,
            all=cells[0].score(),
            buckets=tuple(cell.score() for cell in cells[1:]),
            truncated=int(rows["truncated"].astype(bool).sum()),
            official=(official or {}).get(task.name),
        )
    groups = {name: [t.name for t in present if t.group == name] for name in GROUPS}
    groups = {name: members for name, members in groups.items() if members}
    full = suite_tasks(suite)
    by_group = {name: _mean_cells([samples[task] for task in members]) for name, members in groups.items()}
    sizes = {name: sum(task.group == name for task in full) for name in GROUPS}
    return LongBenchResults(
        suite=suite,
        edit_similarity=variant,
        tasks=tuple(tasks.values()),
        groups=tuple(_mean(name, by_group[name], len(members), sizes[name]) for name, members in groups.items()),
        # A missing task changes its group's mean too, so tasks are counted and not groups
        mean_of_groups=_mean(MEAN_OF_GROUPS, _mean_cells(by_group.values()), len(tasks), len(full)),
        plain_mean=_mean(PLAIN_MEAN, _mean_cells(samples.values()), len(tasks), len(full)),
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


class _Cell(NamedTuple):
    """A mean with its resampled means, in percent."""

    n: int
    mean: float
    """NaN without rows."""
    resampled: np.ndarray
    """[resamples] means; NaN if there is no interval."""

    def score(self) -> Score:
        numbers = (self.mean, *percentile_interval(self.resampled))
        return Score(self.n, *(None if isnan(number) else round(number, 2) for number in numbers))


_Cells = list[_Cell]
"""A cell for all rows, and in LongBench-E one for each bucket."""


def _resampled(task: str, part: int, scores: np.ndarray, sources: np.ndarray) -> _Cell:
    """Return the mean of scores, resampled by source, since rows with the same document are not independent."""
    if not len(scores):
        return _Cell(0, nan, np.full(_RESAMPLES, nan))
    mean = round(100 * float(np.mean(scores)), 2)
    codes, names = pd.factorize(sources)
    if len(names) == 1:
        return _Cell(len(scores), mean, np.full(_RESAMPLES, nan))
    # Seeded by task, so that its interval does not depend on the other tasks in the table
    seed = [_SEED, crc32(task.encode()), part]
    return _Cell(len(scores), mean, resampled_means(scores, codes, _RESAMPLES, seed, 100))


def _mean_cells(members: Collection[_Cells]) -> _Cells:
    """Return the unweighted means of the rounded scores, which readers can recompute; NaN if a member has no rows."""
    return [
        _Cell(
            sum(cell.n for cell in cells),
            sum(cell.mean for cell in cells) / len(cells),
            np.mean([cell.resampled for cell in cells], axis=0),
        )
        for cells in zip(*members, strict=True)
    ]


def _mean(name: str, cells: _Cells, count: int, size: int) -> Mean:
    overall, *buckets = (cell.score() for cell in cells)
    return Mean(name if count == size else f"{name} ({count} of {size} tasks)", overall, tuple(buckets))
