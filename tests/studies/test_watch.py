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
FAST: dict[str, Any] = {"settled": 0.2, "poll": 0.02, "stalled": 0.6, "idle": 0.8}
"""Seconds for tests; a writer pauses for less than `settled`."""


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


def watch(folder: Path, **options: Any) -> Watcher:
    return Watcher(folder, **(FAST | options))


def steps(watcher: Watcher) -> list[int]:
    return [one.step for one in watcher]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("how", fast(["reserved"], ["saved", "copied", "reserved", "renamed", "backwards"]))
def test_a_checkpoint_is_yielded_once_it_is_complete(how: str, sharded: Path, training: Path) -> None:
    found = []
    with write(sharded, training / "checkpoint-10", how, 0.03) as process:
        assert process.stdout is not None and process.stdout.readline()
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
    shutil.copytree(sharded, training / "checkpoint-20")
    watcher, found = watch(training), []
    for one in watcher:
        found.append(one.step)
        if one.step == 20:
            assert list(watcher.incomplete) == ["checkpoint-10"]
            shutil.rmtree(training / "checkpoint-10")
            shutil.copytree(sharded, training / "checkpoint-10")
    assert found == [20, 10]
    assert watcher.incomplete == {}


def test_an_incomplete_checkpoint_is_named_once(sharded: Path, training: Path) -> None:
    shutil.copytree(sharded, training / "checkpoint-10")
    last = sorted((training / "checkpoint-10").glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    shutil.copytree(sharded, training / "checkpoint-20")
    (training / "checkpoint-20" / "config.json").write_text("{")
    (training / "logs").mkdir()
    for name in ("final", "tmp-checkpoint-30", ".checkpoint-30.partial", "checkpoint-30.tmp"):  # no step; temporary
        shutil.copytree(sharded, training / name)
    said: list[str] = []
    watcher = watch(training, say=said.append)
    assert steps(watcher) == []
    assert list(watcher.incomplete) == ["checkpoint-10", "checkpoint-20"]
    first, second, third = sorted(said)
    assert first.startswith("checkpoint-10 is skipped") and last.name in first
    assert second.startswith("checkpoint-20 is skipped")
    assert third.startswith("final is skipped") and "no training step" in third
    # The last step does not wait for a dead writer
    shutil.copytree(sharded, training / "checkpoint-40")
    assert steps(watch(training, until=40, idle=None)) == [40]


def test_the_order_of_steps(sharded: Path, training: Path) -> None:
    for name in ("step1000", "step200", "checkpoint-30"):
        shutil.copytree(sharded, training / name)
    (training / "latest").symlink_to(training / "step1000")
    shutil.copytree(sharded, training / "a")
    (training / "a" / "trainer_state.json").write_text(json.dumps({"global_step": 500}))
    found = []
    for one in watch(training):
        found.append((one.step, one.folder.name))
        if len(found) == 1:  # while the first is evaluated
            shutil.copytree(sharded, training / "step100")
            time.sleep(0.4)
        shutil.rmtree(training / "step200", ignore_errors=True)  # that is no error
    # The new one has the lowest step: it comes as soon as it is settled
    assert found.pop(found.index((100, "step100"))) == (100, "step100")
    assert found == [(30, "checkpoint-30"), (500, "a"), (1000, "step1000")]


def test_a_checkpoint_that_is_written_again_is_yielded_again(sharded: Path, training: Path) -> None:
    """A training that was resumed from an earlier step replaces later checkpoints. A short patience loses nothing."""
    other = tiny_checkpoint(training.parent / "other", seed=1, max_shard_size="100KB")
    for name in ("checkpoint-10", "checkpoint-20", "step10"):
        shutil.copytree(sharded, training / name)
    found, said = list[int](), list[str]()
    for one in watch(training, idle=0.0, say=said.append):
        found.append(one.step)
        if found == [10, 20]:
            (training / "checkpoint-20" / "optimizer.pt").write_bytes(b"not read")
            for path in other.iterdir():
                shutil.copyfile(path, training / "checkpoint-10" / path.name)
    assert found == [10, 20, 10]
    assert said == ["step10 is skipped: it has step 10, as checkpoint-10 has"]


def test_until_a_step(sharded: Path, training: Path) -> None:
    for step in (10, 30):
        shutil.copytree(sharded, training / f"checkpoint-{step}")
    (training / "checkpoint-20").mkdir()
    shutil.copy(sharded / "config.json", training / "checkpoint-20")
    late = threading.Timer(0.3, shutil.copytree, (sharded, training / "checkpoint-20"), {"dirs_exist_ok": True})
    late.start()
    watcher, times = watch(training, until=25, idle=None), list[float]()
    found = []
    # 25 is passed by 30, which is not evaluated; 20, which is being written, is waited for; what is in use comes again
    for one in watcher:
        found.append(one.step)
        times.append(time.monotonic())
        if len(found) < 3:
            watcher.again(one, 0.3)
    assert found.count(10) + found.count(20) == len(found) == 4
    late.join()


@pytest.mark.slow
def test_a_folder_that_is_away_for_a_while(sharded: Path, training: Path) -> None:
    shutil.copytree(sharded, training / "checkpoint-10")
    said: list[str] = []
    found = []
    for one in watch(training, say=said.append, idle=3.0):
        found.append(one.step)
        if len(found) == 1:
            training.rename(training.with_name("away"))
            threading.Timer(0.5, lambda: training.with_name("away").rename(training)).start()
    assert found[0] == 10
    assert said == [f"{training} cannot be read (No such file or directory); trying again"]
