"""Checkpoints that appear in a folder, written piece by piece."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from evalkit.studies.watch import Arrived, Watcher
from tests.marks import fast
from tests.tiny import tiny_checkpoint

FAST: dict[str, Any] = {"settled": 0.2, "poll": 0.02, "stalled": 0.6, "idle": 0.8}
"""Seconds for tests; a writer pauses for less than `settled`."""
CHUNK = 1 << 15


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("source") / "tiny", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def training(tmp_path: Path) -> Path:
    (tmp_path / "training").mkdir()
    return tmp_path / "training"


class Writer(threading.Thread):
    """Copies a checkpoint's files in pieces, with a pause after each.

    `how`: "saved" (config, weights, index, tokenizer), "copied" (by name), "reserved" (each file has its full size
    before its content), "renamed" (under a temporary name), or "backwards" (the config last).
    `pieces`: the number after which it ends as a killed process does.
    """

    def __init__(self, source: Path, target: Path, how: str, pieces: int = 10**6) -> None:
        super().__init__()
        self.source, self.target, self.how, self.pieces = source, target, how, pieces
        self.begun = threading.Event()
        self.start()
        self.begun.wait()

    def run(self) -> None:
        folder = self.target.with_name(f"tmp-{self.target.name}") if self.how == "renamed" else self.target
        folder.mkdir()
        files = sorted(self.source.iterdir(), reverse=self.how == "backwards")
        if self.how == "saved":
            files.sort(key=lambda path: (path.name != "config.json", "index" in path.name, path.name.startswith("tok")))
        for path in files:
            content = path.read_bytes()
            with (folder / path.name).open("wb", buffering=0) as file:
                if self.how == "reserved":
                    file.truncate(len(content))
                for start in range(0, len(content), CHUNK):
                    file.write(content[start : start + CHUNK])
                    self.begun.set()
                    self.pieces -= 1
                    if not self.pieces:
                        return
                    time.sleep(0.03)
        if self.how == "renamed":
            folder.rename(self.target)


def watch(folder: Path, **options: Any) -> Watcher:
    return Watcher(folder, **(FAST | options))


@pytest.mark.parametrize("how", fast(["reserved"], ["saved", "copied", "reserved", "renamed", "backwards"]))
def test_a_checkpoint_is_yielded_once_it_is_complete(how: str, sharded: Path, training: Path) -> None:
    writer, arrivals = Writer(sharded, training / "checkpoint-10", how), list[Arrived]()
    # A folder under a temporary name is not looked at, so nothing seems to change until it is complete
    for arrived in watch(training, idle=8.0) if how == "renamed" else watch(training):
        for path in sharded.iterdir():
            assert (arrived.folder / path.name).read_bytes() == path.read_bytes()
        arrivals.append(arrived)
    writer.join()
    assert arrivals == [Arrived(10, training / "checkpoint-10")]


def test_a_killed_writer_and_a_second_attempt(sharded: Path, training: Path) -> None:
    """A half-written shard is not evaluated, is named once, and hinders no other checkpoint."""
    Writer(sharded, training / "checkpoint-10", "saved", pieces=6).join()
    shutil.copytree(sharded, training / "checkpoint-20")
    watcher, steps = watch(training), list[int]()
    for arrived in watcher:
        steps.append(arrived.step)
        if arrived.step == 20:
            assert list(watcher.incomplete) == ["checkpoint-10"]
            shutil.rmtree(training / "checkpoint-10")
            shutil.copytree(sharded, training / "checkpoint-10")
    assert steps == [20, 10] and watcher.incomplete == {}


def test_what_is_no_complete_checkpoint_is_named_once(sharded: Path, training: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-20", "final", "tmp-checkpoint-30", ".checkpoint-30.partial",
                 "checkpoint-30.tmp"):  # fmt: skip
        shutil.copytree(sharded, training / name)
    last = sorted((training / "checkpoint-10").glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    (training / "checkpoint-20" / "config.json").write_text("{")
    (training / "logs").mkdir()
    said: list[str] = []
    watcher = watch(training, say=said.append)
    assert list(watcher) == [] and list(watcher.incomplete) == ["checkpoint-10", "checkpoint-20"]
    first, second, third = sorted(said)
    assert first.startswith("checkpoint-10 ") and last.name in first
    assert second.startswith("checkpoint-20 ") and third.startswith("final ")
    # The last step does not wait for a dead writer
    shutil.copytree(sharded, training / "checkpoint-40")
    assert [arrived.step for arrived in watch(training, until=40, idle=None)] == [40]


def test_the_order_of_steps(sharded: Path, training: Path) -> None:
    """A new checkpoint of a lower step comes as soon as it is settled; one that is removed meanwhile is no error."""
    for name in ("step1000", "step200", "checkpoint-30", "a"):
        shutil.copytree(sharded, training / name)
    (training / "latest").symlink_to(training / "step1000")
    (training / "a" / "trainer_state.json").write_text(json.dumps({"global_step": 500}))
    arrivals = []
    for arrived in watch(training):
        arrivals.append((arrived.step, arrived.folder.name))
        if len(arrivals) == 1:  # while the first is evaluated
            shutil.copytree(sharded, training / "step100")
            time.sleep(0.4)
        shutil.rmtree(training / "step200", ignore_errors=True)
    arrivals.remove((100, "step100"))
    assert arrivals == [(30, "checkpoint-30"), (500, "a"), (1000, "step1000")]


def test_a_checkpoint_that_is_written_again_is_yielded_again(sharded: Path, training: Path) -> None:
    """A training that was resumed from an earlier step replaces later checkpoints. A short patience loses nothing."""
    other = tiny_checkpoint(training.parent / "other", seed=1, max_shard_size="100KB")
    for name in ("checkpoint-10", "checkpoint-20", "step10"):
        shutil.copytree(sharded, training / name)
    steps, said = list[int](), list[str]()
    for arrived in watch(training, idle=0.0, say=said.append):
        steps.append(arrived.step)
        if steps == [10, 20]:
            (training / "checkpoint-20" / "optimizer.pt").write_bytes(b"not read")
            shutil.copytree(other, training / "checkpoint-10", dirs_exist_ok=True)
    assert steps == [10, 20, 10]
    assert len(said) == 1 and said[0].startswith("step10 ") and "checkpoint-10" in said[0]


def test_until_a_step(sharded: Path, training: Path) -> None:
    """25 is passed by 30, which is not evaluated; 20, written late, is waited for; what is in use comes again."""
    for step in (10, 30):
        shutil.copytree(sharded, training / f"checkpoint-{step}")
    (training / "checkpoint-20").mkdir()
    shutil.copy(sharded / "config.json", training / "checkpoint-20")
    late = threading.Timer(0.3, shutil.copytree, (sharded, training / "checkpoint-20"), {"dirs_exist_ok": True})
    late.start()
    watcher, steps = watch(training, until=25, idle=None), list[int]()
    for arrived in watcher:
        steps.append(arrived.step)
        if len(steps) < 3:
            watcher.again(arrived, 0.3)
    assert steps.count(10) + steps.count(20) == len(steps) == 4
    late.join()
