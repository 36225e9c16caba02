"""Tables in evalkit's cache that take long to compute: questions of tasks, and their tokens.

In: a kind, and a key of everything that a table depends on. Out: the table, computed once and then read from
`cache_dir()/KIND/` (`resources.read_cached_bytes`). Best effort: a file that is missing, damaged or cannot be written
only costs time.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from evalkit.resources import cached_file, read_cached_bytes, write_cached_bytes

if TYPE_CHECKING:
    import pyarrow as pa

_MOST_BYTES = 2**29
"""Bytes of one kind on disk; beyond it, the tables that were not used for longest are deleted."""


def read_table(kind: str, key: str) -> pa.Table | None:
    """Return a stored table; None if there is none, or it is damaged."""
    import pyarrow as pa

    if (content := read_cached_bytes(kind, key)) is None:
        return None
    with suppress(OSError):
        os.utime(cached_file(kind, key))  # the time of its last use
    try:
        # Unlike Arrow's default one, the system's pool gives unpacked data back
        return pa.ipc.open_file(pa.py_buffer(content), memory_pool=pa.system_memory_pool()).read_all()
    except (OSError, pa.ArrowException):
        return None


def write_table(kind: str, key: str, table: pa.Table) -> None:
    """Store a table."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    write_cached_bytes(kind, key, memoryview(sink.getvalue()))
    with suppress(OSError):
        _delete_oldest(cached_file(kind, key).parent)


def _delete_oldest(folder: Path) -> None:
    states = sorted(((path.stat(), path) for path in folder.glob("[!.]*")), key=lambda one: -one[0].st_mtime)
    total = 0
    for state, path in states:
        total += state.st_size
        if total > _MOST_BYTES:
            path.unlink(missing_ok=True)
