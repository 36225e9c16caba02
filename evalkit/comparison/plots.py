"""Figures of comparisons and curves. In: `Comparison`s or `Curve`s, and a path. Out: the figure, as a file."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from evalkit.comparison.curves import Curve, curve_unit
from evalkit.comparison.differences import DOWN, TOO_FEW, UNDECIDED, UP, Comparison, Difference, TaskDifference
from evalkit.comparison.sentences import Unit, headline, label, p_text, page_unit
from evalkit.reporting import figures
from evalkit.reporting.figures import GREY, INK, PLAIN, new_figure, save_figure, short_name, style_axes

COLOURS = dict.fromkeys(UP, "#0072B2") | dict.fromkeys(DOWN, "#D55E00") | {UNDECIDED: GREY, TOO_FEW: GREY}
"""Colours by verdict, distinguishable with red-green colour blindness."""

_FAINT, _LIGHT = "#ececec", "#888888"
_MINUS = re.compile(r"(?<![\w.-])-(?=[\d∞])")


def forest(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw a forest plot: a row for each task, a panel for each side that is compared with A."""
    comparisons = [replace(each, a=short_name(each.a), b=short_name(each.b)) for each in comparisons]
    tasks = {task.name: task for each in comparisons for task in each.tasks}
    heights = {name: -float(row) for row, name in enumerate(tasks)}
    if len(tasks) > 1:
        averages = dict.fromkeys(mean.name for each in comparisons for mean in each.averages)
        heights |= {name: -(len(tasks) + 0.4 + row) for row, name in enumerate(averages)}
    shown = {name: next((label(each, name) for each in comparisons if name in each.labels), name) for name in heights}
    widest = max(figures.text_width(text, 9.5) for text in shown.values())
    figure = new_figure(0.6 + widest + 6.2 * len(comparisons), 0.34 * len(heights) + 2.0)
    panels = figure.subplots(1, len(comparisons), squeeze=False, sharey=True)[0]
    drawn = [row for each in comparisons for row in (*each.tasks, *each.averages)]
    edges = [edge for row in drawn for edge in (row.low, row.high) if math.isfinite(edge)]
    reach = max(map(abs, edges), default=0.0) or 1.0
    shades = [min(row.detectable, reach) for row in drawn if row.detectable]
    least = max([reach / 4, *shades])  # on each side of zero
    limits = 1.06 * min([-least, *edges]), 1.06 * max([least, *edges])
    for panel, each in zip(panels, comparisons, strict=True):
        _panel(panel, each, heights, limits)
    panels[0].set_yticks(list(heights.values()), ["" for _ in heights])
    for name, height in heights.items():
        count = f"n = {tasks[name].n:,}" if name in tasks else ""
        _margin_text(panels[0], count, height, -6, fontsize=7.5, color=_LIGHT)
        _margin_text(panels[0], shown[name], height, -60, fontsize=9.5, color=INK, weight="normal" if count else "bold")
    adjusted = "adjusted (Bonett and Price), so not ± t SE; " * (comparisons[0].measure.bounds is not None)
    together = "of the average for all sides together; " * (comparisons[0].sides > 1)
    interval = f"interval: 95 %, of tasks uncorrected; {together}{adjusted}extended to 0 if not significant"
    shaded = "; shaded: less than these documents can show" * bool(shades)
    figure.supxlabel(f"{interval}\nfilled: significant (tasks: Holm){shaded}", fontsize=7.5, color=_LIGHT)
    save_figure(figure, path)


def curves(trainings: Sequence[Curve], path: Path) -> None:
    """Draw scores by step with 95 % bands: a panel for the average and every task, a line for each training."""
    tasks = list(dict.fromkeys(task for each in trainings for task in each.tasks))
    names = ["Average", *tasks] if len(tasks) > 1 else tasks
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = new_figure(3.5 * columns, 2.5 * rows + 0.4)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    models = dict.fromkeys(each.model for each in trainings)
    looks = {model: figures.line_look(number) for number, model in enumerate(models)}
    for panel, name in zip(panels, names, strict=False):
        unnamed = figures.legend_texts(each.model for each in trainings)
        for each in trainings:
            if points := each.average if name == "Average" else each.tasks.get(name, ()):
                factor, look = curve_unit(each).factor, looks[each.model]
                steps, heights = [point.step for point in points], [factor * point.value for point in points]
                low, high = [factor * point.low for point in points], [factor * point.high for point in points]
                panel.fill_between(steps, low, high, color=look["color"], alpha=0.16, linewidth=0)
                panel.plot(steps, heights, linewidth=1.4, markersize=3.5, label=unnamed.pop(each.model, ""), **look)
        if chances := [each.chance[name] for each in trainings if name in each.chance]:
            panel.axhline(100 * chances[0], color="#999999", linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
        title = next((each.labels[name].full for each in trainings if name in each.labels), name)
        panel.set_title(title, fontsize=10, loc="left", color=INK, weight="bold" if name == "Average" else "normal")
        style_axes(panel)
        ticks = figures.tick_values(measured := {point.step for each in trainings for point in each.average}, 8)
        panel.set_xticks(ticks, [*map(_short_count, ticks)])
        panel.set_xticks([*measured], minor=True)
    for panel in list(figure.axes)[len(names) :]:
        panel.set_axis_off()
    if len(trainings) > 1:
        for text in figure.axes[0].legend(frameon=False, fontsize=8, handlelength=3.2).get_texts():
            text.set_parse_math(False)
    measure, chance = trainings[0].measure, any(each.chance for each in trainings)
    adjusted = ", two right and two wrong sources added (Agresti and Coull), so not ± t SE" * measure.is_share
    figure.supxlabel(f"step (band: 95 % interval{adjusted})", fontsize=8, color=INK)
    scale = measure.name + ", %" * measure.is_share + " (dotted: chance)" * chance
    figure.supylabel(scale, fontsize=9, color=INK)
    save_figure(figure, path)


def _panel(panel: Axes, compared: Comparison, heights: Mapping[str, float], limits: Sequence[float]) -> None:
    """Draw the rows of a comparison; the limits are in the measure's unit, of shares fractions."""
    unit = page_unit(compared)
    differences = (unit.difference(row.difference) for row in (*compared.tasks, *compared.averages))
    shift = 6 + 72 * max(figures.text_width(text, 9) for text in differences)
    for row in (*compared.tasks, *(compared.averages if len(compared.tasks) > 1 else ())):
        if row.detectable is not None:
            width = unit.factor * row.detectable
            panel.barh(heights[row.name], 2 * width, 0.62, -width, color=_FAINT, zorder=0)
        _row(panel, row, heights[row.name], row.p if row.p_holm is None else row.p_holm, unit, shift)
    panel.axvline(0, color=INK, linewidth=0.9, zorder=1)
    panel.set_xlim(*(unit.factor * limit for limit in limits))
    panel.set_ylim(min(heights.values()) - 0.7, 0.7)
    title = "\n".join(textwrap.wrap(_MINUS.sub("−", headline(compared)), 86))
    panel.set_title(title, fontsize=9, loc="left", color=INK, pad=24, **PLAIN)
    lower = compared.measure.higher_is_better is False
    left, right = (compared.b, compared.a) if lower else (compared.a, compared.b)
    verdict = f"is {compared.verdicts[0]}"
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": "#666666", **PLAIN}
    for side, text, x in (("left", f"← {left} {verdict}", 0.0), ("right", f"{right} {verdict} →", 1.0)):
        panel.annotate(text, (x, 1), xycoords="axes fraction", xytext=(0, 6), ha=side, **style)
    panel.set_xlabel("difference, points" if unit.points else "difference", fontsize=8.5, color=INK)
    style_axes(panel)
    panel.spines["left"].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _row(panel: Axes, row: Difference, height: float, p: float | None, unit: Unit, shift: float) -> None:
    colour, marker = COLOURS[row.verdict], "o" if isinstance(row, TaskDifference) else "D"
    reach, face = [unit.factor * row.low, unit.factor * row.high], "white" if colour == GREY else colour
    if math.isfinite(sum(reach)):
        panel.plot(reach, [height, height], color=colour, linewidth=2.0, solid_capstyle="round", zorder=2)
    look = {"marker": marker, "markersize": 6.5, "markerfacecolor": face, "markeredgewidth": 1.5}
    panel.plot([unit.factor * row.difference], [height], color=colour, zorder=3, **look)  # type: ignore[arg-type]
    _margin_text(panel, unit.difference(row.difference), height, shift, fontsize=9, color=colour)
    _margin_text(panel, f"p {p_text(p)}", height, shift + 8, fontsize=7.5, color=_LIGHT, ha="left")


def _margin_text(panel: Axes, text: str, height: float, shift: float, **style: Any) -> None:
    """Write text at a row's height, `shift` points to the right of the panel, or to its left if negative."""
    look = {"ha": "right", "va": "center", "textcoords": "offset points"} | style | PLAIN
    where = (int(shift > 0), height)
    panel.annotate(_MINUS.sub("−", text), where, xycoords=("axes fraction", "data"), xytext=(shift, 0), **look)


def _short_count(value: float) -> str:
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
