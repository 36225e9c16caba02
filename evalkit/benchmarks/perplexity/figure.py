"""Picture of bits per byte by position. In: finished runs and names. Out: a figure with a line for each run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from evalkit.benchmarks.perplexity.positions import PositionBin
from evalkit.benchmarks.perplexity.results_report import original_window, position_bins
from evalkit.benchmarks.run_figures import RunFigure
from evalkit.brief import counted
from evalkit.reporting.figure_style import (
    GREY,
    PLAIN,
    dashes,
    line_look,
    notes_height,
    short_name,
    style_axes,
    wrapped,
    write_notes,
)
from evalkit.reporting.figures import new_figure, save_figure
from evalkit.runs.folder import Run
from evalkit.stats.estimates import CONFIDENCE, t_quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST = 32
"""Points of a line."""
_WIDTH, _HEIGHT = 6.4, 3.6
"""Inches of the figure, without its notes."""


def run_figures(runs: Sequence[Run], names: Sequence[str]) -> list[RunFigure]:
    """Return a figure for each group of runs on the same documents.

    Args:
        runs: finished runs; their order is that of colours.
        names: a unique name for each.
    """
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        specification = run.manifest["specification"]
        groups.setdefault(json.dumps([specification["documents"], specification["limit"]]), []).append(place)
    found = []
    for places in groups.values():
        members, named = [runs[place] for place in places], [names[place] for place in places]
        name = f"bits-per-byte-{members[0].manifest['id']}" if len(groups) > 1 else "bits-per-byte"
        words = f"Bits per byte by position in the context window: {', '.join(named)}."
        found.append(RunFigure(name, words, partial(draw_positions, members, named)))
    return found


def draw_positions(runs: Sequence[Run], names: Sequence[str], path: Path) -> None:
    """Draw bits per byte by position, a line with a 95 % band for each run.

    Args:
        runs: finished runs.
        names: a name for each, in the legend.
        path: a .png, .pdf or .svg file.

    Raises:
        UsageError: the file is none of these.
        RunError: a table is damaged, or the file cannot be written.
    """
    lines = wrapped("\n".join(_notes(runs)), _WIDTH)
    figure = new_figure(_WIDTH, _HEIGHT + notes_height(lines))
    panel = figure.subplots()
    for number, (name, bins) in enumerate(zip(names, position_bins(runs, _MOST), strict=True)):
        _draw(panel, number, short_name(name), bins)
    for window in sorted({window for run in runs if (window := _marked(run))}):
        panel.axvline(window, color=GREY, linewidth=0.9, linestyle=":", zorder=1)
        panel.annotate(f"{window:,}", (window, 1), xycoords=("data", "axes fraction"), xytext=(3, -9),
                       textcoords="offset points", fontsize=7, color=GREY)  # fmt: skip
    panel.set_xlim(left=0)
    panel.set_xlabel("position in the window, in tokens", fontsize=9)
    panel.set_ylabel("bits per byte", fontsize=9)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    style_axes(panel, "y")
    for text in panel.legend(fontsize=8, frameon=False).get_texts():
        text.set(**PLAIN)
    write_notes(figure, lines)
    save_figure(figure, path)


def _draw(panel: Axes, number: int, name: str, bins: Sequence[PositionBin]) -> None:
    kept = [one for one in bins if one.bits_per_byte is not None]
    middles = np.array([(one.first + one.last) / 2 for one in kept])
    values = np.array([one.bits_per_byte for one in kept], float)
    look = line_look(number)
    panel.plot(middles, values, label=name, linewidth=1.5, markersize=3.5, linestyle=dashes(number), **look)
    halves = np.array([_half(one) for one in kept])
    known = ~np.isnan(halves)
    low = np.maximum(values - halves, 0.0)
    panel.fill_between(middles, low, values + halves, where=known, color=look["color"], alpha=0.15, lw=0)


def _half(one: PositionBin) -> float:
    """Return half of the width of a bin's 95 % interval; NaN of one document."""
    if one.stderr is None or one.freedom is None:
        return float("nan")
    return t_quantile((1 + CONFIDENCE) / 2, one.freedom) * one.stderr


def _marked(run: Run) -> int | None:
    """Return the window of training, if positions are past it."""
    window = original_window(run)
    return window if window and run.stored["positions"][-1]["first"] > window else None


def _notes(runs: Sequence[Run]) -> list[str]:
    """Return what the documents, the bands and the dotted line are."""
    whole, texts = runs[0].stored["whole"], ", ".join(runs[0].manifest["documents"])
    found = [f"{texts}: {counted(whole['n'], 'document')}, {whole['bytes']:,} bytes."]
    if whole["n"] == 1:
        found.append("One document, so there are no bands.")
    else:
        found.append("Bands: 95 % intervals over documents, none where one document remains.")
        found += ["They are of each line alone; a paired comparison is sharper."] if len(runs) > 1 else []
    found += ["Dotted: the window of training."] if any(map(_marked, runs)) else []
    return [" ".join(found)]
