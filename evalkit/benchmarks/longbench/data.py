"""Loading of LongBench's documents.

In: a task. Out: its validated `LongBenchRows`, from the folder of `--data-dir`, else from data.zip of THUDM/LongBench
in the Hugging Face cache or on the hub. Every file is compared with its official hash. A file with other content is
accepted if its rows are valid, and is marked as not official.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from evalkit.benchmarks.longbench.documents import CONTENT_ID, LARGEST_ROW, LongBenchDocument, parse_row, read_record
from evalkit.benchmarks.longbench.pins import OFFICIAL_BLOBS
from evalkit.benchmarks.longbench.prompts import template
from evalkit.benchmarks.longbench.protocol import E_TASKS, SuiteName, Task
from evalkit.data.files import did_you_mean
from evalkit.data.hub import Hub
from evalkit.data.sampling import ALL_DOCUMENTS, DocumentSelection, FirstDocuments
from evalkit.data.wheels import Say, say_on_stderr
from evalkit.errors import DataError, UsageError, first_line

REPOSITORY, ARCHIVE = "THUDM/LongBench", "data.zip"

_PROCESS_HUB = Hub()


@dataclass(frozen=True)
class LongBenchRows:
    """The documents of one task, in the order of the file."""

    rows: tuple[LongBenchDocument, ...]
    source: str
    """Provenance for messages, such as "data-dir DIR/qasper.jsonl"."""
    official: bool
    """Whether the whole file equals the official one, except for line ends."""
    sha: str
    """Git's blob hash of the whole file with line feeds as line ends; it does not depend on the limit."""


def load_rows(
    task: Task,
    data_dir: Path | None = None,
    selection: DocumentSelection = ALL_DOCUMENTS,
    suite: SuiteName = "longbench",
    say: Say = say_on_stderr,
    hub: Hub = _PROCESS_HUB,
) -> LongBenchRows:
    """Load the documents of one task.

    Args:
        task: the task.
        data_dir: folder with `<task>.jsonl` (LongBench-E: `<task>_e.jsonl`), directly or in its subfolder `data`. A
            task without a file there is loaded from the cache or the hub.
        selection: which rows.
        suite: which of the two benchmarks.
        say: called about downloads and about a hub that cannot be used.
        hub: client with the known state of the hub; by default shared by the whole process.

    Raises:
        UsageError: LongBench-E lacks the task.
        DataError: no documents found, or a file or a row is not valid; names file, line and field.
    """
    if suite == "longbench-e" and not task.in_e:
        raise UsageError(f"LongBench-E has no task {task.name}; its tasks are {', '.join(E_TASKS)}")
    name = f"{task.name}_e" if suite == "longbench-e" else task.name
    if data_dir is not None and (file := _find(data_dir.expanduser(), name)) is not None:
        return _from_file(task, name, file, selection)
    archive = hub.file(REPOSITORY, ARCHIVE, say)
    if archive is None:
        raise DataError(
            f"no documents for {name}: {'' if data_dir is None else _not_in(data_dir.expanduser(), name)}"
            f"the hub cannot be used ({hub.failure}). Unpack {ARCHIVE} of the dataset {REPOSITORY} and give its folder "
            "with --data-dir"
        )
    return _from_archive(task, name, archive, selection)


def blob_hash(lines: Iterable[bytes]) -> str:
    """Return git's blob hash of the file with these lines."""
    lines = list(lines)
    digest = hashlib.sha1(b"blob %d\0" % sum(map(len, lines)), usedforsecurity=False)
    for line in lines:
        digest.update(line)
    return digest.hexdigest()


def check_data_dir(folder: Path | None) -> None:
    """Raise a `DataError` for a `--data-dir` that is no folder."""
    if folder is not None and not folder.expanduser().is_dir():
        found = "a file" if folder.expanduser().exists() else "nothing there"
        raise DataError(f"--data-dir {folder}: expected a folder with <task>.jsonl files, found {found}")


def _find(folder: Path, name: str) -> Path | None:
    """Return the file of a task; an unreadable file counts as found, so that reading it raises an error."""
    check_data_dir(folder)
    for parent in (folder, folder / "data"):
        if os.path.lexists(path := parent / f"{name}.jsonl"):
            return path
        for suffix in (".json", ".parquet"):
            if (other := parent / f"{name}{suffix}").exists():
                raise DataError(
                    f"{other}: LongBench's documents are read from its official files, here {name}.jsonl; "
                    f"unpack {ARCHIVE} of the dataset {REPOSITORY}"
                )
    return None


def _not_in(folder: Path, name: str) -> str:
    return (
        f"no {name}.jsonl in {folder}{did_you_mean(folder, lambda beneath: _has_context(beneath / f'{name}.jsonl'))}; "
    )


def _has_context(path: Path) -> bool:
    """Return whether a file contains documents. Files of predictions have the same names, but no context."""
    try:
        with path.open("rb") as file:
            return "context" in read_record(file.readline(LARGEST_ROW))
    except (OSError, DataError):
        return False


def _from_file(task: Task, name: str, path: Path, selection: DocumentSelection) -> LongBenchRows:
    try:
        with path.open("rb") as file:
            return _read(task, name, file, f"data-dir {path}", selection)
    except OSError as error:
        raise DataError(f"{path} ({task.name}): cannot be read: {error.strerror or error}") from error


def _from_archive(task: Task, name: str, path: Path, selection: DocumentSelection) -> LongBenchRows:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.namelist() if Path(member).name == f"{name}.jsonl"]
            if not members:
                raise DataError(f"{path} has no {name}.jsonl; it is not LongBench's {ARCHIVE}: delete it and try again")
            with archive.open(members[0]) as file:
                return _read(task, name, file, f"hub {REPOSITORY}, {members[0]}", selection)
    except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:  # RuntimeError: an encrypted member
        raise DataError(
            f"{path} ({task.name}): cannot be read ({first_line(error)}); delete it and try again"
        ) from error


def _read(task: Task, name: str, file: IO[bytes], source: str, selection: DocumentSelection) -> LongBenchRows:
    lines = list(_lines(file, source))
    sha = blob_hash(lines)
    official_name = next((stem for stem, pinned in OFFICIAL_BLOBS.items() if pinned == sha), None)
    if official_name not in (None, name):
        raise DataError(f"{source}: this is the official file of {official_name}, where {name}'s was expected")
    official = official_name is not None
    start = None if official else template(task).split("{context}")[0]
    most = selection.count if isinstance(selection, FirstDocuments) else None
    rows: list[LongBenchDocument] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if most is not None and len(rows) >= most:
            break
        # Editors on Windows write a byte-order mark; a blank line, such as the last one, is no row
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if not line.strip():
            continue
        try:
            row = parse_row(task, line, len(rows), template_start=start)
            rows.append(_with_unique_id(row, number, seen, official))
        except DataError as error:
            raise DataError(f"{source}, line {number} ({task.name}): {error}") from error
    if not rows:
        raise DataError(f"{source} ({task.name}): expected rows, found none")
    rows = [rows[place] for place in selection.places(task.name, [task.name] * len(rows))]
    return LongBenchRows(tuple(rows), source, official, sha)


def _with_unique_id(row: LongBenchDocument, number: int, seen: dict[str, int], official: bool) -> LongBenchDocument:
    """Return the row with a unique id, by which a resumed run identifies it."""
    if row.id in seen and not (official or row.id.startswith(CONTENT_ID)):
        raise DataError(f"field '_id': {row.id!a} is in line {seen[row.id]} already; were rows appended to the file?")
    copies = 2
    identity = row.id
    while identity in seen:
        identity, copies = f"{row.id}-{copies}", copies + 1
    seen[identity] = number
    return replace(row, id=identity)


def _lines(file: IO[bytes], source: str) -> Iterator[bytes]:
    """Yield lines with line feeds as line ends; raise a `DataError` for a line longer than `LARGEST_ROW`."""
    number = 0
    while line := file.readline(LARGEST_ROW + 1):
        number += 1
        if len(line) > LARGEST_ROW:
            raise DataError(
                f"{source}, line {number}: a row of more than {LARGEST_ROW >> 20} MiB, while official rows have "
                "less than one; expected one JSON object a line"
            )
        yield line[:-2] + b"\n" if line.endswith(b"\r\n") else line
