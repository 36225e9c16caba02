"""One process at a time writes a run folder, also between machines, and none for ever."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from evalkit.benchmarks import session
from evalkit.errors import RunInUseError
from evalkit.models.loading.fingerprint import state_of
from evalkit.runs import writing
from evalkit.runs.folder import RESULTS, load_run
from evalkit.runs.writing import LEASE, Owner, is_locked, locked, open_run, read_owner
from tests.runs.conftest import MANIFEST as CONTENT
from tests.runs.conftest import Small


def owned(folder: Path, age: float = 0.0, **changes: Any) -> None:
    """Write an owner's file, as on another machine, that was renewed some seconds ago."""
    content = Owner(host="another-machine", process=7, done=0.5, seconds_left=60.0).model_dump() | changes
    (folder / ".owner").write_text(json.dumps(content))
    then = time.time() - age
    os.utime(folder / ".owner", (then, then))


def free(folder: Path) -> None:
    assert not is_locked(folder)
    with locked(folder):
        assert str(read_owner(folder)) == f"process {os.getpid()} on {platform.node()}"


def test_a_folder_is_held_renewed_and_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By this machine's lock; that of another machine is a lease (tests/guards)."""
    monkeypatch.setattr(writing, "RENEWAL", 0.05)
    assert not is_locked(tmp_path) and list(tmp_path.iterdir()) == []
    with locked(tmp_path) as held:
        assert is_locked(tmp_path)
        with pytest.raises(RunInUseError, match=rf"process {os.getpid()} on"), locked(tmp_path):
            pass
        held.report(0.75, 12.0)
        deadline = time.monotonic() + 20
        while (owner := read_owner(tmp_path)) is None or owner.done != 0.75:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        before = (tmp_path / ".owner").stat().st_mtime_ns
        while (tmp_path / ".owner").stat().st_mtime_ns == before:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    owner = read_owner(tmp_path)
    assert owner is not None and (owner.done, owner.seconds_left, owner.released) == (0.75, 12.0, True)
    free(tmp_path)
    for content in (b"", b'{"host": 1}', b"\xff" * 100, b"x" * (1 << 17)):  # a damaged owner's file protects nothing
        (tmp_path / ".owner").write_bytes(content)
        assert read_owner(tmp_path) is None
        free(tmp_path)


def test_on_this_machine_the_lock_counts_and_not_the_lease(tmp_path: Path) -> None:
    """Of a process that was stopped for minutes, and of one whose file could not be written."""
    with FileLock(tmp_path / ".lock", thread_local=False):
        owned(tmp_path, age=LEASE + 30, host=platform.node())
        assert is_locked(tmp_path)
    owned(tmp_path, host=platform.node(), process=1)
    assert not is_locked(tmp_path)
    # `is_locked` of another process holds the lock for a moment, which does not disturb a process that begins
    look = FileLock(tmp_path / ".lock", thread_local=False)
    look.acquire()
    threading.Timer(0.05, look.release).start()
    with locked(tmp_path):
        pass


# Several processes that meet


def test_a_run_that_another_process_has_finished_meanwhile_is_opened(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[Any] = []

    def late(*arguments: Any) -> Any:
        """Open the folder after another process has written the run."""
        monkeypatch.undo()
        states.append(state_of(small().folder / RESULTS))
        return open_run(*arguments)

    monkeypatch.setattr(session, "open_run", late)
    assert state_of(small().folder / RESULTS) == states[0]


def test_a_folder_that_an_interrupted_process_removes_is_made_again(tmp_path: Path) -> None:
    """Though this process already waits for its lock."""
    held, entered = threading.Event(), threading.Event()

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt), open_run(tmp_path, "run", dict(CONTENT)):
            held.set()
            time.sleep(0.2)  # the other one waits
            raise KeyboardInterrupt

    def second() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writing, "_PATIENCE", 20.0)
            with open_run(tmp_path, "run", dict(CONTENT)):
                assert load_run(tmp_path / "run").manifest["id"] == CONTENT["id"]
                entered.set()

    first = threading.Thread(target=interrupted)
    first.start()
    assert held.wait(20)
    second()
    first.join()
    assert entered.is_set() and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_of_another_process_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there was no folder when this process began."""
    real, content = writing.locked, CONTENT | {"imported": {"origin": "a log", "files": {}}}

    @contextmanager
    def late(folder: Path) -> Iterator[writing.Lock]:
        monkeypatch.undo()
        with open_run(tmp_path, "run", dict(content)) as writer:
            writer.save_results({})
        with real(folder) as held:
            yield held

    monkeypatch.setattr(writing, "locked", late)
    with pytest.raises(KeyboardInterrupt), open_run(tmp_path, "run", dict(content)):
        raise KeyboardInterrupt
    assert (tmp_path / "run" / RESULTS).exists()
