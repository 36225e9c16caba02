"""Atomic file writes.

In: a path and its new content. Out: the file with either its old or its whole new content, whenever the process dies.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def replace_file(path: Path, content: bytes | Iterable[bytes], *, shared: bool = False) -> None:
    """Replace a file's content atomically.

    Args:
        path: the file.
        content: its new content.
        shared: whether other processes may replace it at the same time.

    Raises:
        OSError: the disk is full or read-only; no partial file is left.
    """
    with replacing(path, shared=shared) as file:
        file.writelines([content] if isinstance(content, bytes) else content)


@contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing, which replaces `path` at the end of the block; see `replace_file`."""
    # One name for all processes, so that kills leave at most one file behind; a run folder has one writer at a time
    own = f".{platform.node()}-{os.getpid()}" if shared else ""
    temporary = path.with_name(f".{path.name}{own}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
