"""Files that are written whole or not at all, whenever the process dies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def replace_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file so that it is either the old one or the whole new one, whenever the process dies.

    Raises:
        OSError: the disk is full or read-only; no half-written file is left.
    """
    with replacing(path) as file:
        file.writelines([content] if isinstance(content, bytes) else content)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to be written that takes the place of another one when it is whole; see `replace_file`."""
    # One name for all processes, so that kills leave no more than one behind; a run folder has one writer at a time
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
