"""Names of the output formats of reports, for modules that do not render them."""

from __future__ import annotations

from typing import Literal, get_args

Format = Literal["terminal", "markdown", "latex", "html", "csv", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)
SUFFIXES: dict[Format, str] = {
    "terminal": ".txt",
    "markdown": ".md",
    "latex": ".tex",
    "html": ".html",
    "csv": ".csv",
    "json": ".json",
}
"""Endings of files in each format."""
