"""Atomic file writes.

In: a path and its new content. Out: the file with either its old or its whole new content, whenever the process dies.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


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
