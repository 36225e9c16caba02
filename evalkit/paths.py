"""Paths of evalkit's own files and of its cache; atomic writes; temporary folders.

Own files are `configs/`, `tasks/` and `results/published/`, in a checkout or in an installed wheel. The cache folder
has downloads and values that are slow to compute; these belong to the code that computed them (`source_digest`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from evalkit.errors import CheckpointError
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


def replace_file(path: Path, content: bytes | Iterable[bytes | memoryview], *, locked: bool = False) -> None:
    """Replace a file's content atomically.

    Args:
        path: the file.
        content: its new content.
        locked: whether a lock excludes other writers. Then kills leave at most one temporary file behind.

    Raises:
        OSError: the disk is full or read-only; no partial file is left.
    """
    with replacing(path, locked=locked) as file:
        file.writelines([content] if isinstance(content, bytes) else content)


@contextmanager
def replacing(path: Path, *, locked: bool = False) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing, which replaces `path` at the end of the block; see `replace_file`."""
    own = "" if locked else f".{platform.node()}-{os.getpid()}-{threading.get_ident()}"
    temporary = path.with_name(f".{path.name}{own}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


_PREFIX = ".evalkit-"
_LOCK = "lock"
_YOUNG = 60.0
"""Seconds after which a running process has locked its folder."""


@contextmanager
def temporary_folder(place: Path | None = None) -> Iterator[Path]:
    """Yield a new folder in `place`, or in the system's folder for temporary files.

    Raises:
        CheckpointError: the folder cannot be created.
    """
    from filelock import FileLock

    root = place or Path(tempfile.gettempdir())
    _remove_abandoned(root)
    try:
        directory = tempfile.TemporaryDirectory(dir=root, prefix=_PREFIX)
    except OSError as error:
        raise CheckpointError(
            f"no temporary folder can be created in {root} ({error.strerror}); set TMPDIR to a writable folder"
        ) from error
    with directory as name:
        folder, lock = Path(name) / "files", FileLock(Path(name) / _LOCK)
        try:
            folder.mkdir()
            # On a file system without locks, the folder is never considered abandoned
            with suppress(NotImplementedError):
                lock.acquire(timeout=0)
        except OSError as error:
            raise CheckpointError(
                f"no temporary folder can be created in {root} ({error.strerror}); set TMPDIR to a writable folder"
            ) from error
        try:
            yield folder
        finally:
            lock.release()


def _remove_abandoned(root: Path) -> None:
    """Remove this user's folders whose process has ended; ignore errors."""
    from filelock import FileLock, Timeout

    with suppress(OSError):
        for path in root.glob(f"{_PREFIX}*"):
            with suppress(OSError, Timeout, NotImplementedError):
                if _may_be_abandoned(path):
                    # Released before removal, because Windows does not remove open files
                    with FileLock(path / _LOCK, timeout=0):
                        pass
                    shutil.rmtree(path, ignore_errors=True)


def _may_be_abandoned(path: Path) -> bool:
    """Return whether a folder is this user's, has a lock file, and is old enough to be locked. Raises `OSError`."""
    about, lock = path.lstat(), (path / _LOCK).lstat()
    own = not hasattr(os, "getuid") or about.st_uid == os.getuid()
    return own and path.is_dir() and not path.is_symlink() and time.time() - lock.st_mtime > _YOUNG
