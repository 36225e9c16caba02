"""Where evalkit's own files lie: `configs/`, `tasks/` and `results/published/`, in a checkout or in an installed
wheel; and the cache folder for what it downloads."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from evalkit.inputs import values
from evalkit.inputs.reading import Unreadable, parse_json, read_bytes

_PACKAGE = Path(__file__).resolve().parent
_MOST_CACHED_BYTES = 2**26


RUNS = Path("results/runs")
"""Folder of run folders, where no other is named."""


def resource(*parts: str) -> Path:
    """Path of one of evalkit's own files, e.g. `resource("configs", "templates")`."""
    installed = _PACKAGE / "_resources"
    root = installed if installed.is_dir() else _PACKAGE.parent
    return root.joinpath(*parts)


def cache_dir() -> Path:
    """Folder for downloaded wheels, demo weights and unpacked documents; not created here.

    `EVALKIT_CACHE`, else `XDG_CACHE_HOME/evalkit`, else `~/.cache/evalkit`.
    """
    if (own := os.environ.get("EVALKIT_CACHE")) is not None:
        return values.path("EVALKIT_CACHE", own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "evalkit"


def read_cached(file: Path) -> Any:
    """What `write_cached` has left in a file of the cache folder; None if there is none that can be read."""
    try:
        return parse_json(read_bytes(file, _MOST_CACHED_BYTES))
    except (OSError, Unreadable):
        return None


def write_cached(file: Path, content: Any) -> None:
    """Keep plain data in a file of the cache folder, whole or not at all, while other processes may do so too.

    Best effort: what cannot be written is found out again the next time.
    """
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as opened:
                json.dump(content, opened, indent=1)
            Path(name).replace(file)
        except OSError:
            Path(name).unlink(missing_ok=True)
