"""`evalkit.TrainerCallback` in trainings by two real processes (DistributedDataParallel)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import evalkit
from evalkit.display import Progress
from evalkit.errors import CheckpointError
from evalkit.models.called import is_sharded
from evalkit.models.loading.load import LoadedModel
from tests.devices import needs_cuda
from tests.tiny import tiny_checkpoint
from tests.training.trainers import equal, state_of, trainer_of

pytestmark = pytest.mark.training

ROOT = Path(__file__).parents[2]


class Slow(Progress):
    """Makes an evaluation last longer than the training's timeout."""

    seconds = 0.0

    def start(self, total: float, done: float) -> None:
        """Wait."""
        time.sleep(Slow.seconds)
        Slow.seconds = 0.0


def train_here(options: dict[str, Any]) -> None:
    """Train in one of the processes that torchrun has started with this file."""

    def failing(*_: Any, **__: Any) -> Any:
        raise CheckpointError("no space")

    warnings.simplefilter("ignore")
    rank, folder = int(os.environ["RANK"]), Path(options["folder"])
    trainer = trainer_of(Path(options["start"]), folder / "x", **options["arguments"])
    Slow.seconds = options["seconds"]
    if options["fails"]:
        LoadedModel.of = failing  # type: ignore[method-assign]
    if options["callback"] is not None:
        trainer.add_callback(evalkit.TrainerCallback(trainer, progress=Slow(live=False), **options["callback"]))
    trainer.train()
    if options["device"] == "cuda":
        assert is_sharded(trainer.model)
        if rank == 0:
            (folder / "log.json").write_text(json.dumps(trainer.state.log_history))
        return
    state = state_of(trainer) | {"all": trainer.state.log_history, "wrapper": type(trainer.model_wrapped).__name__}
    torch.save(state, folder / f"state-{rank}.pt")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("start") / "tiny", window=1024)


def train(
    start: Path,
    folder: Path,
    documents: Path | None,
    *,
    seconds: float = 0.0,
    fails: bool = False,
    arguments: dict[str, Any] | None = None,
    device: str = "cpu",
    **callback: Any,
) -> subprocess.CompletedProcess[str]:
    """Train in two processes; without documents, without the callback."""
    folder.mkdir()
    asked = {"every": 2, "tasks": ["piqa"], "data_dir": str(documents), "allow_unofficial_data": True,
             "output": str(folder / "runs")} | callback  # fmt: skip
    options = {
        "start": str(start),
        "folder": str(folder),
        "callback": None if documents is None else asked,
        "arguments": {"ddp_backend": "gloo", "max_steps": 4} | (arguments or {}),
        "seconds": seconds,
        "fails": fails,
        "device": device,
    }
    (folder / "options.json").write_text(json.dumps(options))
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    processes = "2" if device == "cpu" else str(min(2, torch.cuda.device_count()))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*call, processes, __file__, str(folder / "options.json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def states(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"state-{rank}.pt", weights_only=False) for rank in range(2)]


def steps(state: dict[str, Any]) -> list[int]:
    return [entry["step"] for entry in state["all"] if "evalkit/zeroshot8/piqa/accuracy" in entry]


def test_all_processes_evaluate_and_nothing_changes(start: Path, documents: Path, tmp_path: Path) -> None:
    plain, with_it = train(start, tmp_path / "plain", None), train(start, tmp_path / "with", documents)
    assert (plain.returncode, with_it.returncode) == (0, 0), plain.stderr + with_it.stderr
    for expected, state in zip(states(tmp_path / "plain"), states(tmp_path / "with"), strict=True):
        assert state["wrapper"] == "DistributedDataParallel"
        assert steps(state) == [2, 4]  # in both processes
        for what in expected.keys() - {"all", "wrapper"}:
            assert equal(state[what], expected[what]), what
    first, second = states(tmp_path / "with")
    assert equal(first["weights"], second["weights"])
    runs = evalkit.list_runs(tmp_path / "with" / "runs")
    assert sorted(str(run.manifest["model"]) for run in runs) == ["x step 2", "x step 4"]


def test_a_failed_evaluation_ends_all_processes_or_none(start: Path, documents: Path, tmp_path: Path) -> None:
    on = train(start, tmp_path / "on", documents, fails=True)
    assert on.returncode == 0, on.stderr
    assert on.stderr.count("step 2 failed and is left out; the training goes on: no space") == 1
    assert [steps(state) for state in states(tmp_path / "on")] == [[], []]
    stopped = train(start, tmp_path / "stopped", documents, fails=True, on_error="raise")
    assert stopped.returncode != 0
    assert "no space" in stopped.stderr
    unplanned = train(start, tmp_path / "unplanned", documents, tasks=["piqq"])
    assert unplanned.returncode != 0
    assert "piqq" in unplanned.stderr


@pytest.mark.slow
def test_an_evaluation_may_take_longer_than_the_timeout(start: Path, documents: Path, tmp_path: Path) -> None:
    done = train(start, tmp_path / "x", documents, seconds=25, arguments={"ddp_timeout": 15})
    assert done.returncode == 0, done.stderr
    assert [steps(state) for state in states(tmp_path / "x")] == [[2, 4], [2, 4]]


@pytest.mark.gpu
@needs_cuda
def test_a_trainer_that_shards(start: Path, documents: Path, tmp_path: Path) -> None:
    """By accelerate, which does so on accelerators only: losses are those without the callback."""
    sharded = {"use_cpu": False, "ddp_backend": "nccl", "fsdp": True, "logging_steps": 1,
               "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                               "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}  # fmt: skip
    plain = train(start, tmp_path / "plain", None, arguments=sharded, device="cuda")
    with_it = train(start, tmp_path / "with", documents, arguments=sharded, device="cuda")
    assert (plain.returncode, with_it.returncode) == (0, 0), plain.stderr + with_it.stderr
    logs = [json.loads((tmp_path / name / "log.json").read_text()) for name in ("plain", "with")]
    losses = [[entry["loss"] for entry in log if "loss" in entry] for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert [entry["step"] for entry in logs[1] if "evalkit/zeroshot8/piqa/accuracy" in entry] == [2, 4]


if __name__ == "__main__":
    train_here(json.loads(Path(sys.argv[1]).read_text()))
