"""Figures as PNG or PDF files. In: a path and what is drawn. Out: a file, without a display and without pyplot."""

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
    """Validate a figure's path before hours of work.

    Raises:
        UsageError: another file type, or an invalid path.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: figures are written as .png or .pdf; give a file name with one of these endings")
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
        path: ends in .png or .pdf, in upper or lower case.

    Raises:
        UsageError: another file type.
        RunError: it cannot be written.
    """
    from matplotlib import rc_context

    check_figure_path(path)
    form = path.suffix[1:].lower()
    dated: dict[str, Any] = {"CreationDate": None} if form == "pdf" else {}
    drawn = io.BytesIO()
    with warnings.catch_warnings():
        # A character without a glyph is drawn as a box
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        with rc_context({"pdf.fonttype": 42}):  # text of a PDF can be searched and edited
            figure.savefig(drawn, dpi=_DPI, format=form, facecolor="white", metadata=dated)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, drawn.getvalue())
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
