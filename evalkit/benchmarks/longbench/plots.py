"""Figures: LongBench's scores by input length, and the needle test's heatmap.

In: scores. Out: a .png, .pdf or .svg file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from evalkit.benchmarks.longbench.metrics import EditVariant
from evalkit.benchmarks.longbench.protocol import GROUPS, LABELS, TASKS
from evalkit.benchmarks.longbench.scores import score_rows
from evalkit.errors import DataError, UsageError
from evalkit.reporting.decimals import percent
from evalkit.reporting.figures import check_figure_path, line_look, new_figure, save_figure
from evalkit.stats.estimates import error_of_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


_MOST_LABELLED = 144
"""Most cells of a heatmap with numbers in them; in smaller cells they are not readable."""


def draw_by_length(generations: pd.DataFrame, path: Path, variant: EditVariant = "difflib") -> None:
    """Draw each task's score by the stored length of its rows, one panel for each group of tasks.

    Args:
        generations: the generations table, see `scores`.
        path: a .png, .pdf or .svg file.
        variant: variant of the edit similarity.

    Raises:
        DataError: a row cannot be scored.
        UsageError: the file is none of these.
        RunError: the file cannot be written.
    """
    check_figure_path(path)
    bands = scores_by_length(generations, variant)
    present = [group for group in GROUPS if any(TASKS[band.task].group == group for band in bands)]
    columns = min(3, len(present))
    rows = -(-len(present) // columns)
    figure = new_figure(3.4 * columns, 2.9 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
    for number, axes in enumerate(panels):
        if number >= len(present):
            axes.axis("off")
            continue
        _draw_group(axes, present[number], bands)
        if number % columns == 0:
            axes.set_ylabel("score")
        if number + columns >= len(present):
            axes.set_xlabel("length in words")
            axes.tick_params(labelbottom=True)
    save_figure(figure, path)


def needle_heatmap(scores: np.ndarray, depths: Sequence[float], lengths: Sequence[int], path: Path) -> None:
    """Draw the needle test's retrieval rate by depth and text length.

    Args:
        scores: [depth, length], fractions from 0 to 1; NaN for cells without a measurement, drawn grey.
        depths: position of the needle, in percent of the text from its start.
        lengths: text lengths in tokens.
        path: a .png, .pdf or .svg file.

    Raises:
        UsageError: the shapes do not agree, or the file is none of these.
        RunError: the file cannot be written.
    """
    if scores.shape != (len(depths), len(lengths)) or not scores.size:
        raise UsageError(
            f"a needle heatmap of {len(depths)} depths and {len(lengths)} lengths, but {scores.shape} scores"
        )
    figure = new_figure(max(3.4, 2.2 + 0.62 * len(lengths)), max(3.2, 1.5 + 0.36 * len(depths)))
    axes = figure.subplots()
    axes.set_facecolor("#d9d9d9")
    image = axes.imshow(np.ma.masked_invalid(100 * scores), cmap="viridis", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, ha="right")
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set_xlabel("length in tokens")
    axes.set_ylabel("depth of the needle in %")
    if scores.size <= _MOST_LABELLED:
        for (row, column), value in np.ndenumerate(scores):
            text = "" if np.isnan(value) else percent(value, 0)
            colour = "black" if value > 0.6 else "white"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, ax=axes, label="needles found in %", ticks=[0, 25, 50, 75, 100])
    save_figure(figure, path)


def _draw_group(axes: Axes, group: str, bands: Sequence[BandScore]) -> None:
    """Draw the scores of a group's tasks by length, with standard errors."""
    axes.set_title(group, fontsize=10)
    tasks = [name for name, task in TASKS.items() if task.group == group]
    drawn = [name for name in tasks if any(band.task == name for band in bands)]
    for place, name in enumerate(tasks):
        if name not in drawn:
            continue
        points = [band for band in bands if band.task == name]
        offset = 0.1 * (drawn.index(name) - (len(drawn) - 1) / 2)  # so that error bars do not overlap
        positions = [BANDS.index(point.band) + offset for point in points]
        errors = [point.stderr or 0.0 for point in points]
        means = [point.score for point in points]
        axes.errorbar(positions, means, errors, ms=4, lw=1.4, capsize=2, label=LABELS[name], **line_look(place))
    axes.set_xticks(range(len(BANDS)), BANDS)
    axes.set_xlim(-0.4, len(BANDS) - 0.6)
    axes.set_ylim(-2, 102)
    axes.grid(axis="y", color="#dddddd", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
