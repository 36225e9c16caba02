"""Guards against loss: what was scored stays, is scored once, and nobody's files are overwritten."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import evalkit
from evalkit.cli import main
from tests.guards.bench import (
    JOURNAL,
    MANIFEST,
    RESULTS,
    SCORES,
    Bench,
    Guard,
    Guards,
    Outcome,
    edit,
    journal_line,
    write,
)

GUARDS = Guards()
MANY = ("--tasks", "piqa,boolq", "--token-budget", 64)
"""A batch for each document."""


@pytest.mark.parametrize("guard", GUARDS)
def test_loss(guard: Guard, bench: Bench) -> None:
    guard.check(bench)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _run(bench: Bench, *more: object) -> Path:
    return bench.folder_of(bench.score(None, *MANY, *more))


# The journal


def _resumed(bench: Bench, damage: Callable[[bytes], bytes], lost: int | None) -> None:
    """Damage the journal of an unfinished run and give its command again: the same numbers, from few new batches."""
    folder = _run(bench)
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

    outcome = bench.evaluate(str(bench.shared.model), tasks="piqa,boolq", token_budget=64, progress=Counting(live=False))
    assert bench.folder_of(outcome) == folder
    assert evalkit.load_run(folder).scores.equals(expected)
    kept = [line for line in dict.fromkeys(damage(whole).splitlines(keepends=True)) if line in whole.splitlines(keepends=True)]
    assert len(done) == (count - len(kept) if lost is None else lost)
    assert (folder / JOURNAL).read_bytes().startswith(b"".join(kept))
    assert (folder / JOURNAL).read_bytes().count(b"\n") == count


def _flipped(journal: bytes) -> bytes:
    """A bit of the rows of the third line flipped, which stay base64."""
    rows = journal.splitlines(keepends=True)
    place = len(rows[2]) - 40
    rows[2] = rows[2][:place] + (b"A" if rows[2][place : place + 1] != b"A" else b"B") + rows[2][place + 1 :]
    return b"".join(rows)


GUARDS.add("journal-torn", "A torn last line, as a kill leaves it, costs its batch only.", lambda bench: _resumed(bench, lambda journal: journal[:-30], 1))
GUARDS.add("journal-flipped", "A damaged line costs its batch only.", lambda bench: _resumed(bench, _flipped, 1))
GUARDS.add("journal-missing-lines", "Only the batches that are missing are computed.", lambda bench: _resumed(bench, lambda journal: b"".join(journal.splitlines(keepends=True)[:3]), None))
GUARDS.add("journal-twice", "A line that occurs twice counts once.", lambda bench: _resumed(bench, lambda journal: journal + journal, 0))
GUARDS.add("journal-blank", "Blank lines and line ends of another system cost nothing.", lambda bench: _resumed(bench, lambda journal: b"\n" + journal.replace(b"\n", b"\r\n"), 0))


def _journal(identity: str, text: str, change: Callable[[list[Any], bytes], bytes], *nouns: str) -> None:
    """A line whose checksum is right, in the journal of an unfinished run: an error, and the journal stays."""

    def act(bench: Bench) -> Outcome:
        folder = _run(bench)
        (folder / RESULTS).unlink()
        line = (folder / JOURNAL).read_bytes().splitlines()[0]
        header, _, rows = line.partition(b" ")[2].rpartition(b" ")
        content = json.loads(header)
        rows = change(content, rows)
        data = (folder / JOURNAL).read_bytes() + journal_line(json.dumps(content).encode() + b" " + rows)
        (folder / JOURNAL).write_bytes(data)
        outcome = bench.score(None, *MANY)
        assert (folder / JOURNAL).read_bytes() == data
        return outcome

    GUARDS.add(identity, text, act, JOURNAL, *nouns)


def _set(place: int, value: Any) -> Callable[[list[Any], bytes], bytes]:
    def change(content: list[Any], rows: bytes) -> bytes:
        content[place] = value
        return rows

    return change


_journal("journal-of-another", "A batch of another run is not taken, nor dropped.", _set(0, "0" * 12), "it belongs to run")
_journal("journal-columns", "Nor one of other columns.", _set(5, "0" * 8), "other columns")
_journal("journal-seconds", "Nor one with a number that is not finite.", _set(3, float("nan")), "NaN")
_journal("journal-type", "Nor one of another form.", _set(2, "0"), "'batch'")
_journal("journal-rows", "Nor one whose rows are truncated.", lambda content, rows: rows[: len(rows) // 8 * 4], "its rows")


@GUARDS("flushed", "Each batch is on the disk before the next one starts.")
def _(bench: Bench) -> None:
    real, sizes = os.fsync, []

    def counted(number: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{number}")).name == JOURNAL:
            sizes.append(os.fstat(number).st_size)
        real(number)

    bench.patch.setattr(os, "fsync", counted)
    journal = (_run(bench) / JOURNAL).read_bytes()
    ends = [place + 1 for place in range(len(journal)) if journal[place : place + 1] == b"\n"]
    assert sizes == ends


# Disks and signals


def _full(bench: Bench, name: str) -> None:
    """Let the disk be full once a file of a name, or its replacement, is flushed."""
    real = os.fsync

    def full(number: int) -> None:
        if name in Path(os.readlink(f"/proc/self/fd/{number}")).name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(number)

    bench.patch.setattr(os, "fsync", full)


@GUARDS("full-journal", "A batch that cannot be stored ends the run with an error.", JOURNAL, "No space left on device")
def _(bench: Bench) -> Outcome:
    _full(bench, JOURNAL)
    return bench.score()


for _name in (MANIFEST, SCORES, RESULTS):

    @GUARDS(f"full-{_name}", f"A {_name} that cannot be written is an error, after which the same command scores nothing "
            "again.", _name, "No space left on device")
    def _(bench: Bench, name: str = _name) -> Outcome:
        with bench.patch.context() as patch:
            bench.patch, kept = patch, bench.patch
            _full(bench, name)
            outcome = bench.score(None, *MANY)
            bench.patch = kept
        [folder] = Path("runs").glob("*") if Path("runs").exists() and any(Path("runs").iterdir()) else [None]
        if folder is None:
            return outcome
        assert not (folder / RESULTS).exists()
        journal = (folder / JOURNAL).read_bytes()
        assert _run(bench) == folder and (folder / JOURNAL).read_bytes() == journal
        return outcome


@GUARDS("full-export", "An export that cannot be written is an error, and the old file stays.", "table.csv", "No space left")
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
        write(f"documents/{task}.jsonl", text * 20)
    process = bench.process("run", *bench.options(None, "--data-dir", "documents", *MANY))
    deadline = time.monotonic() + 100
    while not (found := list(Path("runs").glob(f"*/{JOURNAL}"))) or found[0].read_bytes().count(b"\n") < 2:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    return process, found[0]


def _again(bench: Bench, journal: Path) -> None:
    kept = journal.read_bytes()
    assert not (journal.parent / RESULTS).exists()
    outcome = bench.score(None, "--data-dir", "documents", *MANY)
    assert bench.folder_of(outcome) == journal.parent
    whole = kept[: kept.rfind(b"\n") + 1]
    assert journal.read_bytes().startswith(whole)
    assert len(set(journal.read_bytes().splitlines())) == journal.read_bytes().count(b"\n")
    table = evalkit.load_run(journal.parent).scores
    assert len(table) == len(table[["task", "doc_id", "choice"]].drop_duplicates()) == 2 * 2 * 80


@GUARDS("kill-9", "After a kill the same command computes only what is missing.")
def _(bench: Bench) -> None:
    process, journal = _begun(bench)
    process.kill()
    process.communicate()
    _again(bench, journal)


for _signal, _code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):

    @GUARDS(f"signal-{_code}", f"{_signal.name} ends a run with code {_code}, and what is scored is kept.", marks=pytest.mark.slow)
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
        folder = _run(bench)
        (folder / RESULTS).unlink()
        write(folder / ".owner", json.dumps({"host": "another-machine", "process": 7} | changes))
        then = time.time() - age
        os.utime(folder / ".owner", (then, then))
        return bench.score(None, *MANY)

    return act


GUARDS.add("lock-machine", "Nor where its process is on another machine.", _owned(30), "process 7 on another-machine")
GUARDS.add("lock-lease", "A machine that has not renewed its name for minutes is gone.", _owned(3600), code=0)
GUARDS.add("lock-released", "So is one that has ended the run.", _owned(30, released=True), code=0)


# What stands in a run's place


def _left(change: Callable[[Path], Any]) -> Callable[[Bench], Outcome]:
    """Change a finished run's folder and give its command again; what is there stays."""

    def act(bench: Bench) -> Outcome:
        folder = _run(bench)
        change(folder)
        before = {name: data for name, data in _files(folder).items() if not name.startswith(".")}
        outcome = bench.score(None, *MANY)
        if outcome.code:
            assert before.items() <= _files(folder).items()
        return outcome

    return act


def _unlink(*names: str) -> Callable[[Path], Any]:
    return lambda folder: [(folder / name).unlink() for name in names]


for _name in (SCORES, RESULTS, MANIFEST):
    GUARDS.add(f"without-journal-{_name}", f"A run that lacks its {_name} and its journal is not scored again unasked.", _left(_unlink(_name, JOURNAL)), f"no {JOURNAL}")
GUARDS.add("manifest-damaged", "A damaged manifest is not overwritten.", _left(lambda folder: (folder / MANIFEST).write_text("{")), MANIFEST, "damaged")


@GUARDS("rebuilt", "What is lost of a run is rebuilt from its journal, and nothing is scored.")
def _(bench: Bench) -> None:
    folder = _run(bench)
    before = _files(folder)
    for name in (SCORES, RESULTS):
        (folder / name).unlink()
        bench.patch.setattr("torch.nn.Module.__call__", lambda *_, **__: pytest.fail("the model ran"))
        assert _run(bench) == folder
        assert (folder / name).read_bytes() == before[name] and (folder / JOURNAL).read_bytes() == before[JOURNAL]


@GUARDS("finished", "A finished run is opened: nothing is scored, and no file changes.")
def _(bench: Bench) -> None:
    folder = _run(bench)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir() if not path.name.startswith(".")}
    bench.patch.setattr("torch.nn.Module.__call__", lambda *_, **__: pytest.fail("the model ran"))
    assert _run(bench) == folder
    assert before == {path: path.stat().st_mtime_ns for path in before}


@GUARDS("foreign-folder", "A folder that a run has found, and not made, is not removed when the run fails.", "holds NaN")
def _(bench: Bench) -> Outcome:
    def diverged(tensors: Any) -> None:
        tensors["model.norm.weight"].fill_(float("nan"))

    model = bench.weights(diverged)
    made: list[Path] = []
    from tests.guards.bench import once, run_is_opened

    def claim(event: str, given: tuple[Any, ...]) -> bool:
        if run_is_opened(event, given):
            made.append(Path(str(given[0])))
        return bool(made)

    with once(claim, lambda: None):
        first = bench.score(model)
    assert first.code == 1 and not made[0].exists()  # its own is removed
    write(made[0] / "notes.txt", "mine")
    outcome = bench.score(model)
    assert (made[0] / "notes.txt").read_text(encoding="utf-8") == "mine"
    return outcome


@GUARDS("output-file", "An output that is a file is not replaced.", "runs", "choose another --output")
def _(bench: Bench) -> Outcome:
    write("runs", "mine")
    return bench.score()


GUARDS.add("export-itself", "A run is not replaced by its export.", lambda bench: bench("export", folder := bench.run(), "--to", "run", "--output", folder.parent), "holds the run itself", code=2)
GUARDS.add("checkpoint-exists", "A checkpoint is not written over another folder.", lambda bench: (bench.copy(name="made"), bench("models", "init", "llama-125m-vanilla", "--tokenizer", bench.shared.model, "--output", "made"))[1], "--output made", "already exists", code=2)
GUARDS.add("checkpoint-here", "Nor over the working directory.", lambda bench: bench("models", "init", "llama-125m-vanilla", "--tokenizer", bench.shared.model, "--output", "."), "working directory", code=2)


@GUARDS("temporary", "Of temporary folders only abandoned ones of evalkit are removed.")
def _(bench: Bench) -> None:
    import tempfile

    bench.patch.setattr(tempfile, "tempdir", str(bench.place))
    for name in (".evalkit-mine/notes", ".evalkit-young/lock", ".evalkit-old/lock"):
        write(name, "")
    os.utime(".evalkit-old/lock", (0, 0))
    Path(".evalkit-link").symlink_to(bench.copy(name="precious"))
    assert bench.score().code == 0
    assert Path(".evalkit-mine/notes").exists() and Path(".evalkit-young/lock").exists() and Path("precious/config.json").exists()
    assert not Path(".evalkit-old").exists()


# Failures that are not swallowed


def _study(bench: Bench, **checkpoints: Path) -> Path:
    content = {"output": "runs", "settings": {"data_dir": str(bench.shared.documents), "allow_unofficial_data": True, "token_budget": 64, "device": "cpu"}, "checkpoints": {name: str(path) for name, path in checkpoints.items()}, "benchmarks": {"zeroshot8": {"tasks": ["piqa", "boolq"]}}}
    return write("study.yaml", content)


@GUARDS("study-failure", "A study of which a run fails ends with an error, and its other runs are kept.")
def _(bench: Bench) -> None:
    def diverged(tensors: Any) -> None:
        tensors["model.norm.weight"].fill_(float("nan"))

    outcome = bench("study", "run", _study(bench, A=bench.weights(diverged), B=bench.shared.model))
    assert outcome.code == 1 and "1 finished, 1 failed" in outcome.out
    assert len(list(Path("runs").glob(f"*/{RESULTS}"))) == 1


@GUARDS("watch-failure", "So does a watch of which a checkpoint fails.", "not evaluated", "checkpoint-1")
def _(bench: Bench) -> Outcome:
    for step in (1, 2):
        bench.copy(name=f"training/checkpoint-{step}")
    write("training/checkpoint-1/tokenizer.json", "{}")
    options = bench.options(None, "--watch", "training", "--until", 2)
    outcome = bench("run", *options[2:])
    assert len(list(Path("runs").glob(f"*/{RESULTS}"))) == 1
    return outcome


@GUARDS("cluster-killed", "A study on workers that is killed resumes, on workers or without.", marks=[pytest.mark.cluster, pytest.mark.slow])
def _(bench: Bench) -> None:
    bench.patch.setenv("HOME", str(bench.place))
    study = _study(bench, A=bench.shared.model, B=bench.shared.other)
    process = bench.process("study", "run", study, "--workers", 1)
    deadline = time.monotonic() + 200
    while not any(path.read_bytes().count(b"\n") for path in Path("runs").glob(f"*/{JOURNAL}")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    kept = {path: path.read_bytes() for path in Path("runs").glob(f"*/{JOURNAL}")}
    assert bench("study", "run", study).code == 0
    assert all(path.read_bytes().startswith(data[: data.rfind(b"\n") + 1]) for path, data in kept.items())
    assert len(list(Path("runs").glob(f"*/{RESULTS}"))) == 2
