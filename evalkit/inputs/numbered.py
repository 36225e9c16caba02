"""Order of names with numbers in them."""

from __future__ import annotations

import re


def by_number(text: str) -> list[tuple[int, str]]:
    """Return a sort key with numeric order: checkpoint-500 before checkpoint-1000."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
