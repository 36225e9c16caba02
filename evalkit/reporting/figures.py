"""Figures as files, PNG or PDF: one way to make one and to save it. It never opens a window, nor imports pyplot."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.atomic import replace_file
from evalkit.errors import RunError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".pdf")
_DPI = 160


def check_figure_path(path: Path) -> None:
    """Make sure that a figure can have this name, before hours of work.

    Raises:
        UsageError: another kind of file, or a name that no file can have.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: figures are drawn as .png or .pdf; name a file that ends in one of these")
    try:
        # Raises where a part of the name is too long; it is written under this one first
        path.with_name(f".{path.name}.tmp").is_file()
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror or error}); name another file") from error


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches, that needs no screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure whole or not at all; the same figure gives the same bytes.

    Args:
        figure: what is drawn.
        path: ends in .png or .pdf, in any case of letters.

    Raises:
        UsageError: another kind of file.
        RunError: it cannot be written.
    """
    check_figure_path(path)
    form = path.suffix[1:].lower()
    dated: dict[str, Any] = {"CreationDate": None} if form == "pdf" else {}
    drawn = io.BytesIO()
    with warnings.catch_warnings():
        # A letter that the font lacks becomes a box
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(drawn, dpi=_DPI, format=form, facecolor="white", metadata=dated)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, drawn.getvalue())
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
