"""Temporary folders are removed with their process, or after a kill when the next one is created."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from evalkit.errors import CheckpointError, RunError
from evalkit.models.live import live_model
from evalkit.models.loading.locate import locate
from evalkit.models.zoo.averaging import average_checkpoints
from evalkit.models.zoo.named import write_random
from evalkit.paths import temporary_folder
from tests.models.loading import load_folder
from tests.models.small import small
from tests.models.test_gguf import write_gguf
from tests.tiny import tiny_checkpoint

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


# A full disk


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Let no file grow beyond a size in bytes."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def load_files(folder: Path, _: Path) -> None:
    with limited(3000):
        load_folder(folder)


def dequantise(folder: Path, place: Path) -> None:
    file = write_gguf(folder, place / "own.gguf")
    with limited(100_000):
        load_folder(file)


def save_tokenizer(folder: Path, _: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with limited(3000), live_model(model, None, tokenizer=tokenizer, device="auto", dtype="auto", attention="auto"):
        pytest.fail("its tokenizer was saved")


def write_new(folder: Path, place: Path) -> None:
    named = small(place, "vanilla")
    with limited(100_000):
        write_random(named, place / "new", seed=0, tokenizer=str(folder))


def write_mean(folder: Path, place: Path) -> None:
    others = [tiny_checkpoint(place / f"seed-{seed}", seed=seed) for seed in (1, 2)]
    with limited(100_000):
        average_checkpoints([locate(str(other)) for other in others], place / "new")


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (load_files, r"\.evalkit-\w+/files/checkpoint/tokenizer\.json"),
        (dequantise, r"/gguf/"),
        (save_tokenizer, r"\.evalkit-\w+/files"),
        (write_new, "/new"),
        (write_mean, "/new"),
    ],
)
def test_a_file_that_cannot_be_written_is_named(
    act: Callable[[Path, Path], None], named: str, folder: Path, tmp_path: Path
) -> None:
    """And not the checkpoint that is read meanwhile; also where a library in Rust writes."""
    with pytest.raises(RunError, match=rf"^\S*{named}\S*: cannot be written \(File too large\)"):
        act(folder, tmp_path)
