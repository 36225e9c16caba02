"""Temporary folders are removed with their process, or after a kill when the next one is created."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evalkit.errors import CheckpointError
from evalkit.paths import temporary_folder

HOLD = """
import sys, time
from pathlib import Path
from evalkit.paths import temporary_folder
with temporary_folder(Path(sys.argv[1])) as folder:
    (folder / "content").write_text("x")
    print(folder, flush=True)
    time.sleep(600)
"""


def aged(folder: Path) -> Path:
    """Set a folder's time to an hour ago."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - 3600,) * 2)
    return folder


def test_folders_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    """Kept are those of living processes, new ones, whose owner may be about to lock them, and those without a lock."""
    with temporary_folder(tmp_path) as folder:
        (folder / "file").write_text("x", encoding="utf-8")
    assert list(tmp_path.glob(".evalkit-*")) == []
    processes, folders = [], []
    for _ in range(3):
        processes.append(
            subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        )
        assert processes[-1].stdout is not None
        folders.append(Path(processes[-1].stdout.readline().strip()).parent)
    try:
        for process in processes[:2]:
            process.kill()
            process.wait()
        dead, young, living = folders
        aged(dead), aged(living)
        without, linked, elsewhere = tmp_path / ".evalkit-other", tmp_path / ".evalkit-linked", tmp_path / "elsewhere"
        for created in (without, elsewhere):
            created.mkdir()
        (elsewhere / "lock").touch()
        linked.symlink_to(aged(elsewhere))
        aged(without)
        with temporary_folder(tmp_path) as folder:
            assert set(tmp_path.glob(".evalkit-*")) == {young, living, without, linked, folder.parent}
        assert (living / "files" / "content").is_file() and (elsewhere / "lock").exists()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_nowhere_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="set TMPDIR"), temporary_folder(tmp_path / "absent"):
        pass
