"""From generations to LongBench's scores.

In: the generations table, one row for each (task, document) with columns `task`, `length`, `prediction`, `answers` and
`all_classes` (both JSON lists) and `truncated`. Out: frozen records with the score of every task, group and mean, each
with an interval. No model: a stored table is scored again in seconds.

Scores are 100 times the mean over rows, rounded to two decimals, as the official code prints them. Intervals are 95 %
percentile bootstrap intervals over documents (rows with one `source`; over rows where the table has no such column)
with a fixed seed; those of means treat the tasks as fixed. Comparisons of checkpoints need paired statistics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from zlib import crc32

import numpy as np
import pandas as pd

from evalkit.activity import doing
from evalkit.benchmarks.longbench.metrics import EditVariant, score_prediction
from evalkit.benchmarks.longbench.protocol import GROUPS, TASKS, SuiteName, Task, find_task, suite_tasks
from evalkit.errors import DataError
from evalkit.stats.estimates import percentile_interval, resampled_means

BUCKETS: tuple[str, ...] = ("0-4k", "4-8k", "8k+")
"""LongBench-E's, by the stored length in words: below 4,000, below 8,000, and from there on."""

MEAN_OF_GROUPS, PLAIN_MEAN = "Mean of groups", "Plain mean"

_EDGES = (4000, 8000)
_SEED, _RESAMPLES = 20240, 2000


@dataclass(frozen=True)
class Score:
    """The mean over some rows, in percent."""

    n: int
    """Rows; for a mean over tasks, those of all its tasks."""
    score: float | None
    """Rounded to two decimals; None over no rows, and for a mean where one of its tasks has none."""
    low: float | None
    """Lower end of the 95 % interval, rows of one document together; None for fewer than two documents."""
    high: float | None
    """Upper end of it."""


@dataclass(frozen=True)
class TaskScore:
    """One task."""

    task: str
    group: str
    metric: str
    all: Score
    """Over all its rows."""
    buckets: tuple[Score, ...]
    """In the order of `BUCKETS`; empty for LongBench itself, which has none."""
    truncated: int
    """Rows whose document was cut, since their prompts were longer than the most prompt tokens."""
    official: bool | None
    """Whether the documents are the official ones; None where nobody knows."""


@dataclass(frozen=True)
class Mean:
    """An unweighted mean: of tasks, or of groups."""

    name: str
    """A group's, or one of `MEAN_OF_GROUPS` and `PLAIN_MEAN`; with "2 of 3" where members are missing."""
    all: Score
    buckets: tuple[Score, ...]


@dataclass(frozen=True)
class LongBenchResults:
    """Everything that a generations table gives."""

    suite: SuiteName
    edit_similarity: EditVariant
    """Which one scored code completion."""
    tasks: tuple[TaskScore, ...]
    """In the paper's order."""
    groups: tuple[Mean, ...]
    mean_of_groups: Mean
    """What the LongBench paper and its README call the average."""
    plain_mean: Mean
    """Over tasks: another number, which some papers report."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def score_generations(
    generations: pd.DataFrame,
    suite: SuiteName = "longbench",
    variant: EditVariant = "difflib",
    official: Mapping[str, bool] | None = None,
) -> LongBenchResults:
    """Score a generations table.

    Args:
        generations: see the module.
        suite: which benchmark it is of; LongBench-E's scores are given by length too.
        variant: of the edit similarity.
        official: task → whether its documents are the official ones; not known for tasks it does not name.

    Raises:
        UnknownNameError: a task is unknown.
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
        parts = [np.ones(len(scores), bool)]
        if suite == "longbench-e":
            where = bucket(rows["length"].to_numpy())
            parts += [where == number for number in range(len(BUCKETS))]
        # Predictions of the official code do not say which documents their rows share
        sources = rows["source"].to_numpy() if "source" in rows else np.arange(len(rows))
        cells = [_resampled(task.name, number, scores[part], sources[part]) for number, part in enumerate(parts)]
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
        # Of a group with missing tasks the mean is another one too, so tasks are counted and not groups
        mean_of_groups=_mean(MEAN_OF_GROUPS, _mean_cells(list(by_group.values())), len(tasks), len(full)),
        plain_mean=_mean(PLAIN_MEAN, _mean_cells(list(samples.values())), len(tasks), len(full)),
    )


def score_rows(task: Task, rows: pd.DataFrame, variant: EditVariant = "difflib") -> np.ndarray:
    """Each row's score, from 0 to 1, in the table's order.

    Raises:
        DataError: a row's answers or prediction cannot be scored; names task and row.
        UsageError: the variant's package is not installed.
    """
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
    """Which of LongBench-E's three buckets each stored length falls into, from 0."""
    return np.searchsorted(_EDGES, np.asarray(lengths), side="right")


@dataclass(frozen=True)
class _Cell:
    """A mean with its resampled means, in percent."""

    n: int
    mean: float | None
    resampled: np.ndarray
    """[resamples]; empty where there is no interval."""

    def score(self) -> Score:
        if self.mean is None or not len(self.resampled):
            return Score(self.n, self.mean, None, None)
        low, high = percentile_interval(self.resampled)
        return Score(self.n, self.mean, round(low, 2), round(high, 2))


_Cells = list[_Cell]
"""One of all rows, and in LongBench-E one of each bucket."""

_NONE = np.empty(0)


def _resampled(task: str, part: int, scores: np.ndarray, sources: np.ndarray) -> _Cell:
    """Resampled by source: rows that ask of one document are no independent draws."""
    n = len(scores)
    if n == 0:
        return _Cell(0, None, _NONE)
    mean = round(100 * float(np.mean(scores)), 2)
    codes, names = pd.factorize(sources)
    if len(names) == 1:
        return _Cell(n, mean, _NONE)
    # Seeded by the task, so that its interval does not hang on which others are in the table
    seed = [_SEED, crc32(task.encode()), part]
    return _Cell(n, mean, resampled_means(scores, codes, _RESAMPLES, seed, 100))


def _mean_cells(members: Sequence[_Cells]) -> _Cells:
    """Unweighted means, of all rows and of each bucket; of tasks' printed scores, so that a reader can add them up."""
    return [_mean_cell(cells) for cells in zip(*members, strict=True)]


def _mean_cell(cells: Sequence[_Cell]) -> _Cell:
    n = sum(cell.n for cell in cells)
    means = [cell.mean for cell in cells if cell.mean is not None]
    if len(means) < len(cells):
        return _Cell(n, None, _NONE)
    drawn = [cell.resampled for cell in cells if len(cell.resampled)]
    return _Cell(n, sum(means) / len(means), np.mean(drawn, axis=0) if len(drawn) == len(cells) else _NONE)


def _mean(name: str, cells: _Cells, count: int, size: int) -> Mean:
    rounded = [_Cell(cell.n, None if cell.mean is None else round(cell.mean, 2), cell.resampled) for cell in cells]
    scores = [cell.score() for cell in rounded]
    return Mean(name if count == size else f"{name} ({count} of {size} tasks)", scores[0], tuple(scores[1:]))
