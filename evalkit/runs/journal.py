"""The journal of a run: every finished batch on one line, with a checksum, on disk before the next is started.

    <CRC-32 of the rest> [<the run's id>, task, batch, seconds, place, rows]

A process may be killed at any byte. A line that does not match its checksum is dropped when the journal is next
opened, and its batch is scored again. A whole line of another run, or of another form, is refused.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from evalkit.errors import RunError
from evalkit.inputs.form import misfit
from evalkit.runs.folder import WITHOUT_JOURNAL
from evalkit.runs.place import Place

_LARGEST = 2**63
"""No whole number of a journal is as large: tables hold them in 64 bits."""
_FIELDS = {"run": str, "task": str, "batch": int, "seconds": float, "place": [str], "rows": [list]}


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
    """What was found: rows of the score table, or answers to lm-eval's requests (`benchmarks/lm_eval/requests.py`)."""
    place: Place
    """Where it was computed."""


class Journal:
    """Append-only file of entries.

    Args:
        path: the file; made when the first entry is written.
        run: the run's id.
        say: called when damaged lines are dropped.
    """

    def __init__(self, path: Path, run: str, say: Callable[[str], None]) -> None:
        self._path = path
        self._run = run
        self._say = say

    def read(self, row: type[tuple[Any, ...]]) -> list[Entry]:
        """All whole entries, each once. Damaged lines are removed from the file.

        Args:
            row: what the rows are: a `NamedTuple` of numbers, texts, truth values and None.

        Raises:
            RunError: the file cannot be read or repaired, or a whole line is of another run or form.
        """
        try:
            lines = self._path.read_bytes().split(b"\n") if self._path.exists() else []
            parsed = [(line, self._parse(line, number, row)) for number, line in enumerate(lines, start=1) if line]
            # A number alone does not tell a batch: a run that lost its manifest goes on with other batches
            whole = list({line: (line, entry) for line, entry in parsed if entry}.values())
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
        content = [self._run, entry.task, entry.batch, entry.seconds, entry.place, entry.rows]
        payload = json.dumps(content, separators=(",", ":")).encode()
        try:
            with self._path.open("ab") as file:
                file.write(b"%08x %s\n" % (zlib.crc32(payload), payload))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"journal {self._path} cannot be written ({error.strerror or error}): batch {entry.batch} of "
                f"{entry.task} is not saved, all before it is; repair that and run the same command again"
            ) from error

    def _parse(self, line: bytes, number: int, row: type[tuple[Any, ...]]) -> Entry | None:
        """The entry of a line; None if the line is damaged."""
        checksum, _, payload = line.partition(b" ")
        try:
            # The checksum of nothing is 0, as is the first digit of many a torn line
            if not payload or int(checksum, 16) != zlib.crc32(payload):
                return None
        except ValueError:
            return None
        try:
            return self._entry(json.loads(payload, parse_int=_whole, parse_float=_number, parse_constant=_number), row)
        except (ValueError, RecursionError) as error:
            raise RunError(
                f"journal {self._path}, line {number}: not a batch of this run ({error}); put the run's own journal "
                f"back, or {WITHOUT_JOURNAL}"
            ) from error

    def _entry(self, content: Any, row: type[tuple[Any, ...]]) -> Entry:
        """Raises `ValueError` where it is of another run or form."""
        if not isinstance(content, list) or len(content) != len(_FIELDS):
            raise ValueError(f"expected a list of {', '.join(_FIELDS)}")
        fields = dict(zip(_FIELDS, content, strict=True))
        if trouble := misfit(fields, _FIELDS):
            raise ValueError(trouble)
        run, task, batch, seconds, place, rows = content
        if run != self._run:
            raise ValueError(f"it is of run {run}; expected {self._run}")
        if seconds < 0:
            raise ValueError(f"'seconds' is {seconds}; expected a number of at least 0")
        if len(place) != len(Place._fields):
            raise ValueError(f"'place' has {len(place)} texts; expected {', '.join(Place._fields)}")
        check_rows(rows, row)
        return Entry(task, batch, seconds, rows, Place(*place))


def _number(text: str) -> float:
    if not math.isfinite(found := float(text)):
        raise ValueError(f"it holds {text[:40]}; expected finite numbers")
    return found


def _whole(text: str) -> int:
    if len(text) > len(str(_LARGEST)) or not -_LARGEST <= int(text) < _LARGEST:
        raise ValueError(f"it holds the whole number {text[:40]}{'…' * (len(text) > 40)}; expected at most 64 bits")
    return int(text)


def check_rows(rows: Sequence[Sequence[Any]], row: type[tuple[Any, ...]]) -> None:
    """Raise `ValueError` where rows of plain data are not the fields of a `NamedTuple`, each of its type."""
    allowed = _types(row)
    for kinds in {tuple(map(type, one)) for one in rows}:
        if len(kinds) != len(allowed) or not all(map(frozenset.__contains__, allowed.values(), kinds)):
            wrong = [name for name, kind in zip(allowed, kinds, strict=False) if kind not in allowed[name]]
            what = f"'{wrong[0]}' is of another type" if wrong else f"{len(kinds)} fields"
            raise ValueError(f"a row has {what}; expected {', '.join(allowed)}")


@cache
def _types(row: type[tuple[Any, ...]]) -> dict[str, frozenset[type]]:
    """The types that JSON may have for each field; a whole number is a number too."""
    hints = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(row).items()}
    return {name: frozenset((*kinds, int) if float in kinds else kinds) for name, kinds in hints.items()}


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
