"""The journal of a run: one line with a checksum for every finished batch, on disk before the next batch starts.

    <CRC-32 of the rest> [<the run's id>, task, batch, seconds, place, <digest of the rows' schema>] <rows>

The rows are an Arrow record batch (`columns.py`) in base64, so a line feed only ever ends a line. A process may be
killed at any byte: a line that does not match its checksum is dropped when the journal is next opened, and its batch is
scored again. An intact line of another run or form is rejected. One line is in memory at a time.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from evalkit.errors import RunError, reading_as
from evalkit.paths import replace_file
from evalkit.runs.folder import WITHOUT_JOURNAL
from evalkit.runs.traits import NO_BATCH, BatchDevice

if TYPE_CHECKING:
    import pyarrow as pa

    from evalkit.runs.columns import Rows

_LONGEST = 1 << 29
"""Upper bound of a line's bytes: above the largest batch's in base64."""


class _Header(NamedTuple):
    run: str
    task: str
    batch: Annotated[int, Field(ge=-(2**63), lt=2**63)]
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    place: BatchDevice
    columns: str


_HEADER = TypeAdapter(_Header)


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished batch, without its rows."""

    task: str
    """Its name; in runs of lm-eval's tasks, the kind of request and the task."""
    batch: int
    """Number of the batch in its task's plan, or `NO_BATCH`."""
    seconds: float
    place: BatchDevice
    offset: int = field(default=0, compare=False)


def seconds_in(path: Path) -> float:
    """Return the seconds that a journal's batches took, without reading their rows; 0 without a journal."""
    total = 0.0
    with suppress(OSError), path.open("rb") as file:
        for line in file:
            # After the checksum, and before the rows; a line that does not parse is not counted
            with suppress(ValueError, TypeError, IndexError):
                total += float(json.loads(line.partition(b" ")[2].rpartition(b" ")[0])[3])
    return total


class Journal:
    """Append-only file of entries of the run with the id `run`; created when the first entry is written.

    `rows` are the types of its rows, each a `NamedTuple` of str, int, float, bool and None, and lists of these; all
    rows of an entry have one type, whose digest the entry has. `say` is called with a message when
    damaged lines are dropped; the journal of another run (not `is_ours`) is not changed, and damage is an error.
    """

    def __init__(
        self,
        path: Path,
        run: str,
        rows: Sequence[type[tuple[Any, ...]]],
        say: Callable[[str], None],
        is_ours: bool = True,
    ) -> None:
        self.types = tuple(rows)
        self._is_ours = is_ours
        self._path = path
        self._run = run
        self._say = say

    def read(self) -> Iterator[tuple[Entry, pa.RecordBatch]]:
        """Yield intact entries with their rows, each once; then drop damaged lines. Another run's line is an error."""
        if not self._path.exists():
            return
        seen: set[bytes] = set()
        kept: list[tuple[int, int]] = []
        number = start = size = damaged = 0
        whole = True
        with reading_as(self._path, "a journal", RunError):
            with self._path.open("rb") as file:
                while line := file.readline(_LONGEST):
                    number, content = number + 1, line.removesuffix(b"\n").removesuffix(b"\r")
                    entry = self._parse(content, number, size)
                    damaged += entry is None and content != b""
                    # A batch number is not unique: a run that lost its manifest resumes with other batches
                    is_new = entry is not None and (digest := hashlib.sha256(content).digest()) not in seen
                    whole &= is_new and len(content) + 1 == len(line)
                    if entry is not None and is_new:
                        seen.add(digest)
                        kept.append((start, len(content)))
                        size += len(content) + 1
                        yield entry
                    start += len(line)
            if damaged and not self._is_ours:
                raise RunError(f"journal {self._path} has {damaged} damaged line(s)")
            if damaged:
                self._say(f"{self._path}: {damaged} damaged line(s) dropped; their documents are scored again")
            if not whole and self._is_ours:

                def lines() -> Iterator[bytes]:
                    with self._path.open("rb") as file:
                        for start, length in kept:
                            file.seek(start)
                            yield file.read(length) + b"\n"

                replace_file(self._path, lines(), locked=True)

    def rows(self, entry: Entry) -> pa.RecordBatch:
        """Return the rows of an entry from `read` or `append`."""
        with reading_as(self._path, "a journal", RunError), self._path.open("rb") as file:
            file.seek(entry.offset)
            stored = self._parse(file.readline(_LONGEST).removesuffix(b"\n"), 0, entry.offset)
        if stored is None or stored[0] != entry:
            raise RunError(f"journal {self._path} was changed while it was read; run the same command again")
        return stored[1]

    def append(
        self, entry: Entry, rows: Rows, row: type[tuple[Any, ...]], packed: bytes | None = None
    ) -> tuple[Entry, pa.RecordBatch]:
        """Write an entry and flush it to disk; return it as `read` does.

        `row` is the type of the rows. `packed`: `to_bytes` of the rows, if made.
        """
        from evalkit.runs.columns import record_batch, schema_digest, to_bytes

        try:
            batch = record_batch(rows, row)
            columns = to_bytes(batch) if packed is None else packed
        except ValueError as error:
            raise RunError(f"batch {entry.batch} of {entry.task} cannot be stored: {error}") from error
        header = [self._run, entry.task, entry.batch, entry.seconds, entry.place, schema_digest(row)]
        payload = json.dumps(header, separators=(",", ":")).encode() + b" " + base64.b64encode(columns)
        try:
            with self._path.open("ab") as file:
                offset = file.seek(0, os.SEEK_END)
                file.write(b"%08x %s\n" % (zlib.crc32(payload), payload))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"journal {self._path} cannot be written ({error.strerror or error}): earlier batches are saved, batch "
                f"{entry.batch} of {entry.task} is not; fix the cause and run the same command again"
            ) from error
        return replace(entry, offset=offset), batch

    def _parse(self, line: bytes, number: int, offset: int) -> tuple[Entry, pa.RecordBatch] | None:
        """Return the entry of a line; None if the line is damaged."""
        from evalkit.runs.columns import from_bytes, schema_digest, schema_of

        checksum, _, payload = line.partition(b" ")
        # The checksum of an empty payload is 0, which the start of a torn line may be too
        if not payload or checksum != b"%08x" % zlib.crc32(payload):
            return None
        header, _, packed = payload.rpartition(b" ")
        try:
            stored = _HEADER.validate_json(header, strict=True)
            if stored.run != self._run:
                raise ValueError(f"it belongs to run {stored.run}; expected {self._run}")
            by_digest = {schema_digest(row): row for row in self.types}
            if stored.columns not in by_digest:
                known = " or ".join(", ".join(schema_of(row).names) for row in self.types)
                raise ValueError(f"its rows have other columns; expected {known}")
            batch = from_bytes(base64.b64decode(packed, validate=True), by_digest[stored.columns])
        except (ValueError, RecursionError) as error:
            reason: object = error
            if isinstance(error, ValidationError):
                first = error.errors(include_url=False)[0]
                reason, names = first["msg"], dict[object, object](enumerate(_Header._fields))
                for key in first["loc"][:1]:
                    reason = f"'{names.get(key, key)}' is {json.dumps(first['input'])[:60]}: {reason}"
            where = f"journal {self._path}, line {number}"
            raise RunError(f"{where}: not a batch of this run ({reason}); restore it, or {WITHOUT_JOURNAL}") from error
        # A run has many entries but few tasks and devices: each text is in memory once
        device = BatchDevice._make(sys.intern(part) if isinstance(part, str) else part for part in stored.place)
        return Entry(sys.intern(stored.task), stored.batch, stored.seconds, device, offset), batch


Key = tuple[Hashable, ...]
"""The journal's task, then the values of the key columns."""


class FinishedRows:
    """Finished batches of a run by the rows' key columns; of a key in several batches the first one counts.

    A key may end with the number of a part: rows that have a column `parts` are of so many parts.
    """

    def __init__(self, journal: Journal, key: Sequence[str]) -> None:
        self.entries: list[Entry] = []
        self.seconds: dict[str, float] = {}
        """Seconds spent on each task of the journal."""
        self._journal = journal
        self._columns = key
        self.without_batch: set[Key] = set()
        """Keys of rows that need no batch."""
        self.parts: dict[Key, int] = {}
        """Key without the part → its parts, where they are not 1."""
        self._keys: set[Key] = set()
        self._repeated: dict[int, set[Key]] = {}
        """Offset of an entry → its keys that an earlier entry has."""
        for entry, batch in journal.read():
            self._add(entry, batch)

    def append(self, entry: Entry, rows: Rows, row: type[tuple[Any, ...]], packed: bytes | None = None) -> None:
        """Add a finished batch to the journal; see `Journal.append`."""
        self._add(*self._journal.append(entry, rows, row, packed))

    def take(self, other: FinishedRows, keys: Collection[Key], in_batches: bool) -> None:
        """Add the rows of another run that have these keys and are missing here.

        `in_batches`: the keys are those of whole batches, which this run has under the same numbers.
        """
        import pyarrow as pa

        for entry, batch, of_rows in other.keyed():
            kept = [key in keys and key not in self._keys for key in of_rows]
            if any(kept):
                seconds = round(entry.seconds * sum(kept) / len(kept), 4)
                number = entry.batch if in_batches else NO_BATCH
                taken = batch.filter(pa.array(kept))
                self.append(replace(entry, batch=number, seconds=seconds), taken, self._type_of(batch))

    def keyed(self) -> Iterator[tuple[Entry, pa.RecordBatch, Iterator[Key]]]:
        """Yield the entries with their rows and the keys of these."""
        for entry in self.entries:
            batch = self._journal.rows(entry)
            yield entry, batch, self._keys_of(entry, batch)

    @property
    def has_batches(self) -> bool:
        """Whether any rows are those of a planned batch."""
        return any(entry.batch != NO_BATCH for entry in self.entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    def batches(self, task: str) -> Iterator[pa.RecordBatch]:
        """Yield a task's rows, batch by batch in the order of batch numbers."""
        import pyarrow as pa

        entries = [entry for entry in self.entries if entry.task == task]
        for entry in sorted(entries, key=lambda entry: entry.batch):
            batch = self._journal.rows(entry)
            if repeated := self._repeated.get(entry.offset):
                batch = batch.filter(pa.array([key not in repeated for key in self._keys_of(entry, batch)]))
            if batch.num_rows:
                yield batch

    def table(self, task: str) -> pa.Table:
        """Return a task's rows as one table."""
        import pyarrow as pa

        from evalkit.runs.columns import schema_of

        batches = list(self.batches(task))
        schema = batches[0].schema if batches else schema_of(self._journal.types[0])
        return pa.Table.from_batches(batches, schema)

    def rows(self, task: str) -> Iterator[Any]:
        """Yield a task's rows as `NamedTuple`s."""
        for batch in self.batches(task):
            row = self._type_of(batch)
            for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                yield row(*values)

    def _type_of(self, batch: pa.RecordBatch) -> Any:
        from evalkit.runs.columns import schema_of

        return next(row for row in self._journal.types if schema_of(row).equals(batch.schema))

    def _add(self, entry: Entry, batch: pa.RecordBatch) -> None:
        self.entries.append(entry)
        self.seconds[entry.task] = self.seconds.get(entry.task, 0.0) + entry.seconds
        of_rows = list(self._keys_of(entry, batch))
        keys = set(of_rows)
        if "parts" in batch.schema.names:
            counts = zip(of_rows, batch["parts"].to_pylist(), strict=True)
            self.parts |= {key[:-1]: parts for key, parts in counts if parts > 1}
        if repeated := keys & self._keys:
            self._repeated[entry.offset] = repeated
        self._keys |= keys
        if entry.batch == NO_BATCH:
            self.without_batch |= keys

    def _keys_of(self, entry: Entry, batch: pa.RecordBatch) -> Iterator[Key]:
        return zip([entry.task] * batch.num_rows, *(batch[name].to_pylist() for name in self._columns), strict=True)
