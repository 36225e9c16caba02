"""Figures as SVG in a page. In: a function that draws into a file. Out: the text of an SVG document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory


def svg_of(draw: Callable[[Path], None]) -> str:
    """Return what a function draws as an SVG document; the same figure gives the same text.

    Args:
        draw: writes a figure into the file that it is given, whose name ends in .svg.

    Raises:
        EvalkitError: the figure cannot be drawn.
    """
    with TemporaryDirectory(prefix="evalkit-") as folder:
        path = Path(folder) / "figure.svg"
        draw(path)
        return path.read_text(encoding="utf-8")
