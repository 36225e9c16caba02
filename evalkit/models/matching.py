"""Checkpoints that match a pattern such as "train/checkpoint-*". In: a pattern. Out: folders and GGUF files."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from evalkit.inputs.numbered import by_number

_PATTERN = re.compile(r"[*?\[]")


def is_pattern(text: str, folder: Path | None = None) -> bool:
    """Return whether a checkpoint's name is a pattern: it has wildcards, and is no path that exists.

    Args:
        text: a checkpoint as a user gives it.
        folder: that relative paths start from; None: the current one.
    """
    if not _PATTERN.search(text):
        return False
    try:
        return not (folder or Path()).joinpath(text).exists()
    except OSError:
        return False


def matching(text: str, folder: Path | None = None) -> list[str]:
    """Return the folders and GGUF files that match a pattern, in the order of the numbers in their names.

    Args:
        text: a pattern; `**` matches any number of folders, `~` is the user's.
        folder: that the pattern and the results are relative to; None: the current one.
    """
    root = folder or Path()
    if text.startswith("~"):
        text = str(Path(text).expanduser())
    # Path.glob accepts no absolute pattern
    found = glob.glob(text, root_dir=root, recursive=True)  # noqa: PTH207
    return sorted(
        (one for one in found if one.endswith(".gguf") or (root / one).is_dir()),
        key=by_number,
    )
