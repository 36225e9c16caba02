"""Locks of run folders: one writer, also between machines, and none for ever."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from evalkit.errors import RunInUseError
from evalkit.runs import lock as module
from evalkit.runs.lock import LEASE, Owner, is_locked, locked, read_owner

HOLDING = """
import sys, time
from pathlib import Path
from evalkit.runs.lock import locked
with locked(Path(sys.argv[1])) as held:
    held.report(0.25, 100.0)
    print("held", flush=True)
    time.sleep(300)
"""


def owned(folder: Path, age: float = 0.0, **changes: Any) -> None:
    """Write an owner's file, as on another machine, that was renewed some seconds ago."""
    content = Owner(host="another-machine", process=7, done=0.5, seconds_left=60.0).model_dump() | changes
    (folder / ".owner").write_text(json.dumps(content))
    then = time.time() - age
    os.utime(folder / ".owner", (then, then))


def test_a_held_folder_is_refused_and_names_its_holder(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    with locked(tmp_path) as held:
        assert is_locked(tmp_path)
        with (
            pytest.raises(RunInUseError, match=rf"in use by another process \(process {os.getpid()} on"),
            locked(tmp_path),
        ):
            pass
        held.report(0.5, 12.0)
    assert not is_locked(tmp_path)
    owner = read_owner(tmp_path)
    assert owner is not None
    assert (owner.host, owner.process, owner.done, owner.seconds_left, owner.released) == (
        platform.node(), os.getpid(), 0.5, 12.0, True,
    )  # fmt: skip
    with locked(tmp_path):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert is_locked(tmp_path)
    with pytest.raises(RunInUseError, match=f"process {process.pid} on"), locked(tmp_path):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        owner = read_owner(tmp_path)
        assert owner is not None
        assert owner.process == os.getpid()


def test_another_machines_folder_is_its_own_while_it_renews_its_file(tmp_path: Path) -> None:
    """Even where the file system does not pass on the lock."""
    owned(tmp_path, age=LEASE - 30)
    assert is_locked(tmp_path)
    with pytest.raises(RunInUseError, match="process 7 on another-machine"), locked(tmp_path):
        pass
    owned(tmp_path, age=LEASE + 30)
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert str(read_owner(tmp_path)) == f"process {os.getpid()} on {platform.node()}"


def test_a_folder_that_another_machine_has_released_is_free(tmp_path: Path) -> None:
    owned(tmp_path, released=True)
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("content", [b"", b"[]", b'{"host": 1}', b"\xff" * 100, b"x" * (1 << 17)])
def test_a_damaged_owners_file_protects_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".owner").write_bytes(content)
    assert read_owner(tmp_path) is None
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert is_locked(tmp_path)


def test_the_progress_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEWAL", 0.05)
    with locked(tmp_path) as held:
        held.report(0.75, 3.0)
        deadline = time.monotonic() + 20
        while (owner := read_owner(tmp_path)) is None or owner.done != 0.75:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert owner.seconds_left == 3.0
        before = (tmp_path / ".owner").stat().st_mtime_ns
        time.sleep(0.3)
        assert (tmp_path / ".owner").stat().st_mtime_ns > before


def test_a_look_at_the_state_does_not_disturb_a_process_that_begins(tmp_path: Path) -> None:
    """`is_locked` holds the lock for a moment."""
    owned(tmp_path, host=platform.node(), process=1)
    look = FileLock(tmp_path / ".lock", thread_local=False)
    look.acquire()
    threading.Timer(0.05, look.release).start()
    with locked(tmp_path):
        pass


def test_on_this_machine_the_lock_counts_and_not_the_lease(tmp_path: Path) -> None:
    """Of a process that was stopped for minutes, and of one whose file could not be written."""
    held = FileLock(tmp_path / ".lock", thread_local=False)
    with held:
        assert is_locked(tmp_path)
        owned(tmp_path, age=LEASE + 30, host=platform.node())
        assert is_locked(tmp_path)
    owned(tmp_path, host=platform.node())
    assert not is_locked(tmp_path)


def test_a_look_leaves_nothing_behind(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []
