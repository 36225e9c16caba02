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


def aged(folder: Path) -> None:
    """Set a folder's time to an hour ago."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - 3600,) * 2)


def holder(place: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a folder, and the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(place)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip()).parent


def made(place: Path) -> list[Path]:
    return sorted(place.glob(".evalkit-*"))


def test_empty_and_gone_at_the_end(tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as folder:
        assert list(folder.iterdir()) == []
        (folder / "one").write_text("x", encoding="utf-8")
    assert made(tmp_path) == []


def test_a_killed_process_leaves_nothing_for_long(tmp_path: Path) -> None:
    process, left = holder(tmp_path)
    with process:
        process.kill()
    aged(left)
    with temporary_folder(tmp_path) as folder:
        assert made(tmp_path) == [folder.parent]


def test_the_folder_of_a_living_process_stays(tmp_path: Path) -> None:
    process, locked = holder(tmp_path)
    with process:
        try:
            aged(locked)
            with temporary_folder(tmp_path):
                pass
            assert (locked / "files" / "content").is_file()
        finally:
            process.kill()


def test_new_folders_and_folders_without_a_lock_are_kept(tmp_path: Path) -> None:
    """Its owner may be about to lock it, or is of another version."""
    process, young = holder(tmp_path)
    with process:
        process.kill()
    without = tmp_path / ".evalkit-other"
    without.mkdir()
    aged(without)
    linked = tmp_path / ".evalkit-linked"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    aged(elsewhere)
    linked.symlink_to(elsewhere)
    with temporary_folder(tmp_path) as folder:
        assert made(tmp_path) == sorted((young, without, linked, folder.parent))
    assert (elsewhere / "lock").exists()


def test_nowhere_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no temporary folder can be created in .*; set TMPDIR"), \
            temporary_folder(tmp_path / "absent"):  # fmt: skip
        pass
