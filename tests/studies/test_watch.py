"""Checkpoints that appear in a folder, written by real processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from evalkit.studies.watch import Arrived, Watcher
from tests.marks import fast
from tests.tiny import tiny_checkpoint

WRITER = Path(__file__).parent / "writer.py"
FAST: dict[str, Any] = {"settled": 0.5, "poll": 0.05, "stalled": 1.5}
"""Times for tests; a writer pauses for less than `settled`."""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("source") / "tiny", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def training(tmp_path: Path) -> Path:
    (tmp_path / "training").mkdir()
    return tmp_path / "training"


def write(source: Path, target: Path, how: str = "saved", seconds: float = 0.0) -> subprocess.Popen[str]:
    call = [sys.executable, str(WRITER), str(source), str(target), how, str(seconds)]
    return subprocess.Popen(call, stdout=subprocess.PIPE, text=True)


def write_all(*given: Any) -> None:
    with write(*given) as process:
        assert process.stdout is not None
        process.stdout.read()


def watch(folder: Path, idle: float = 3.0, **options: Any) -> Watcher:
    return Watcher(folder, idle=idle, **(FAST | options))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("how", fast(["saved", "reserved"], ["saved", "copied", "reserved", "renamed", "backwards"]))
def test_a_checkpoint_is_yielded_once_it_is_complete(how: str, sharded: Path, training: Path) -> None:
    found = []
    with write(sharded, training / "checkpoint-10", how, 0.05) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        for one in watch(training):
            # Settled, so that all of it is there
            assert contents(one.folder) == contents(sharded)
            found.append(one)
    assert process.returncode == 0
    assert found == [Arrived(10, training / "checkpoint-10")]


def test_a_killed_writer_and_a_second_attempt(sharded: Path, training: Path) -> None:
    """A half-written shard is not evaluated, is named once, and hinders no other checkpoint."""
    with write(sharded, training / "checkpoint-10", "saved", 0.02) as process:
        assert process.stdout is not None
        written = [process.stdout.readline().strip() for _ in range(6)]
        assert written[-1].endswith(".safetensors")
        process.kill()
    write_all(sharded, training / "checkpoint-20")
    said: list[str] = []
    watcher, found = watch(training, say=said.append), []
    for one in watcher:
        found.append(one.step)
        if one.step == 20:
            assert list(watcher.incomplete) == ["checkpoint-10"]
            shutil.rmtree(training / "checkpoint-10")
            write_all(sharded, training / "checkpoint-10")
    assert found == [20, 10]
    assert watcher.incomplete == {}


def test_an_incomplete_checkpoint_is_named_once(sharded: Path, training: Path) -> None:
    shutil.copytree(sharded, training / "checkpoint-10")
    last = sorted((training / "checkpoint-10").glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    shutil.copytree(sharded, training / "checkpoint-20")
    (training / "checkpoint-20" / "config.json").write_text("{")
    shutil.copytree(sharded, training / "final")  # no step
    (training / "logs").mkdir()
    shutil.copytree(sharded, training / "tmp-checkpoint-30")
    shutil.copytree(sharded, training / ".checkpoint-30.partial")
    shutil.copytree(sharded, training / "checkpoint-30.tmp")
    said: list[str] = []
    watcher = watch(training, say=said.append)
    assert list(watcher) == []
    assert list(watcher.incomplete) == ["checkpoint-10", "checkpoint-20"]
    first, second, third = sorted(said)
    assert first.startswith("checkpoint-10 is skipped until it changes: ")
    assert "damaged" in first and last.name in first
    assert second.startswith("checkpoint-20 is skipped until it changes: ")
    assert "final is skipped until it changes: has no training step in its name" in third


def test_existing_ones_come_first_in_the_order_of_steps(sharded: Path, training: Path) -> None:
    for name in ("step1000", "step200", "checkpoint-30"):
        shutil.copytree(sharded, training / name)
    (training / "latest").symlink_to(training / "step1000")
    (training / "a").mkdir()
    shutil.copytree(sharded, training / "a", dirs_exist_ok=True)
    (training / "a" / "trainer_state.json").write_text(json.dumps({"global_step": 500}))
    found = []
    for one in watch(training):
        found.append((one.step, one.folder.name))
        if len(found) == 1:  # while the first is evaluated
            shutil.copytree(sharded, training / "step100")
            time.sleep(1)
    # The new one has the lowest step: it comes as soon as it is settled
    new = found.pop(found.index((100, "step100")))
    assert new[0] == 100
    assert found == [(30, "checkpoint-30"), (200, "step200"), (500, "a"), (1000, "step1000")]


def test_a_checkpoint_that_is_written_again_is_yielded_again(sharded: Path, training: Path) -> None:
    """A training that was resumed from an earlier step replaces later checkpoints."""
    other = tiny_checkpoint(training.parent / "other", seed=1, max_shard_size="100KB")
    for name in ("checkpoint-10", "checkpoint-20"):
        shutil.copytree(sharded, training / name)
    found = []
    for one in watch(training):
        found.append(one.step)
        if found == [10, 20]:
            (training / "checkpoint-20" / "optimizer.pt").write_bytes(b"not read")
            for path in other.iterdir():
                shutil.copyfile(path, training / "checkpoint-10" / path.name)
    assert found == [10, 20, 10]


def test_removed_checkpoints_are_no_error(sharded: Path, training: Path) -> None:
    for step in (10, 20, 30):
        shutil.copytree(sharded, training / f"checkpoint-{step}")
    said: list[str] = []
    found = []
    for one in watch(training, say=said.append, idle=1.5):
        found.append(one.step)
        shutil.rmtree(training / "checkpoint-20", ignore_errors=True)
    assert (found, said) == ([10, 30], [])


def test_a_short_patience_does_not_lose_what_is_there(sharded: Path, training: Path) -> None:
    for step in (10, 20):
        shutil.copytree(sharded, training / f"checkpoint-{step}")
    assert [one.step for one in watch(training, idle=0.0)] == [10, 20]


@pytest.mark.slow
def test_two_folders_with_one_step(sharded: Path, training: Path) -> None:
    for name in ("checkpoint-10", "step10"):
        shutil.copytree(sharded, training / name)
    said: list[str] = []
    assert [one.folder.name for one in watch(training, say=said.append)] == ["checkpoint-10"]
    assert said == ["step10 is skipped: it has step 10, as checkpoint-10 has"]


def test_until_a_step(sharded: Path, training: Path) -> None:
    for step in (10, 30):
        shutil.copytree(sharded, training / f"checkpoint-{step}")
    late = threading.Timer(0.3, write_all, (sharded, training / "checkpoint-20", "copied", 0.05))
    late.start()
    started = time.monotonic()
    # 25 is passed by 30, which is not evaluated; 20, which is being written, is waited for
    assert [one.step for one in Watcher(training, until=25, **FAST)] == [10, 20]
    assert time.monotonic() - started < 20
    late.join()


def test_until_a_step_does_not_wait_for_a_dead_writer(sharded: Path, training: Path) -> None:
    shutil.copytree(sharded, training / "checkpoint-10")
    (training / "checkpoint-10" / "config.json").unlink()
    shutil.copytree(sharded, training / "checkpoint-20")
    watcher = Watcher(training, until=20, **FAST)
    assert [one.step for one in watcher] == [20]
    assert list(watcher.incomplete) == ["checkpoint-10"]


def test_one_that_is_in_use_comes_again(sharded: Path, training: Path) -> None:
    shutil.copytree(sharded, training / "checkpoint-10")
    watcher, found = Watcher(training, until=10, **FAST), []
    for one in watcher:
        found.append(time.monotonic())
        if len(found) < 3:
            watcher.again(one, 0.5)
    assert len(found) == 3
    assert found[1] - found[0] >= 0.5


@pytest.mark.slow
def test_a_folder_that_is_away_for_a_while(sharded: Path, training: Path) -> None:
    shutil.copytree(sharded, training / "checkpoint-10")
    said: list[str] = []
    found = []
    for one in watch(training, say=said.append):
        found.append(one.step)
        if len(found) == 1:
            training.rename(training.with_name("away"))
            threading.Timer(0.5, lambda: training.with_name("away").rename(training)).start()
    assert found[0] == 10
    assert said == [f"{training} cannot be read (No such file or directory); trying again"]
