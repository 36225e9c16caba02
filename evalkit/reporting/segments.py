"""Prompts for a terminal: pieces of text with their segments → text in colour."""

from __future__ import annotations

import os
from collections.abc import Iterable

import click

from evalkit.reporting.escape import printable

COLOURS = {
    "special": "magenta",
    "instruction": "blue",
    "context": "cyan",
    "continuation": "green",
    "end": "yellow",
}
"""Segment → colour."""


def coloured(pieces: Iterable[tuple[str, str]]) -> str:
    """Return (segment, text) pieces as one text with segments in colour; without colours where NO_COLOR is set."""
    plain = bool(os.environ.get("NO_COLOR"))
    return "".join(
        printable(text, "\n\t") if plain else click.style(printable(text, "\n\t"), fg=COLOURS[segment])
        for segment, text in pieces
    )
