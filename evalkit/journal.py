"""The journal of a run: every finished batch on one line, with a checksum, on disk before the next is started.

A process may be killed at any byte. A line that does not match its checksum is dropped when the journal is next
opened, and its batch is scored again.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.errors import RunError


@dataclass(frozen=True)
class Entry:
    """One finished batch."""

    task: str
    """The task; in runs of lm-eval's tasks, the kind of request and the task."""
    batch: int
    """Number of the batch in its task's plan; -1 for what needs no batch."""
    seconds: float
    """Wall time of the batch."""
    rows: list[list[Any]]
    """What was found: rows of the score table, or answers to lm-eval's requests (`lmeval/answers.py`)."""


class Journal:
    """Append-only file of entries.

    Args:
        path: the file; made when the first entry is written.
        say: told when damaged lines are dropped.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say

    def read(self) -> list[Entry]:
        """All whole entries, each batch once. Damaged lines are removed from the file.

        Raises:
            RunError: the file cannot be read or mended.
        """
        try:
            lines = self._path.read_bytes().split(b"\n") if self._path.exists() else []
            parsed = [(line, _parse(line)) for line in lines if line]
            kept = {(entry.task, entry.batch): (line, entry) for line, entry in reversed(parsed) if entry}
            whole = list(reversed(kept.values()))
            if damaged := sum(entry is None for _, entry in parsed):
                self._say(f"{self._path}: {damaged} damaged line(s) dropped; their documents are scored again")
            if len(whole) < len(parsed) or (lines and lines[-1]):
                replace_file(self._path, b"".join(line + b"\n" for line, _ in whole))
        except OSError as error:
            raise RunError(f"journal {self._path} cannot be read: {error.strerror or error}") from error
        return [entry for _, entry in whole]

    def append(self, entry: Entry) -> None:
        """Write an entry and wait until it is on the disk.

        Raises:
            RunError: it could not be written; what was there before is safe.
        """
        payload = json.dumps([entry.task, entry.batch, entry.seconds, entry.rows], separators=(",", ":")).encode()
        try:
            with self._path.open("ab") as file:
                file.write(b"%08x %s\n" % (zlib.crc32(payload), payload))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"journal {self._path} cannot be written ({error.strerror or error}): batch {entry.batch} of "
                f"{entry.task} is not saved, all before it is; mend that and run the same command again"
            ) from error


def _parse(line: bytes) -> Entry | None:
    checksum, _, payload = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(payload):
            return None
        return Entry(*json.loads(payload))
    except (ValueError, TypeError):
        return None


def replace_file(path: Path, content: bytes | Sequence[bytes]) -> None:
    """Write a file so that it is either the old one or the whole new one, whenever the process dies.

    Raises:
        OSError: the disk is full or read-only; no half-written file is left.
    """
    # One name for all processes, so that kills leave no more than one behind; a run folder has one writer at a time
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
