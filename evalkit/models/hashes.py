"""SHA-256 of files, remembered: hashing gigabytes takes seconds, and the same files are hashed again and again.

In: a path, or the bytes that were read from it. Out: a digest. Two things find a remembered one: what the file system
says of the file (size, times, inode), without reading it; or a quick digest of its content (xxh3, 128 bits), where its
bytes are read anyway. The quick one is for accidents and not for malice, as is the cache itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from evalkit.activity import doing
from evalkit.errors import CheckpointError
from evalkit.resources import cache_dir, read_cached, write_cached

State = list[int]
"""Size in bytes, modification and change time in ns, inode: what the file system says of a file."""

_CHUNK = 2**22
_SETTLED = 2.0
"""Seconds without a change after which another one would show: file systems keep times in steps of up to two."""


def file_sha256(path: Path) -> str:
    """SHA-256 of one file's content, remembered for as long as the file stays as it is."""
    hashes = FileHashes()
    digest = hashes.of(path)
    hashes.save()
    return digest


def hash_file(path: Path) -> str:
    """SHA-256 of one file's content, read now and not remembered. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state_of(path: Path) -> State:
    """What the file system says of a file now. Raises `OSError`."""
    return _state(path.stat())


class FileHashes:
    """Digests of files; `save` keeps what was hashed for the next process.

    Best effort: a cache that is damaged or cannot be written only costs time. The change time is compared too, because
    a copy that keeps modification times (rsync, `cp -p`) can put another checkpoint of the same size and time in the
    same place. A file that was changed a moment ago is not remembered by its times, which may not show another change.
    """

    def __init__(self) -> None:
        self._file = cache_dir() / "fingerprints.json"
        self._new: dict[str, Any] = {}
        self._known = self._read()

    def of(self, path: Path) -> str:
        """The digest of one file. Raises `CheckpointError` if it cannot be read."""
        real = path.resolve()
        try:
            with real.open("rb") as file:
                before, started = _state(os.fstat(file.fileno())), time.time()
                known = self._entry(real)
                if known.get("state") == before:
                    return str(known["sha256"])
                digest, quick = hashlib.sha256(), xxhash.xxh3_128()
                with doing(f"hashing {path.name} ({before[0] / 1e6:,.0f} MB)"):
                    while chunk := file.read(_CHUNK):
                        digest.update(chunk)
                        quick.update(chunk)
            self._keep(real, before, started, quick.hexdigest(), digest.hexdigest())
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        return digest.hexdigest()

    def of_bytes(self, path: Path, before: State, started: float, quick: str, sha256: Callable[[], str]) -> str:
        """The digest of what was read from a file.

        Args:
            path: of the file.
            before: its state when it was opened.
            started: when that was, in seconds of `time.time`.
            quick: xxh3 of its content.
            sha256: hashes the content; called where no remembered digest has this `quick`.
        """
        real = path.resolve()
        known = self._entry(real)
        digest = str(known["sha256"]) if known.get("xxh3") == quick else sha256()
        with contextlib.suppress(OSError):
            self._keep(real, before, started, quick, digest)
        return digest

    def save(self) -> None:
        """Add what was hashed to the file, which another process may have rewritten meanwhile."""
        if self._new:
            write_cached(self._file, self._read() | self._new)

    def _entry(self, real: Path) -> dict[str, Any]:
        known = self._known.get(str(real))
        return known if isinstance(known, dict) and _is_digest(known.get("sha256")) else {}

    def _keep(self, real: Path, before: State, started: float, quick: str, digest: str) -> None:
        # A file that is being written to has this digest now and not later
        stays = state_of(real) == before and started - max(before[1:3]) / 1e9 > _SETTLED
        entry = {"state": before if stays else None, "xxh3": quick, "sha256": digest}
        if entry != self._known.get(str(real)):
            self._new[str(real)] = self._known[str(real)] = entry

    def _read(self) -> dict[str, Any]:
        known = read_cached(self._file)
        return known if isinstance(known, dict) else {}


def _state(status: os.stat_result) -> State:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64
