"""Where evalkit's own files lie: `configs/`, `tasks/` and `results/published/`, in a checkout or in an installed
wheel; and the cache folder for what it downloads."""

from __future__ import annotations

import os
from pathlib import Path

from evalkit import values

_PACKAGE = Path(__file__).resolve().parent


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
