"""Tables in evalkit's cache that take long to compute: questions of tasks, and their tokens.

In: a kind, and a key of everything that a table depends on. Out: the table, computed once and then read from
`cache_dir()/KIND/`. Best effort: a file that is missing, damaged or cannot be written only costs time. Each file
begins with the SHA-256 of the rest, so that damage never becomes a wrong number.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from evalkit.atomic import replace_file
from evalkit.resources import cache_dir

if TYPE_CHECKING:
    import pyarrow as pa

_MOST_BYTES = 2**29
"""Bytes of one kind on disk; beyond it, the tables that were not used for longest are deleted."""
_DIGEST = hashlib.sha256().digest_size


def read_table(kind: str, key: str) -> pa.Table | None:
    """Return a stored table; None if there is none, or it is damaged."""
    import pyarrow as pa

    file = _file(kind, key)
    try:
        content = file.read_bytes()
        if hashlib.sha256(memoryview(content)[_DIGEST:]).digest() != content[:_DIGEST]:
            return None
        with suppress(OSError):
            os.utime(file)  # the time of its last use
        # Unlike Arrow's default one, the system's pool gives unpacked data back
        pool = pa.system_memory_pool()
        return pa.ipc.open_file(pa.py_buffer(content).slice(_DIGEST), memory_pool=pool).read_all()
    except (OSError, pa.ArrowException):
        return None


def write_table(kind: str, key: str, table: pa.Table) -> None:
    """Store a table."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    content = sink.getvalue()
    file = _file(kind, key)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, [hashlib.sha256(content).digest(), content], shared=True)
        _delete_oldest(file.parent)


def _file(kind: str, key: str) -> Path:
    return cache_dir() / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.arrow"


def _delete_oldest(folder: Path) -> None:
    states = sorted(((path.stat(), path) for path in folder.glob("*.arrow")), key=lambda one: -one[0].st_mtime)
    total = 0
    for state, path in states:
        total += state.st_size
        if total > _MOST_BYTES:
            path.unlink(missing_ok=True)
