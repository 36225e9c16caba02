"""Figures as PNG, PDF or SVG files. In: a path and what is drawn. Out: a file, without a display and without pyplot."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.atomic import replace_file
from evalkit.errors import RunError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
