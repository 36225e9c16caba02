"""Paths of evalkit's own files and of its cache.

Own files are `configs/`, `tasks/` and `results/published/`, in a checkout or in an installed wheel. The cache folder
has downloads and values that are slow to compute; these belong to the code that computed them (`source_digest`).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from evalkit.inputs import values
from evalkit.inputs.reading import Unreadable, parse_json, read_bytes

_PACKAGE = Path(__file__).resolve().parent
_MAX_CACHED_BYTES = 2**26
"""Largest file that is read from the cache."""

RUNS = Path("results/runs")
"""Default folder of run folders."""


def resource(*parts: str) -> Path:
    """Return the path of one of evalkit's own files, e.g. `resource("configs", "templates")`."""
    installed = _PACKAGE / "_resources"
    root = installed if installed.is_dir() else _PACKAGE.parent
    return root.joinpath(*parts)


def cache_dir() -> Path:
    """Return the folder for downloaded wheels, demo weights and unpacked documents, without creating it.

    `EVALKIT_CACHE`, else `XDG_CACHE_HOME/evalkit`, else `~/.cache/evalkit`.
    """
    if (own := os.environ.get("EVALKIT_CACHE")) is not None:
        return values.path("EVALKIT_CACHE", own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "evalkit"


def read_cached(file: Path) -> Any:
    """Return what `write_cached` stored in a file of the cache folder; None if it is missing or cannot be read."""
    try:
        return parse_json(read_bytes(file, _MAX_CACHED_BYTES))
    except (OSError, Unreadable):
        return None


def write_cached(file: Path, content: Any) -> None:
    """Store plain data in a file of the cache folder atomically, safe against concurrent writers.

    Best effort: if the file cannot be written, the value is computed again the next time.
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


@cache
def source_digest(*folders: str) -> str:
    """Return a digest of evalkit's own code, so that values that it computed are not used by other code.

    Args:
        folders: relative to the package, e.g. "scoring"; none: all of it.
    """
    return _digest(_PACKAGE, (path for folder in folders or (".",) for path in (_PACKAGE / folder).rglob("*.py")))


def folder_digest(folder: Path) -> str:
    """Return a digest of the names and contents of all files in a folder."""
    return _digest(folder, (path for path in folder.rglob("*") if path.is_file()))


def _digest(root: Path, files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        found.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return found.hexdigest()
