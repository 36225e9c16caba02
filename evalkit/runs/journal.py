"""The journal of a run: every finished batch on one line, with a checksum, on disk before the next is started.

    <CRC-32 of the rest> [<the run's id>, task, batch, seconds, place, columns] <rows>

`columns` is the digest of the rows' schema, and the rows are an Arrow record batch (`columns.py`) in base64, so that a
line feed ends a line and nothing else. Lines of earlier versions are read as well; their rows are JSON:

    <CRC-32 of the rest> [<the run's id>, task, batch, seconds, place, rows]

A process may be killed at any byte. A line that does not match its checksum is dropped when the journal is next
opened, and its batch is scored again. A whole line of another run, or of another form, is refused. One line at a time
is in memory.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from evalkit.atomic import replace_file
from evalkit.errors import RunError
from evalkit.inputs.validated import Stored, misfit
from evalkit.runs.batch_devices import BatchDevice
from evalkit.runs.folder import WITHOUT_JOURNAL

if TYPE_CHECKING:
    import pyarrow as pa

    from evalkit.runs.columns import Rows

_LARGEST = 2**63
"""No whole number of a journal is as large: tables hold them in 64 bits."""
_LONGEST = 1 << 29
"""No line has as many bytes: above the largest batch's in base64."""
_LONGEST_JSON = 1 << 24
"""Nor as many of JSON: Python's objects take twenty times the room."""


class _Header(Stored):
    """What stands before the rows."""

    run: str
    task: str
    batch: int
    seconds: Annotated[float, Field(ge=0)]
    place: list[str]
    columns: str


class _EarlierLine(Stored):
    """The line of an earlier version."""

    run: str
    task: str
    batch: int
    seconds: Annotated[float, Field(ge=0)]
    place: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished batch, without its rows."""

    task: str
    """The task; in runs of lm-eval's tasks, the kind of request and the task."""
    batch: int
    """Number of the batch in its task's plan; -1 for what needs no batch."""
    seconds: float
    """Wall time of the batch."""
    place: BatchDevice
    """Where it was computed."""
    offset: int = field(default=0, compare=False)
    """Where its line begins in the file."""


class Journal:
    """Append-only file of entries.

    Args:
        path: the file; made when the first entry is written.
        run: the run's id.
        row: what the rows are: a `NamedTuple` of numbers, texts, truth values and None.
        say: called when damaged lines are dropped.
    """

    def __init__(self, path: Path, run: str, row: type[tuple[Any, ...]], say: Callable[[str], None]) -> None:
        self.row = row
        self._path = path
        self._run = run
        self._say = say

    def read(self) -> Iterator[tuple[Entry, pa.RecordBatch]]:
        """All whole entries, each once, with their rows. When all are read, damaged lines are removed from the file.

        Raises:
            RunError: the file cannot be read or repaired, or a whole line is of another run or form.
        """
        seen: set[bytes] = set()
        kept: list[tuple[int, int]] = []
        damaged = size = end = 0
        whole = True
        try:
            for number, line in enumerate(self._lines(), start=1):
                start, end = end, end + len(line)
                content = line.removesuffix(b"\n").removesuffix(b"\r")
                found = self._parse(content, number, size)
                damaged += found is None and content != b""
                whole &= len(content) + 1 == len(line)
                # A number alone does not tell a batch: a run that lost its manifest goes on with other batches
                if found is None or (digest := hashlib.sha256(content).digest()) in seen:
                    whole = False
                    continue
                seen.add(digest)
                kept.append((start, len(content)))
                size += len(content) + 1
                yield found
            if damaged:
                self._say(f"{self._path}: {damaged} damaged line(s) dropped; their documents are scored again")
            if not whole:
                replace_file(self._path, self._pieces(kept))
        except OSError as error:
            raise RunError(f"journal {self._path} cannot be read: {error.strerror or error}") from error

    def rows(self, entry: Entry) -> pa.RecordBatch:
        """The rows of an entry of `read` or `append`.

        Raises:
            RunError: they are not there any more.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(entry.offset)
                found = self._parse(file.readline(_LONGEST).removesuffix(b"\n"), 0, entry.offset)
        except OSError as error:
            raise RunError(f"journal {self._path} cannot be read: {error.strerror or error}") from error
        if found is None or found[0] != entry:
            raise RunError(f"journal {self._path} was changed while it was read; run the same command again")
        return found[1]

    def append(self, entry: Entry, rows: Rows) -> tuple[Entry, pa.RecordBatch]:
        """Write an entry and wait until it is on the disk; returns what `read` gives of it.

        Raises:
            RunError: it could not be written; what was there before is safe.
        """
        from evalkit.runs.columns import record_batch, schema_digest, to_bytes

        try:
            batch = record_batch(rows, self.row)
            columns = to_bytes(batch)
        except ValueError as error:
            raise RunError(f"batch {entry.batch} of {entry.task} cannot be kept: {error}") from error
        header = [self._run, entry.task, entry.batch, entry.seconds, entry.place, schema_digest(self.row)]
        payload = json.dumps(header, separators=(",", ":")).encode() + b" " + base64.b64encode(columns)
        try:
            with self._path.open("ab") as file:
                offset = file.seek(0, os.SEEK_END)
                file.write(b"%08x %s\n" % (zlib.crc32(payload), payload))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"journal {self._path} cannot be written ({error.strerror or error}): batch {entry.batch} of "
                f"{entry.task} is not saved, all before it is; repair that and run the same command again"
            ) from error
        return replace(entry, offset=offset), batch

    def _lines(self) -> Iterator[bytes]:
        if self._path.exists():
            with self._path.open("rb") as file:
                while line := file.readline(_LONGEST):
                    yield line

    def _pieces(self, kept: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Lines of the file, by where each begins and its length."""
        with self._path.open("rb") as file:
            for start, length in kept:
                file.seek(start)
                yield file.read(length) + b"\n"

    def _parse(self, line: bytes, number: int, offset: int) -> tuple[Entry, pa.RecordBatch] | None:
        """The entry of a line; None if the line is damaged."""
        checksum, _, payload = line.partition(b" ")
        try:
            # The checksum of nothing is 0, as is the first digit of many a torn line
            if not payload or int(checksum, 16) != zlib.crc32(payload):
                return None
        except ValueError:
            return None
        try:
            return self._entry(payload, offset)
        except (ValueError, RecursionError) as error:
            raise RunError(
                f"journal {self._path}, line {number}: not a batch of this run ({error}); put the run's own journal "
                f"back, or {WITHOUT_JOURNAL}"
            ) from error

    def _entry(self, payload: bytes, offset: int) -> tuple[Entry, pa.RecordBatch]:
        """Raises `ValueError` where it is of another run or form."""
        from evalkit.runs.columns import from_bytes, record_batch, schema_digest

        # Base64 ends in no bracket
        earlier = payload.endswith((b"]", b"}"))
        header, _, packed = (payload, b"", b"") if earlier else payload.rpartition(b" ")
        form = _EarlierLine if earlier else _Header
        names = form.model_fields
        if len(header) > _LONGEST_JSON:
            raise ValueError(f"it holds {len(header)} bytes of JSON; expected at most {_LONGEST_JSON}")
        content = json.loads(header, parse_int=_whole, parse_float=_number, parse_constant=_number)
        if not isinstance(content, list) or len(content) != len(names):
            raise ValueError(f"expected a list of {', '.join(names)}")
        if trouble := misfit(dict(zip(names, content, strict=True)), form):
            raise ValueError(trouble)
        run, task, batch, seconds, place, last = content
        if run != self._run:
            raise ValueError(f"it is of run {run}; expected {self._run}")
        if len(place) != len(BatchDevice._fields):
            raise ValueError(f"'place' has {len(place)} texts; expected {', '.join(BatchDevice._fields)}")
        # A run has many entries and few tasks and places
        entry = Entry(sys.intern(task), batch, seconds, BatchDevice(*map(sys.intern, place)), offset)
        if earlier:
            return entry, record_batch(last, self.row)
        if last != schema_digest(self.row):
            raise ValueError(f"its rows have other columns; expected {', '.join(self.row._fields)}")  # type: ignore[attr-defined]
        return entry, from_bytes(base64.b64decode(packed, validate=True), self.row)


def _number(text: str) -> float:
    if not math.isfinite(found := float(text)):
        raise ValueError(f"it holds {text[:40]}; expected finite numbers")
    return found


def _whole(text: str) -> int:
    if len(text) > len(str(_LARGEST)) or not -_LARGEST <= int(text) < _LARGEST:
        raise ValueError(f"it holds the whole number {text[:40]}{'…' * (len(text) > 40)}; expected at most 64 bits")
    return int(text)
