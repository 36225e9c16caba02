"""Figures as PNG, PDF or SVG files. In: a path and what is drawn. Out: a file, without a display and without pyplot."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evalkit.errors import RunError, UsageError
from evalkit.paths import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Colours of lines, distinguishable with red-green colour blindness (Okabe and Ito)."""
MARKERS = ("o", "s", "^", "D", "v", "P")
"""Markers of lines, distinguishable in grey."""
INK, GREY = "#222222", "#6b6b6b"
"""Colours of text, and of what is less important."""
PLAIN: dict[str, Any] = {"parse_math": False}
"""Keyword arguments that print a dollar sign in a model's name literally."""

_DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (5, 1.5, 1, 1.5)),
    (0, (1.5, 1.2)),
    (0, (8, 1.5)),
    (0, (3, 1, 1, 1)),
)
_LONGEST = 32
_NOTE_SIZE = 6.5
_NOTE_MARGIN = 0.2
"""Inches beside a note."""
_NOTE_HEIGHT = 0.118
"""Inches of a note's line."""


def line_look(number: int) -> dict[str, Any]:
    """Return colour and marker of a figure's n-th line, from 0."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def dashes(number: int) -> Any:
    """Return the dashes of a figure's n-th line, from 0; after six colours the dashes are others than before."""
    return _DASHES[(number + number // len(COLOURS)) % len(_DASHES)]


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
    """Return the inches that a text takes in a font size, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=size), False)
    return float(width) / 72


def wrapped(notes: str, width: float) -> list[str]:
    """Return the lines of a figure's notes.

    Args:
        notes: one or more paragraphs.
        width: inches of the figure.
    """
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
    """A figure of one or more runs of a benchmark."""

    name: str
    """Unique among the figures of the runs: letters, digits, hyphens."""
    words: str
    """What it shows, in one sentence."""
    draw: Callable[[Path], None]
    """Draws it into a file that ends in .png, .pdf or .svg."""


SUFFIXES = (".png", ".pdf", ".svg")
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
    """Validate a figure's path before hours of work.

    Raises:
        UsageError: another file type, or an invalid path.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{path}: figures are written as .png, .pdf or .svg; give a file name with one of these endings"
        )
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
    """Write a figure atomically; the same figure gives the same bytes.

    Args:
        figure: the figure.
        path: ends in .png, .pdf or .svg, in upper or lower case.

    Raises:
        UsageError: another file type.
        RunError: it cannot be written.
    """
    from matplotlib import rc_context

    check_figure_path(path)
    form = path.suffix[1:].lower()
    drawn = io.BytesIO()
    with warnings.catch_warnings():
        # A character without a glyph is drawn as a box
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        with rc_context(_SETTINGS):
            figure.savefig(drawn, dpi=_DPI, format=form, facecolor="white", metadata=_METADATA.get(form, {}))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, drawn.getvalue())
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
