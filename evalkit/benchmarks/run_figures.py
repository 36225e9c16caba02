"""Figures of finished runs, as a benchmark offers them (`Benchmark.figures`). They are drawn on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFigure:
    """A figure of one or more runs of a benchmark."""

    name: str
    """Unique among the figures of the runs: letters, digits, hyphens."""
    words: str
    """What it shows, in one sentence."""
    draw: Callable[[Path], None]
    """Draws it into a file that ends in .png, .pdf or .svg."""
