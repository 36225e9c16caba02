"""Guards against loss, journal: what was scored stays on the disk, and is scored once."""

from __future__ import annotations

import base64
import errno
import json
import os
import signal
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import evalkit
from evalkit.requests.rows import ScoredRow
from evalkit.runs.columns import from_bytes
from tests.guards.bench import (
    JOURNAL,
    MANIFEST,
    RESULTS,
    SCORES,
    SMALL_BATCHES,
    Bench,
    Guard,
    Guards,
    Outcome,
    journal_line,
    write,
)

GUARDS = Guards()


@pytest.mark.parametrize("guard", GUARDS)
def test_journal(guard: Guard, bench: Bench) -> None:
    guard.check(bench)


# The journal


def _resumed(bench: Bench, damage: Callable[[bytes], bytes], lost: int | None) -> None:
    """Damage the journal of an unfinished run and give its command again: the same numbers, from few new batches."""
    folder = bench.batched()
    whole, expected = (folder / JOURNAL).read_bytes(), evalkit.load_run(folder).scores
    count = whole.count(b"\n")
    assert count >= 6
    for name in (RESULTS, SCORES):
        (folder / name).unlink()
    (folder / JOURNAL).write_bytes(damage(whole))
    done: list[tuple[str, ...]] = []

    class Counting(evalkit.Progress):
        def advance(self, *given: Any) -> None:
            done.append(given)
            super().advance(*given)

    outcome = bench.evaluate(
        str(bench.shared.model), tasks="piqa,boolq", token_budget=64, progress=Counting(live=False)
    )
    assert bench.folder_of(outcome) == folder
    assert evalkit.load_run(folder).scores.equals(expected)
    kept = [
        line
        for line in dict.fromkeys(damage(whole).splitlines(keepends=True))
        if line in whole.splitlines(keepends=True)
    ]
    assert len(done) == (count - len(kept) if lost is None else lost)
    assert (folder / JOURNAL).read_bytes().startswith(b"".join(kept))
    assert (folder / JOURNAL).read_bytes().count(b"\n") == count


def _without_a_segment(rows: bytes) -> bytes:
    """Rows of which the first lacks a segment's code, but not its numbers."""
    stored = from_bytes(rows, ScoredRow)
    segments = stored["segments"].to_pylist()
    segments[0] = segments[0][1:]
    field = stored.schema.field("segments")
    columns = [pa.array(segments, field.type) if name == field.name else stored[name] for name in stored.schema.names]
    return zlib.compress(pa.RecordBatch.from_arrays(columns, schema=stored.schema).serialize())


def _flipped(journal: bytes) -> bytes:
    """A bit of the rows of the third line flipped, which stay base64."""
    rows = journal.splitlines(keepends=True)
    place = len(rows[2]) - 40
    rows[2] = rows[2][:place] + (b"A" if rows[2][place : place + 1] != b"A" else b"B") + rows[2][place + 1 :]
    return b"".join(rows)


GUARDS.add("journal-torn", "A torn last line, as a kill leaves it, costs its batch only.",
    lambda bench: _resumed(bench, lambda journal: journal[:-30], 1))  # fmt: skip
GUARDS.add("journal-flipped", "A damaged line costs its batch only.", lambda bench: _resumed(bench, _flipped, 1))
GUARDS.add("journal-missing-lines", "Only the batches that are missing are computed.",
    lambda bench: _resumed(bench, lambda journal: b"".join(journal.splitlines(keepends=True)[:3]), None))  # fmt: skip
GUARDS.add("journal-twice", "A line that occurs twice counts once.",
    lambda bench: _resumed(bench, lambda journal: journal + journal, 0))  # fmt: skip
GUARDS.add("journal-blank", "Blank lines and line ends of another system cost nothing.",
    lambda bench: _resumed(bench, lambda journal: b"\n" + journal.replace(b"\n", b"\r\n"), 0))  # fmt: skip


def _journal(identity: str, text: str, change: Callable[[list[Any], bytes], bytes], *nouns: str) -> None:
    """A line whose checksum is right, in the journal of an unfinished run: an error, and the journal stays."""

    def act(bench: Bench) -> Outcome:
        folder = bench.batched()
        (folder / RESULTS).unlink()
        line = (folder / JOURNAL).read_bytes().splitlines()[0]
        header, _, rows = line.partition(b" ")[2].rpartition(b" ")
        content = json.loads(header)
        rows = change(content, rows)
        data = (folder / JOURNAL).read_bytes() + journal_line(json.dumps(content).encode() + b" " + rows)
        (folder / JOURNAL).write_bytes(data)
        outcome = bench.score(None, *SMALL_BATCHES)
        assert (folder / JOURNAL).read_bytes() == data
        return outcome

    GUARDS.add(identity, text, act, JOURNAL, *nouns)


def _set(place: int, value: Any) -> Callable[[list[Any], bytes], bytes]:
    def change(content: list[Any], rows: bytes) -> bytes:
        content[place] = value
        return rows

    return change


_journal("journal-of-another", "A batch of another run is not taken, nor dropped.", _set(0, "0" * 12),
    "it belongs to run")  # fmt: skip
_journal("journal-columns", "Nor one of other columns.", _set(5, "0" * 8), "other columns")
_journal("journal-seconds", "Nor one with a number that is not finite.", _set(3, float("nan")), "NaN")
_journal("journal-type", "Nor one of another form.", _set(2, "0"), "'batch'")
_journal("journal-lists", "Nor one whose rows have numbers of other segments than they name.",
    lambda content, rows: base64.b64encode(_without_a_segment(base64.b64decode(rows))), "segments")  # fmt: skip
_journal(
    "journal-rows", "Nor one whose rows lack their end.", lambda content, rows: rows[:-4], "its rows are truncated"
)


@GUARDS("flushed", "Each batch is on the disk before the next one starts.")
def _(bench: Bench) -> None:
    real, sizes = os.fsync, []

    def counted(number: int) -> None:
        if Path(f"/proc/self/fd/{number}").readlink().name == JOURNAL:
            sizes.append(os.fstat(number).st_size)
        real(number)

    bench.patch.setattr(os, "fsync", counted)
    journal = (bench.batched() / JOURNAL).read_bytes()
    ends = [place + 1 for place in range(len(journal)) if journal[place : place + 1] == b"\n"]
    assert sizes == ends


# Disks and signals


def _full(bench: Bench, name: str) -> None:
    """Let the disk be full once a file of a name, or its replacement, is flushed."""
    real = os.fsync

    def full(number: int) -> None:
        if name in Path(f"/proc/self/fd/{number}").readlink().name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(number)

    bench.patch.setattr(os, "fsync", full)


@GUARDS("full-journal", "A batch that cannot be stored ends the run with an error.", JOURNAL, "No space left on device")
def _(bench: Bench) -> Outcome:
    _full(bench, JOURNAL)
    return bench.score()


for _name in (MANIFEST, SCORES, RESULTS):

    @GUARDS(f"full-{_name}",
            f"A {_name} that cannot be written is an error, after which the same command scores nothing again.",
            _name, "No space left on device")  # fmt: skip
    def _(bench: Bench, name: str = _name) -> Outcome:
        with bench.patch.context() as patch:
            bench.patch, kept = patch, bench.patch
            _full(bench, name)
            outcome = bench.score(None, *SMALL_BATCHES)
            bench.patch = kept
        [folder] = Path("runs").glob("*") if Path("runs").exists() and any(Path("runs").iterdir()) else [None]
        if folder is None:
            return outcome
        assert not (folder / RESULTS).exists()
        journal = (folder / JOURNAL).read_bytes()
        assert bench.batched() == folder and (folder / JOURNAL).read_bytes() == journal
        return outcome


@GUARDS("full-export", "An export that cannot be written is an error, and the old file stays.", "table.csv",
        "No space left")  # fmt: skip
def _(bench: Bench) -> Outcome:
    write("table.csv", "old")
    _full(bench, "table.csv")
    outcome = bench("table", "main_res", "--format", "csv", "--output", "table.csv")
    assert Path("table.csv").read_text(encoding="utf-8") == "old" and len(list(Path().glob("*table.csv*"))) == 1
    return outcome._replace(code=min(outcome.code, 1))


@GUARDS("full-page", "So is a page.", "page.html", "No space left")
def _(bench: Bench) -> Outcome:
    write("page.html", "old")
    _full(bench, "page.html")
    outcome = bench("report", bench.shared.run, "-o", "page.html")
    assert Path("page.html").read_text(encoding="utf-8") == "old"
    return outcome


@GUARDS("full-output", "Results that cannot be printed end a command with an error.")
def _(bench: Bench) -> None:
    with Path("/dev/full").open("w") as full:
        process = bench.process("rescore", bench.shared.run, stdout=full)
        process.communicate()
    assert process.returncode != 0


def _begun(bench: Bench) -> tuple[Any, Path]:
    """A run in a process of its own that has scored some of many documents."""
    Path("documents").mkdir()
    for task in ("piqa", "boolq"):
        text = (bench.shared.documents / f"{task}.jsonl").read_text(encoding="utf-8")
        write(f"documents/{task}.jsonl", text * 12)
    process = bench.process("run", *bench.options(None, "--data-dir", "documents", *SMALL_BATCHES))
    deadline = time.monotonic() + 100
    while not (found := list(Path("runs").glob(f"*/{JOURNAL}"))) or found[0].read_bytes().count(b"\n") < 2:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    return process, found[0]


def _again(bench: Bench, journal: Path) -> None:
    kept = journal.read_bytes()
    assert not (journal.parent / RESULTS).exists()
    outcome = bench.score(None, "--data-dir", "documents", *SMALL_BATCHES)
    assert bench.folder_of(outcome) == journal.parent
    whole = kept[: kept.rfind(b"\n") + 1]
    assert journal.read_bytes().startswith(whole)
    batches = [json.loads(line.split(b" ")[1])[1:3] for line in journal.read_bytes().splitlines()]
    assert len(batches) == len({tuple(batch) for batch in batches})
    table = evalkit.load_run(journal.parent).scores
    assert len(table) == len(table[["task", "doc_id", "choice"]].drop_duplicates()) == 2 * 2 * 48
    undisturbed = bench.score(None, "--data-dir", "documents", *SMALL_BATCHES, "--output", "undisturbed")
    assert table.equals(bench.scores_of(undisturbed))


@GUARDS("kill-9", "After a kill the same command computes only what is missing.")
def _(bench: Bench) -> None:
    process, journal = _begun(bench)
    process.kill()
    process.communicate()
    _again(bench, journal)


for _signal, _code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):

    @GUARDS(f"signal-{_code}", f"{_signal.name} ends a run with code {_code}, and what is scored is kept.",
            marks=pytest.mark.slow)  # fmt: skip
    def _(bench: Bench, number: signal.Signals = _signal, code: int = _code) -> None:
        process, journal = _begun(bench)
        process.send_signal(number)
        _, err = process.communicate()
        assert process.returncode == code and "Traceback" not in err and "finished batches are saved" in err
        _again(bench, journal)


# Several processes


@GUARDS("lock", "A run that a process writes is not written by another one.", "is in use by another process")
def _(bench: Bench) -> Outcome:
    found: list[Outcome] = []

    class Second(evalkit.Progress):
        def start(self, *given: Any) -> None:
            found.append(bench.score())
            super().start(*given)

    assert bench.evaluate(str(bench.shared.model), progress=Second(live=False)).code == 0
    return found[0]


def _owned(age: float, **changes: Any) -> Callable[[Bench], Outcome]:
    """A run whose writer is on another machine."""

    def act(bench: Bench) -> Outcome:
        folder = bench.batched()
        (folder / RESULTS).unlink()
        write(folder / ".owner", json.dumps({"host": "another-machine", "process": 7} | changes))
        then = time.time() - age
        os.utime(folder / ".owner", (then, then))
        return bench.score(None, *SMALL_BATCHES)

    return act


GUARDS.add("lock-machine", "Nor where its process is on another machine.", _owned(30), "process 7 on another-machine")
GUARDS.add("lock-lease", "A machine that has not renewed its name for minutes is gone.", _owned(3600), code=0)
GUARDS.add("lock-released", "So is one that has ended the run.", _owned(30, released=True), code=0)
