"""Cached SHA-256 digests of files.

In: a path, or the bytes that were read from it. Out: a digest. Hashing gigabytes takes seconds, so digests are cached.
A cached digest is looked up by the file's status (size, times, inode), without reading the file, or by a quick digest
of its content (xxh3, 128 bits) if it is read anyway. The quick digest and the cache detect accidental changes, not
malicious ones: the change time is compared too, because a copy that preserves modification times (rsync, `cp -p`)
can replace a file by another of equal size and modification time, and the status of a file changed within the last
seconds is not cached, because its times may not show the next change. A cache that is damaged or cannot be written
only costs time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from evalkit.activity import doing
from evalkit.errors import CheckpointError
from evalkit.resources import read_cached, write_cached

State = list[int]
"""File status: size in bytes, modification and change time in ns, inode."""

_KIND = "digests"
_CHUNK = 2**22
_SETTLED = 2.0
"""Seconds after the last change from which a new change is detectable: file times have a resolution of up to two."""


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, from the cache if the file has not changed.

    Raises:
        CheckpointError: it cannot be read.
    """
    real = path.resolve()
    try:
        with real.open("rb") as file:
            before, started = _state(os.fstat(file.fileno())), time.time()
            known = _entry(real)
            if known.get("state") == before:
                return str(known["sha256"])
            with doing(f"hashing {path.name} ({before[0] / 1e6:,.0f} MB)"):
                digest, quick = _digests(file)
        _keep(real, known, before, started, quick, digest)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return digest


def known_sha256(path: Path) -> str | None:
    """Return the digest of a file that was hashed before, of its new content if it has changed; else None.

    Raises:
        CheckpointError: it cannot be read.
    """
    return file_sha256(path) if _entry(path.resolve()) else None


def content_sha256(path: Path, before: State, started: float, quick: str) -> str:
    """Return the digest of content that was read from a file, which is read again if no cached digest matches `quick`.

    Args:
        path: of the file.
        before: the file's status when it was opened.
        started: time of opening, in seconds of `time.time`.
        quick: xxh3 of its content.

    Raises:
        CheckpointError: the file no longer has this content.
    """
    real = path.resolve()
    known = _entry(real)
    if known.get("xxh3") == quick:
        digest = str(known["sha256"])
    else:
        with real.open("rb") as file:
            digest, again = _digests(file)
        if again != quick:
            raise CheckpointError(f"{path}: changed while it was read; run the command again once it is complete")
    with contextlib.suppress(OSError):
        _keep(real, known, before, started, quick, digest)
    return digest


def hash_file(path: Path) -> str:
    """Compute the SHA-256 of a file's content, without the cache. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state_of(path: Path) -> State:
    """Return the current status of a file. Raises `OSError`."""
    return _state(path.stat())


def _digests(file: BinaryIO) -> tuple[str, str]:
    """Return the SHA-256 and the xxh3 of a file's content."""
    digest, quick = hashlib.sha256(), xxhash.xxh3_128()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        quick.update(chunk)
    return digest.hexdigest(), quick.hexdigest()


def _entry(real: Path) -> dict[str, Any]:
    """Return what is cached of a file: its status and digests; else an empty mapping."""
    known = read_cached(_KIND, str(real))
    return known if isinstance(known, dict) and _is_digest(known.get("sha256")) else {}


def _keep(real: Path, known: dict[str, Any], before: State, started: float, quick: str, digest: str) -> None:
    # The digest of a file that is being written is soon outdated
    settled = state_of(real) == before and started - max(before[1:3]) / 1e9 > _SETTLED
    entry = {"state": before if settled else None, "xxh3": quick, "sha256": digest}
    if entry != known:
        # A file for each, so that reading one entry does not depend on their number
        write_cached(_KIND, str(real), entry)


def _state(status: os.stat_result) -> State:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64
