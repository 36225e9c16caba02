"""Figures of lines with bands, and of maps. In: `FigurePanel`s, tables of numbers. Out: a figure's file.

A row of a panel's table is a drawn number: `run`, the columns of its axes, `value`, and of a line `spread`, half the
height of its band (NaN for none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize
from matplotlib.ticker import FuncFormatter, MaxNLocator

from evalkit.reporting.figures import (
    GREY,
    INK,
    PLAIN,
    dashes,
    line_look,
    new_figure,
    notes_height,
    save_figure,
    short_name,
    style_axes,
    text_width,
    wrapped,
    write_notes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _WIDEST, _HEIGHT = 3.5, 5.4, 2.5
"""Inches of a panel; of a single one; height."""
_LEGEND_LINE = 0.2
"""Inches of a legend's line."""
_LEGEND_SIZE, _LEGEND_LOOK = 8, 0.66
"""Points of its text; inches of a line's look and of the space beside it."""
_MOST_TICKS = 12
_MOST_MARKED = 40
"""Most points of a line with markers."""


@dataclass(frozen=True)
class FigurePanel:
    """A part of a figure: lines of several runs, or a map of one."""

    title: str
    table: pd.DataFrame
    """See the module."""
    x: str
    """Column of the horizontal axis."""
    label: str
    """What the values are, with their unit."""
    y: str = ""
    """Column of a map's vertical axis; empty: lines."""
    x_label: str = ""
    """Empty: the column's name."""
    percent: bool = False
    """Whether values are shares, which are drawn in percent."""
    doubling: bool = False
    """Whether the horizontal axis is logarithmic, with base 2."""
    reference: float | None = None
    """Height of a dotted line, such as that of chance."""

    @property
    def scale(self) -> int:
        """Factor of the drawn values."""
        return 100 if self.percent else 1


def draw_panels(
    panels: Sequence[FigurePanel], runs: Sequence[str], columns: int, notes: str, path: Path, share_y: bool = False
) -> None:
    """Draw panels row by row, a legend above them if there are several lines, and notes below.

    Args:
        panels: all of lines, or all maps.
        runs: names of runs; a run has the same look in each panel.
        columns: panels of a row.
        notes: paragraphs.
        path: ends in .png, .pdf or .svg.
        share_y: whether all panels have the same vertical scale.

    Raises:
        RunError: the file cannot be written.
    """
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    width = _WIDEST if len(panels) == 1 else _WIDTH * columns + 0.7 * bool(panels[0].y)
    lines = wrapped(notes, width)
    in_row = max(1, int(width / (_LEGEND_LOOK + max(text_width(short_name(run), _LEGEND_SIZE) for run in runs))))
    legend = 0 if panels[0].y else -(-len(runs) // in_row)
    figure = new_figure(width, _HEIGHT * rows + notes_height(lines) + _LEGEND_LINE * legend + 0.2)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=share_y).flat
    for number, axis in enumerate(axes):
        if number >= len(panels):
            axis.set_axis_off()
            continue
        axis.set_title(panels[number].title, fontsize=9, loc="left", color=INK, **PLAIN)
        axis.set_xlabel(panels[number].x_label or panels[number].x, fontsize=8, color=INK)
        if not panels[number].y:
            _draw_lines(axis, panels[number], runs)
            if number % columns == 0 or not share_y:
                axis.set_ylabel(panels[number].label, fontsize=8, color=INK)
    if panels[0].y:
        _draw_maps(figure, panels)
    elif legend:
        _draw_legend(figure, runs, in_row)
    write_notes(figure, lines)
    save_figure(figure, path)


def _draw_lines(axis: Axes, panel: FigurePanel, runs: Sequence[str]) -> None:
    for number, run in enumerate(runs):
        found = panel.table[panel.table["run"] == run].sort_values(panel.x)
        if found.empty:
            continue
        look = line_look(number)
        places = found[panel.x].to_numpy(float)
        heights = panel.scale * found["value"].to_numpy(float)
        spread = panel.scale * found["spread"].to_numpy(float)
        low, high = heights - spread, heights + spread
        axis.fill_between(places, low, high, color=look["color"], alpha=0.13, linewidth=0, zorder=1)
        size = 3.2 if len(places) <= _MOST_MARKED else 0
        axis.plot(places, heights, linestyle=dashes(number), linewidth=1.3, markersize=size, zorder=2, **look)
    if panel.reference is not None:
        axis.axhline(panel.scale * panel.reference, color=GREY, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    style_axes(axis, "y")
    if panel.doubling:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axis.xaxis.set_major_locator(MaxNLocator(_MOST_TICKS, integer=True))


def _draw_legend(figure: Figure, runs: Sequence[str], in_row: int) -> None:
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], linestyle=dashes(n), linewidth=1.3, markersize=3.5, label=short_name(run), **line_look(n))
        for n, run in enumerate(runs)
    ]
    legend = figure.legend(
        handles=lines, loc="outside upper left", ncols=min(in_row, len(lines)), frameon=False, fontsize=_LEGEND_SIZE,
        handlelength=3.2, borderpad=0.2, labelspacing=0.3,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


def _draw_maps(figure: Figure, panels: Sequence[FigurePanel]) -> None:
    """Draw maps; those of one measure have one scale of colours."""
    axes = list(figure.axes)[: len(panels)]
    for label in dict.fromkeys(panel.label for panel in panels):
        members = [(axis, panel) for axis, panel in zip(axes, panels, strict=True) if panel.label == label]
        values = np.concatenate([panel.scale * panel.table["value"].to_numpy(float) for _, panel in members])
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        reach = max(-low, high)
        signed = low < 0
        norm = Normalize(-reach, reach) if signed else Normalize(min(low, 0.0), high or 1.0)
        for axis, panel in members:
            image = _draw_map(axis, panel, {"cmap": "RdBu_r" if signed else "viridis", "norm": norm})
        bar = figure.colorbar(image, ax=[axis for axis, _ in members], aspect=28, pad=0.02)
        bar.set_label(label, fontsize=8, color=INK)
        bar.ax.tick_params(labelsize=8, colors="#444444")


def _draw_map(axis: Axes, panel: FigurePanel, colours: dict[str, Any]) -> Any:
    wide = panel.scale * panel.table.pivot(index=panel.y, columns=panel.x, values="value")
    axis.set_facecolor("#d9d9d9")
    image = axis.imshow(wide.to_numpy(float), aspect="auto", origin="lower", interpolation="nearest", **colours)
    for number, labels in enumerate((wide.columns, wide.index)):
        step = -(-len(labels) // _MOST_TICKS)
        ticks = range(0, len(labels), step)
        set_ticks = axis.set_yticks if number else axis.set_xticks
        set_ticks(ticks, [f"{labels[place]}" for place in ticks])
    axis.tick_params(labelsize=8, colors="#444444")
    axis.set_ylabel(panel.y, fontsize=8, color=INK)
    return image
