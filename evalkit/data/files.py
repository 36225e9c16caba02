"""Task files on disk: `<task>.jsonl`, `.json` (one list) or `.parquet`.

In: a folder or a file. Out: its records, each with its position ("line 3") for messages. A file that cannot be read
raises a `DataError` that names it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from evalkit.errors import DataError, reading_as
from evalkit.inputs.reading import MOST_DOCUMENT_BYTES, parse_json, read_bytes
from evalkit.inputs.values import LONGEST_TEXT

Record = dict[str, Any]
Placed = Iterator[tuple[str, object]]

_SUFFIXES = (".jsonl", ".json", ".parquet")
_DEEPEST, _MOST_FOLDERS = 3, 200
"""Limits of the search for a suggestion: depth, and folders at each level."""


def wrong(field: str, expected: str, found: object) -> DataError:
    """Return the error for an invalid field, with the value shortened to fit one line."""
    shown = ascii(found)
    return DataError(f"field '{field}': expected {expected}, found {shown if len(shown) <= 60 else shown[:57] + '...'}")


def value(record: Record, field: str, expected: str) -> Any:
    """Return a required field of any type."""
    if field not in record:
        raise DataError(f"field '{field}': expected {expected}, but the field is missing")
    return record[field]


def text(record: Record, field: str, *, may_be_empty: bool = False) -> str:
    """Return a string field of a length that a tokenizer accepts; by default it must not be empty or blank."""
    expected = "a string" if may_be_empty else "a non-empty string"
    found = value(record, field, expected)
    if not isinstance(found, str) or not (may_be_empty or found.strip()):
        raise wrong(field, expected, found)
    if len(found) > LONGEST_TEXT:
        raise DataError(f"field '{field}': expected at most {LONGEST_TEXT:,} characters, found {len(found):,}")
    return found


def find(folder: Path, task: str) -> Path | None:
    """Return the file of a task in a folder, or None.

    An existing path that is not a readable file is returned too, so that reading it raises an error and no other source
    is used silently.
    """
    candidates = (folder / f"{task}{suffix}" for suffix in _SUFFIXES)
    return next((path for path in candidates if os.path.lexists(path)), None)


def did_you_mean(folder: Path, holds: Callable[[Path], int]) -> str:
    """Return a suggestion for a message: the subfolder with most of the expected files, or an empty string.

    `holds` returns how many of the files a folder contains, subfolders not counted.
    """
    level, best, most = [folder], None, 0
    for _ in range(_DEEPEST):
        level = [child for parent in level for child in _folders(parent)][:_MOST_FOLDERS]
        for child in level:
            if (count := holds(child)) > most:
                best, most = child, count
    return "" if best is None else f" (did you mean {best}?)"


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError:
        return []


def read(path: Path, task: str) -> Placed:
    """Yield the records of a task file with their positions; `task` is for messages."""
    with reading_as(f"{path} ({task})", "documents", DataError):
        if path.suffix == ".jsonl":
            for number, line in enumerate(read_bytes(path, MOST_DOCUMENT_BYTES).split(b"\n"), start=1):
                # Editors on Windows write a byte-order mark; blank lines are skipped
                if content := (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip():
                    with reading_as(f"{path}, line {number} ({task})", "JSON", DataError):
                        record = parse_json(content)
                    yield f"line {number}", record
            return
        if path.suffix == ".json":
            records = parse_json(read_bytes(path, MOST_DOCUMENT_BYTES))
            if not isinstance(records, list):
                raise ValueError(f"expected a list, found {type(records).__name__}")
        else:
            records = _read_parquet(path)
        for number, record in enumerate(records, start=1):
            yield f"record {number}", record


def _read_parquet(path: Path) -> list[Record]:
    from pyarrow import parquet

    # Opened here since pyarrow's message for a missing permission gives no reason
    with path.open("rb") as file:
        rows: list[Record] = parquet.read_table(file).to_pylist()
    return rows


def read_arrow(paths: Iterable[Path]) -> list[Record]:
    """Return the rows of Arrow stream files, as the `datasets` library caches them, in the order of the files."""
    import pyarrow as pa

    rows: list[Record] = []
    for path in paths:
        with path.open("rb") as file, pa.ipc.open_stream(file) as reader:
            rows += reader.read_all().to_pylist()
    return rows
