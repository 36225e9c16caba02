"""Paths of evalkit's own files and of its cache.

Own files are `configs/`, `tasks/` and `results/published/`, in a checkout or in an installed wheel. The cache folder
has downloads and values that are slow to compute; these belong to the code that computed them (`source_digest`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from evalkit.atomic import replace_file
from evalkit.inputs import values
from evalkit.inputs.reading import Unreadable, parse_json, read_bytes

_PACKAGE = Path(__file__).resolve().parent
_MAX_CACHED_BYTES = 2**29
"""Largest file that is read from the cache."""
_SEAL = hashlib.sha256().digest_size

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


def read_cached(kind: str, key: str) -> Any:
    """Return the plain data that `write_cached` stored under a key; None if there is none, or it is damaged."""
    if (content := read_cached_bytes(kind, key)) is None:
        return None
    try:
        return parse_json(bytes(content))
    except Unreadable:
        return None


def write_cached(kind: str, key: str, content: Any) -> None:
    """Store plain data in the cache folder; see `write_cached_bytes`."""
    write_cached_bytes(kind, key, json.dumps(content, indent=1).encode())


def read_cached_bytes(kind: str, key: str) -> memoryview | None:
    """Return the bytes that `write_cached_bytes` stored under a key.

    None if there are none, or if the file is damaged, was written under another key, or is a pipe or device.
    """
    try:
        content = memoryview(read_bytes(cached_file(kind, key), _MAX_CACHED_BYTES))
    except (OSError, Unreadable):
        return None
    return content[_SEAL:] if content[:_SEAL] == _seal(kind, key, content[_SEAL:]) else None


def write_cached_bytes(kind: str, key: str, content: bytes | memoryview) -> None:
    """Store bytes in a file of the cache folder atomically, safe against concurrent writers.

    The file begins with a digest of kind, key and content, so that neither damage nor a file of another key is read.
    Best effort: if the file cannot be written, the value is computed again the next time.
    """
    file = cached_file(kind, key)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, [_seal(kind, key, content), content])


def cached_file(kind: str, key: str) -> Path:
    """Return the path of the file with a key's value, which need not exist."""
    return cache_dir() / kind / hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _seal(kind: str, key: str, content: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(json.dumps([kind, key]).encode() + b"\n")
    digest.update(content)
    return digest.digest()


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
