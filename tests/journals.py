"""Reading and editing the journals of runs in tests."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from evalkit.requests.rows import GeneratedRow, ScoredRow
from evalkit.runs.columns import schema_of
from evalkit.runs.folder import JOURNAL, Run
from evalkit.runs.journal import Entry, Journal
from evalkit.runs.traits import BatchDevice


def entries_of(run: Run) -> list[tuple[Entry, list[Any]]]:
    """Return the entries of the journal of a run with requests, with their rows; none may be damaged."""

    def refuse(line: str) -> None:
        raise AssertionError(line)

    types: tuple[type[Any], ...] = (ScoredRow, GeneratedRow)
    entries = []
    for entry, batch in Journal(run.folder / JOURNAL, run.manifest["id"], types, refuse).read():
        [row] = [row for row in types if schema_of(row).equals(batch.schema)]
        entries.append((entry, [row(**values) for values in batch.to_pylist()]))
    return entries


def line_of(payload: bytes) -> bytes:
    """Return a valid line of a journal with any content."""
    return b"%08x %s\n" % (zlib.crc32(payload), payload)


def relocate(journal: Path, place: BatchDevice, keep: int | None = None) -> None:
    """Change the device of a journal's first batches, and remove the last ones.

    Args:
        journal: of a run.
        place: where they were computed.
        keep: how many are left; None: all.
    """
    lines = []
    for line in journal.read_bytes().splitlines()[:keep]:
        header, _, rows = line.partition(b" ")[2].rpartition(b" ")
        run, task, batch, seconds, _, columns = json.loads(header)
        content = [run, task, batch, seconds, place, columns]
        lines.append(line_of(json.dumps(content, separators=(",", ":")).encode() + b" " + rows))
    journal.write_bytes(b"".join(lines))
