"""The style that all figures share: colours, lines, axes, names and notes. In: a part of a figure. Out: its look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

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
