"""Trainings killed by SIGKILL and resumed: weights, optimizer and log equal those of an uninterrupted one."""

from __future__ import annotations

import re
import shutil
import sys
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from recipe.folder import checkpoints
from recipe.loss_log import read_log
from recipe.running import run

from evalkit.errors import CheckpointError
from tests.pretrain.trainings import run_all, state_of, train_until, trained, training_of
from tests.training.trainers import equal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")

FILES = {"config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt",
         "tokenizer.json", "tokenizer_config.json", "trainer_state.json", "training_args.bin"}  # fmt: skip


def kill(processes: ForkServerContext, shared: Path, output: Path, moment: str, model: str) -> None:
    marker = output.with_suffix(".marker")
    process = processes.Process(target=train_until, args=(training_of(shared, output, model=model), moment, marker))
    process.start()
    end = time.monotonic() + 120
    while not marker.exists() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert marker.exists()
    process.kill()
    process.join()
    assert process.exitcode == -9


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints(folder)]


CASES = [
    ("vanilla", "step 14", ["checkpoint-10"]),
    ("cog", "step 18", ["checkpoint-10"]),
    ("differential", "step 3", []),
    ("integral", "weights", ["checkpoint-10"]),
    ("vanilla", "settled", ["checkpoint-10"]),
    ("vanilla", "model", ["checkpoint-10", "checkpoint-20"]),
]


@pytest.mark.parametrize(
    ("model", "moment", "left"),
    [pytest.param(*case, marks=[] if case[1] == "weights" else pytest.mark.training) for case in CASES],
)
def test_equal_after_a_kill(
    processes: ForkServerContext, shared: Path, tmp_path: Path, model: str, moment: str, left: list[str]
) -> None:
    whole = trained(shared, tmp_path / "whole", model=model)
    killed = training_of(shared, tmp_path / "killed", model=model)
    kill(processes, shared, killed.output, moment, model)
    assert names(killed.output) == left
    for folder in checkpoints(killed.output):
        assert {path.name for path in folder.iterdir()} == FILES
    assert not killed.model.exists()
    run([killed], dry_run=False)
    assert names(killed.output) == names(whole.output) == ["checkpoint-10", "checkpoint-20"]
    for folder in checkpoints(whole.output):
        assert equal(state_of(killed.output / folder.name), state_of(folder))
    assert (killed.model / "model.safetensors").read_bytes() == (whole.model / "model.safetensors").read_bytes()
    assert (killed.output / "training.csv").read_bytes() == (whole.output / "training.csv").read_bytes()
    assert sorted(path.name for path in killed.output.iterdir()) == sorted(path.name for path in whole.output.iterdir())


@pytest.mark.training
def test_weights_change_if_the_optimizer_is_lost(shared: Path, tmp_path: Path) -> None:
    """So that the test above can fail."""
    whole = trained(shared, tmp_path / "whole")
    before = state_of(whole.newest)
    for folder in (whole.newest, whole.model):
        shutil.rmtree(folder)
    (whole.newest / "optimizer.pt").unlink()
    run([whole], dry_run=False)
    assert not equal(state_of(whole.newest)["weights"], before["weights"])


CUT = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "trainer_state.json")


@pytest.mark.training
def test_a_damaged_checkpoint(shared: Path, tmp_path: Path) -> None:
    """It is named; without it, the training is resumed from the one before, with the same end."""
    whole = trained(shared, tmp_path / "whole", save_every=5)
    last, damaged = whole.output / "checkpoint-20", whole.output / "checkpoint-15"
    before = state_of(last)
    shutil.rmtree(whole.model)
    shutil.rmtree(last)
    for name in CUT:
        for size in (100, 0):
            content = (damaged / name).read_bytes()
            (damaged / name).write_bytes(content[:size])
            with pytest.raises(CheckpointError) as raised:
                run([whole], dry_run=False)
            (damaged / name).write_bytes(content)
            assert re.fullmatch(
                r".*/whole/checkpoint-15: cannot be read \(.+\); remove this folder; the same command resumes .*",
                str(raised.value),
            )
    shutil.rmtree(damaged)
    run([whole], dry_run=False)
    assert equal(state_of(last), before)


def test_the_oldest_checkpoints_are_removed(shared: Path, tmp_path: Path) -> None:
    training = trained(shared, tmp_path / "x", save_every=5, keep=2)
    assert names(training.output) == ["checkpoint-15", "checkpoint-20"]
    assert not (training.output / ".saving").exists()


@pytest.mark.training
def test_two_processes_share_the_work(processes: ForkServerContext, shared: Path, tmp_path: Path) -> None:
    """Begun at the same moment: each training is done by one of them, and nothing is left of the other."""
    models = ("vanilla", "cog", "integral")
    trainings = [training_of(shared, tmp_path / model, model=model) for model in models]
    both = [processes.Process(target=run_all, args=(trainings,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(240)
    assert [process.exitcode for process in both] == [0, 0]
    for training in trainings:
        assert training.model.is_dir()
        assert names(training.output) == ["checkpoint-10", "checkpoint-20"]
        steps = [row["step"] for row in read_log(training.output / "training.csv") if row["loss"]]
        assert steps == ["3", "6", "9", "10", "12", "15", "18", "20"]
