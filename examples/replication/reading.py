"""Tables of the replication, as lists of rows."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

NAMES = {"vanilla": "Vanilla", "cog": "Cog", "diff": "Diff", "intg": "Intg"}
SOURCES = {"wikipedia": "Wikipedia", "openstax": "OpenStax", "wikitext": "WikiText-2"}
SEEDS = (3, 5, 10)
"""Of each side, for which the table `needed` has the smallest differences shown."""
Row = dict[str, str]


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def chosen(rows: Iterable[Row], **values: str) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in values.items())]
