"""Scores by document length.

In: the generations table. Out: each task's mean score in bands of the stored length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from evalkit.benchmarks.longbench.metrics import EditVariant
from evalkit.benchmarks.longbench.protocol import TASKS
from evalkit.benchmarks.longbench.scores import score_rows
from evalkit.errors import DataError
from evalkit.stats.estimates import error_of_mean

BANDS: tuple[str, ...] = ("<2k", "2-4k", "4-8k", "8-16k", "16k+")
"""Bands of the stored length: words of document and question. They include LongBench-E's bucket limits."""

_EDGES = (2000, 4000, 8000, 16000)


@dataclass(frozen=True)
class BandScore:
    """The score of one task in one band."""

    task: str
    band: str
    n: int
    score: float
    """Mean, in percent."""
    stderr: float | None
    """Standard error of the mean, in percent; None for a single row."""


def scores_by_length(generations: pd.DataFrame, variant: EditVariant = "difflib") -> tuple[BandScore, ...]:
    """Return mean scores by task and band, tasks in the paper's order; bands without rows are omitted.

    Raises:
        DataError: a row cannot be scored, or has no length.
        UsageError: the variant's package is not installed.
    """
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
