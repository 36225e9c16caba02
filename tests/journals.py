"""Reading and editing the journals of runs in tests."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from evalkit.runs.folder import JOURNAL, Run
from evalkit.runs.journal import Entry, Journal
from evalkit.runs.traits import BatchDevice


def entries_of(run: Run, row: type[Any]) -> list[tuple[Entry, list[Any]]]:
    """Return the entries of a run's journal with their rows; none may be damaged."""

    def refuse(line: str) -> None:
        raise AssertionError(line)

    found = Journal(run.folder / JOURNAL, run.manifest["id"], (row,), refuse).read()
    return [(entry, [row(**values) for values in batch.to_pylist()]) for entry, batch in found]


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
