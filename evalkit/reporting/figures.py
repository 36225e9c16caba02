"""Figures as PNG, PDF or SVG files, drawn without a display and without pyplot.

`draw_panels` draws lines with bands, or maps, from tables of numbers. matplotlib is imported when a figure is drawn.
"""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evalkit.errors import RunError, UsageError
from evalkit.paths import replace_file

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Distinguishable with red-green colour blindness (Okabe and Ito)."""
_MARKERS = ("o", "s", "^", "D", "v", "P")
INK, GREY = "#222222", "#6b6b6b"
"""Colours of text, and of what is less important."""
PLAIN: dict[str, Any] = {"parse_math": False}
"""Keyword arguments that print a dollar sign in a model's name literally."""

_SPANS = ((5, 1.5), (5, 1.5, 1, 1.5), (1.5, 1.2), (8, 1.5), (3, 1, 1, 1))
_DASHES: tuple[Any, ...] = ("-", *((0, spans) for spans in _SPANS))
_LONGEST = 32
_NOTE_SIZE, _NOTE_MARGIN, _NOTE_HEIGHT = 6.5, 0.2, 0.118
"""Points of a note; inches beside it; inches of a line."""


def line_look(number: int) -> dict[str, Any]:
    """Return colour, marker and dashes of a figure's n-th line, from 0; after each six the colours are darker."""
    from matplotlib.colors import to_hex, to_rgb

    cycle, column = divmod(number, len(_COLOURS))
    red, green, blue = (part * 0.6**cycle for part in to_rgb(_COLOURS[column]))
    dashes = _DASHES[(number + cycle) % len(_DASHES)]  # others for a marker than before, for prints without colour
    return {"color": to_hex((red, green, blue)), "marker": _MARKERS[column], "linestyle": dashes}


def legend_texts(models: Iterable[str]) -> dict[str, str]:
    """Return the text of each model in a legend, with the number of its seeds if there are several."""
    return {name: short_name(name) + f" ({n} seeds)" * (n > 1) for name, n in Counter(models).items()}


def tick_values(measured: Iterable[int], most: int) -> list[int]:
    """Return measured values to label on an axis: the first, the last, and others at least 1/`most` of it apart."""
    ticks, last = list[int](), max(values := sorted({*measured}))
    for value in values:
        if value in (values[0], last) or min(value - ticks[-1], last - value) >= (last - values[0]) / most:
            ticks.append(value)
    return ticks


def style_axes(panel: Axes, grid: Literal["x", "y"] = "x") -> None:
    """Draw two of the four sides, and faint lines at the ticks of one axis behind the data."""
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    panel.tick_params(labelsize=8, colors="#444444")
    panel.grid(axis=grid, color="#eeeeee", zorder=0)
    panel.set_axisbelow(True)


def short_name(name: str) -> str:
    """Shorten a long name in its middle."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]}…{name[-_LONGEST // 2 + 1 :]}"


def text_width(text: str, size: float) -> float:
    """Inches that a text takes in a font size, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=size), False)
    return float(width) / 72


def wrapped(notes: str, width: float) -> list[str]:
    """Return the lines of a figure's notes, one or more paragraphs, in a width in inches."""
    lines = []
    for note in notes.split("\n"):
        line = ""
        for word in note.split():
            if line and text_width(f"{line} {word}", _NOTE_SIZE) > width - _NOTE_MARGIN:
                lines.append(line)
                line = " "  # later lines of a paragraph are indented
            line = f"{line} {word}" if line else word
        lines.append(line)
    return lines


def notes_height(lines: list[str]) -> float:
    """Return the inches that the lines of notes take."""
    return _NOTE_HEIGHT * len(lines) + 0.05


def write_notes(figure: Figure, lines: list[str]) -> None:
    """Write lines of notes below the panels of a figure, whose layout leaves space for them."""
    text = figure.supxlabel("\n".join(lines), x=0.012, ha="left", fontsize=_NOTE_SIZE, color="#555555")
    text.set_parse_math(False)
    text.set_linespacing(1.25)


@dataclass(frozen=True)
class RunFigure:
    """A figure of one or more runs, and a function that draws it into a .png, .pdf or .svg file."""

    name: str
    """Unique among the figures of the runs: letters, digits, hyphens."""
    words: str
    """What it shows, in one sentence."""
    draw: Callable[[Path], None]


_DPI = 160
_SETTINGS: dict[Any, Any] = {
    "pdf.fonttype": 42,  # text of a PDF can be searched and edited
    "svg.fonttype": "none",  # as can that of an SVG, which the reader's fonts draw
    "svg.hashsalt": "evalkit",  # otherwise ids are random
    "font.family": "sans-serif",
    # Verdana is as wide as the font that text is measured in, and is found where DejaVu Sans is not installed
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
}
_METADATA: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None, "Creator": None}}


def check_figure_path(path: Path) -> None:
    """Raise a `UsageError` for another file type or an invalid path, before hours of work."""
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UsageError(f"{path}: figures are written as .png, .pdf or .svg; name a file with one of these endings")
    try:
        # Raises where a part of the path is too long; the figure is written to this temporary name first
        path.with_name(f".{path.name}.tmp").is_file()
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror or error}); name another file") from error


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, with sizes in inches, that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically, a `RunError` if it cannot be written; the same figure gives the same bytes."""
    from matplotlib import rc_context

    check_figure_path(path)
    form = path.suffix[1:].lower()
    drawn = io.BytesIO()
    with warnings.catch_warnings(), rc_context(_SETTINGS):
        # A character without a glyph is drawn as a box
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(drawn, dpi=_DPI, format=form, facecolor="white", metadata=_METADATA.get(form, {}))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, drawn.getvalue())
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error


Size = Literal["column", "page"]
"""Width of a printed figure."""
_INCHES: dict[str | None, float] = {"column": 3.3, "page": 6.9}
_WIDTH, _WIDEST, _HEIGHT, _LOW = 3.5, 5.4, 2.5, 1.9
"""Inches of a panel; of a single one; height; height in a printed column."""
_LEGEND_LINE, _LEGEND_SIZE, _LEGEND_LOOK = 0.2, 8, 0.66
"""Inches of a legend's line; points of its text; inches of a line's look and of the space beside it."""
_MOST_TICKS, _MOST_MARKED = 12, 40
"""Most ticks of an axis, and points of a line with markers."""


@dataclass(frozen=True)
class FigurePanel:
    """A part of a figure: lines of several runs, or a map of one."""

    title: str
    table: pd.DataFrame
    """A row for each drawn number: `run`, the columns of the axes, `value`, and of lines `spread` (half the height of
    the band, NaN for none)."""
    x: str
    """Column of the horizontal axis."""
    label: str
    """What the values are, with their unit."""
    y: str = ""
    """Column of a map's vertical axis; empty: lines."""
    x_label: str = ""
    """Empty: the column's name, capitalised."""
    percent: bool = False
    ticks: Literal["measured", "doubling", "round"] = "measured"
    """Of the horizontal axis: at measured values, also on a logarithmic axis with base 2, or at round numbers."""
    reference: float | None = None
    """Height of a dotted line, such as that of chance."""

    @property
    def scale(self) -> int:
        return 100 if self.percent else 1


def draw_panels(
    panels: Sequence[FigurePanel], runs: Mapping[str, str], columns: int, notes: str, path: Path,
    share_y: bool = False, size: Size | None = None,
) -> None:  # fmt: skip
    """Draw panels (all of lines, or all maps), `columns` in a row, a legend above them and paragraphs of notes below.

    A run has the same look in each panel; `runs` has its text in the legend. `path` ends in .png, .pdf or .svg. A
    figure of a printed column has its panels below each other. The title of a single panel of lines labels its axis.
    """
    columns = 1 if size == "column" else min(columns, len(panels))
    rows = -(-len(panels) // columns)
    width = _INCHES.get(size) or (_WIDEST if len(panels) == 1 else _WIDTH * columns + 0.7 * bool(panels[0].y))
    lines = wrapped(notes, width) if notes else []
    drawn = {*chain.from_iterable(panel.table["run"] for panel in panels)}
    entries = {number: text for number, (run, text) in enumerate(runs.items()) if run in drawn}
    in_row = max(1, int(width / (_LEGEND_LOOK + max(text_width(text, _LEGEND_SIZE) for text in runs.values()))))
    legend = 0 if panels[0].y else -(-len(entries) // in_row)
    height = rows * (_LOW if size == "column" else _HEIGHT)
    figure = new_figure(width, height + notes_height(lines) + _LEGEND_LINE * legend + 0.2)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=share_y).flatten()
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for number, (axis, panel) in enumerate(zip(axes, panels, strict=False)):
        if titled := bool(panel.y) or len(panels) > 1:
            axis.set_title(panel.title, fontsize=9, loc="left", color=INK, **PLAIN)
        axis.set_xlabel(panel.x_label or panel.x.capitalize(), fontsize=8, color=INK)
        if not panel.y:
            _draw_lines(axis, panel, runs)
            if number % columns == 0 or not share_y:
                label = panel.label if titled else ", ".join(filter(None, (panel.title, panel.label)))
                axis.set_ylabel(label, fontsize=8, color=INK, **PLAIN)
    if panels[0].y:
        _draw_maps(figure, panels)
    elif legend:
        _draw_legend(figure, entries, in_row)
    if lines:
        write_notes(figure, lines)
    save_figure(figure, path)


def _draw_lines(axis: Axes, panel: FigurePanel, runs: Iterable[str]) -> None:
    for number, run in enumerate(runs):
        points = panel.table[panel.table["run"] == run].sort_values(panel.x)
        if points.empty:
            continue
        look = line_look(number)
        across = points[panel.x].to_numpy(float)
        heights = panel.scale * points["value"].to_numpy(float)
        spread = panel.scale * points["spread"].to_numpy(float)
        low, high = heights - spread, heights + spread
        if panel.percent:  # a deviation may reach where no share can be
            low, high = low.clip(0), high.clip(max=100)
        axis.fill_between(across, low, high, color=look["color"], alpha=0.13, linewidth=0, zorder=1)
        size = 3.2 if len(across) <= _MOST_MARKED else 0
        axis.plot(across, heights, linewidth=1.3, markersize=size, zorder=2, **look)
    if panel.reference is not None:
        axis.axhline(panel.scale * panel.reference, color=GREY, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    style_axes(axis, "y")
    if panel.percent:
        bottom, top = axis.get_ylim()
        axis.set_ylim(max(bottom, -4), min(top, 104))
    ticks = tick_values(measured := sorted({*panel.table[panel.x]}), _MOST_TICKS)
    if panel.ticks == "doubling":
        axis.set_xscale("log", base=2)
        ticks = [measured[number] for number in tick_values(range(len(measured)), _MOST_TICKS)]
    if panel.ticks != "round":
        axis.set_xticks(ticks, map(str, ticks))


def _draw_legend(figure: Figure, entries: Mapping[int, str], in_row: int) -> None:
    from matplotlib.lines import Line2D

    looks: list[dict[str, Any]] = [{"label": text} | line_look(number) for number, text in entries.items()]
    # A legend is filled column by column, and read row by row
    looks = [look for column in range(in_row) for look in looks[column::in_row]]
    lines = [Line2D([], [], linewidth=1.3, markersize=3.5, **look) for look in looks]
    form: dict[str, Any] = {"loc": "outside upper left", "ncols": min(in_row, len(lines)), "frameon": False}
    form |= {"handlelength": 3.2, "borderpad": 0.2, "labelspacing": 0.3, "fontsize": _LEGEND_SIZE}
    legend = figure.legend(handles=lines, **form)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _draw_maps(figure: Figure, panels: Sequence[FigurePanel]) -> None:
    """Draw maps, with one scale of colours for each measure; a row with fewer values than others has wider cells."""
    import numpy as np
    from matplotlib.colors import Normalize

    axes = list(figure.axes)  # colour bars are added to the figure's own list
    for label in dict.fromkeys(panel.label for panel in panels):
        members = [(axis, panel) for axis, panel in zip(axes, panels, strict=False) if panel.label == label]
        values = np.concatenate([panel.scale * panel.table["value"].to_numpy(float) for _, panel in members])
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        high = high if high > low else low + 1
        colours, norm = "viridis", Normalize(low, high)
        if low < 0:
            colours, norm = "RdBu_r", Normalize(-max(-low, high), max(-low, high))
        look: dict[str, Any] = {"aspect": "auto", "origin": "lower", "interpolation": "nearest"}
        for axis, panel in members:
            wide = panel.scale * panel.table.pivot(index=panel.y, columns=panel.x, values="value")
            counts, width = panel.table.groupby(panel.y).size().reindex(wide.index), wide.shape[1]
            rows = zip(wide.to_numpy(float), counts, strict=True)  # a row without all columns has the first ones
            cells = [row[np.arange(width) * count // width] for row, count in rows]
            image = axis.imshow(np.stack(cells), cmap=colours, norm=norm, **look)
            for labels, set_ticks in ((wide.columns, axis.set_xticks), (wide.index, axis.set_yticks)):
                ticks = tick_values(range(len(labels)), _MOST_TICKS)
                set_ticks(ticks, [f"{labels[tick]}" for tick in ticks])
            axis.tick_params(labelsize=8, colors="#444444")
            axis.set_ylabel(panel.y.capitalize(), fontsize=8, color=INK)
        bar = figure.colorbar(image, ax=[axis for axis, _ in members], aspect=28, pad=0.02)
        bar.set_label(label, fontsize=8, color=INK)
        bar.ax.set_ylim(low, high)  # of a scale about zero, what the data span
        bar.ax.tick_params(labelsize=8, colors="#444444")
