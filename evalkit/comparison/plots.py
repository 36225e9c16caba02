"""Figures of comparisons and curves.

In: `Comparison`s or `Curve`s, and a path. Out: the figure, as a file.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import FuncFormatter, MaxNLocator

from evalkit.comparison.comparison_report import headline, label, page_unit
from evalkit.comparison.curves import Curve, Point, curve_unit
from evalkit.comparison.differences import DOWN, UNDECIDED, UP, Comparison, Difference, TaskDifference, Unit, p_text
from evalkit.reporting.figures import GREY, INK, PLAIN, line_look, new_figure, save_figure, short_name, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = dict.fromkeys(UP, "#0072B2") | dict.fromkeys(DOWN, "#D55E00") | {UNDECIDED: GREY}
"""Colours by verdict, distinguishable with red-green colour blindness."""

_FAINT = "#ececec"


def forest(found: Sequence[Comparison], path: Path) -> None:
    """Draw a forest plot: a row for each task, a panel for each side that is compared with A.

    Raises:
        RunError: the file cannot be written.
    """
    found = [replace(one, a=short_name(one.a), b=short_name(one.b)) for one in found]
    names = list(dict.fromkeys(task.name for one in found for task in one.tasks))
    averages = list(dict.fromkeys(mean.name for one in found for mean in one.averages)) if len(names) > 1 else []
    places = {name: -float(place) for place, name in enumerate(names)}
    places |= {name: -(len(names) + 0.4 + place) for place, name in enumerate(averages)}
    height = 0.34 * len(places) + 2.0
    figure = new_figure(1.6 + 6.2 * len(found), height)
    panels = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    edges = [abs(edge) for one in found for row in (*one.tasks, *one.averages) for edge in (row.low, row.high)]
    reach = max(filter(math.isfinite, edges), default=0.0)
    for panel, one in zip(panels, found, strict=True):
        _panel(panel, one, places, 100 * reach * 1.08 + 0.1 if one.measure.is_share else 1.08 * reach or 1.0)
    by_name = {task.name: task for one in found for task in one.tasks}
    panels[0].set_yticks(list(places.values()), ["" for _ in places])
    for name, place in places.items():
        count = f"n = {by_name[name].n:,}" if name in by_name else ""
        _margin_text(panels[0], count, place, -6, {"fontsize": 7.5, "color": "#888888"})
        weight = "normal" if count else "bold"
        shown = next((label(one, name) for one in found if name in one.labels), name)
        _margin_text(panels[0], shown, place, -60, {"fontsize": 9.5, "color": INK, "weight": weight})
    figure.supxlabel(
        "interval: 95 %, uncorrected; filled: significant (tasks: Holm); shaded: less than these documents can show",
        fontsize=7.5,
        color="#888888",
    )
    save_figure(figure, path)


def curves(found: Sequence[Curve], path: Path) -> None:
    """Draw accuracy by step with 95 % bands: a panel for the average and every task, a line for each training.

    Raises:
        RunError: the file cannot be written.
    """
    tasks = list(dict.fromkeys(task for one in found for task in one.tasks))
    shown = ["Average", *tasks] if len(tasks) > 1 else tasks
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = new_figure(3.5 * columns, 2.5 * rows + 0.4)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for panel, name in zip(panels, shown, strict=False):
        for place, one in enumerate(found):
            if drawn := one.average if name == "Average" else one.tasks.get(name, ()):
                _line(panel, drawn, one.name, line_look(place), curve_unit(one).factor)
        chances = [one.chance[name] for one in found if name in one.chance]
        if chances:
            panel.axhline(100 * chances[0], color="#999999", linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
        weight = "bold" if name == "Average" else "normal"
        known = [one.labels[name].full for one in found if name in one.labels]
        panel.set_title(known[0] if known else name, fontsize=10, loc="left", color=INK, weight=weight)
        style_axes(panel)
        panel.xaxis.set_major_formatter(FuncFormatter(_short_count))
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    for panel in list(figure.axes)[len(shown) :]:
        panel.set_axis_off()
    if len(found) > 1:
        legend = figure.axes[0].legend(frameon=False, fontsize=8)
        for text in legend.get_texts():
            text.set_parse_math(False)
    figure.supxlabel("step", fontsize=9, color=INK)
    percent = ", %" * found[0].measure.is_share
    scale = found[0].measure.name + percent + " (dotted: chance)" * any(one.chance for one in found)
    figure.supylabel(scale, fontsize=9, color=INK)
    save_figure(figure, path)


def _panel(panel: Axes, one: Comparison, places: dict[str, float], reach: float) -> None:
    unit = page_unit(one)
    for task in one.tasks:
        if task.detectable is not None:
            width = min(unit.factor * task.detectable, reach)
            panel.barh(places[task.name], 2 * width, 0.62, -width, color=_FAINT, zorder=0)
        _row(panel, task, places[task.name], task.p_holm, unit)
    for mean in one.averages if len(one.tasks) > 1 else ():
        _row(panel, mean, places[mean.name], mean.p, unit)
    panel.axvline(0, color=INK, linewidth=0.9, zorder=1)
    panel.set_xlim(-reach, reach)
    panel.set_ylim(min(places.values()) - 0.7, 0.7)
    title = "\n".join(textwrap.wrap(headline(one), 86))
    panel.set_title(title, fontsize=9, loc="left", color=INK, pad=24, **PLAIN)
    ends = [one.b, one.a] if one.measure.higher_is_better is False else [one.a, one.b]
    said = f"is {one.verdicts[0]}"
    for side, text, place in (("left", f"← {ends[0]} {said}", 0.0), ("right", f"{ends[1]} {said} →", 1.0)):
        position: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "xytext": (0, 6)}
        panel.annotate(text, (place, 1), **position, ha=side, fontsize=8, color="#666666", **PLAIN)
    panel.set_xlabel("difference, points" if unit.points else "difference", fontsize=8.5, color=INK)
    style_axes(panel)
    panel.spines["left"].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _row(panel: Axes, row: Difference, place: float, p: float | None, unit: Unit) -> None:
    verdict = row.verdict
    colour = COLOURS[verdict]
    reach = [unit.factor * row.low, unit.factor * row.high]
    panel.plot(reach, [place, place], color=colour, linewidth=2.0, solid_capstyle="round", zorder=2)
    panel.plot(
        [unit.factor * row.difference],
        [place],
        color=colour,
        marker="o" if isinstance(row, TaskDifference) else "D",
        markersize=6.5,
        markerfacecolor="white" if verdict == UNDECIDED else colour,
        markeredgewidth=1.5,
        zorder=3,
    )
    _margin_text(panel, unit.difference(row.difference), place, 34, {"fontsize": 9, "color": colour, "ha": "right"})
    _margin_text(panel, f"p {p_text(p)}", place, 42, {"fontsize": 7.5, "color": "#888888", "ha": "left"})


def _margin_text(panel: Axes, text: str, place: float, shift: float, style: dict[str, Any]) -> None:
    """Write text at a row's height, `shift` points to the right of the panel, or to its left if negative."""
    panel.annotate(
        text,
        (1 if shift > 0 else 0, place),
        xycoords=("axes fraction", "data"),
        xytext=(shift, 0),
        textcoords="offset points",
        va="center",
        **({"ha": "right"} | style | PLAIN),
    )


def _line(panel: Axes, drawn: Sequence[Point], name: str, look: dict[str, Any], factor: float) -> None:
    steps = [point.step for point in drawn]
    low, high = [factor * point.low for point in drawn], [factor * point.high for point in drawn]
    panel.fill_between(steps, low, high, color=look["color"], alpha=0.16, linewidth=0)
    heights = [factor * point.accuracy for point in drawn]
    panel.plot(steps, heights, linewidth=1.6, markersize=3.5, label=short_name(name), **look)


def _short_count(value: float, _: int | None = None) -> str:
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
