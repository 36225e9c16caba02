"""`evalkit.TrainerCallback` in trainings by two real processes: DistributedDataParallel and FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import evalkit
from tests.devices import needs_cuda
from tests.tiny import tiny_checkpoint
from tests.training.loops import launch, states
from tests.training.trainers import equal

pytestmark = pytest.mark.training


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("start") / "tiny", window=1024)


@pytest.fixture
def asked(documents: Path, tmp_path: Path) -> dict[str, Any]:
    return {"every": 2, "tasks": ["piqa"], "data_dir": str(documents), "allow_unofficial_data": True,
            "output": str(tmp_path / "runs")}  # fmt: skip


def job(
    name: str, start: Path, arguments: dict[str, Any] | None, kind: str = "ddp", training: Any = None, **more: Any
) -> dict[str, Any]:
    given = {"ddp_backend": "gloo", "run_name": name} | (training or {})
    about = {"name": name, "model": "trainer", "kind": kind, "start": str(start), "training": given}
    return about | {"arguments": arguments} | more


def steps(state: dict[str, Any]) -> list[int]:
    return [entry["step"] for entry in state["all"] if "evalkit/zeroshot8/piqa/accuracy" in entry]


def end_alike(folder: Path, name: str, other: str, processes: int = 2) -> None:
    """Assert that two trainings end with the same state in each process, bit for bit, and the first is evaluated."""
    pairs = zip(states(folder, name, processes), states(folder, other, processes), strict=True)
    for state, expected in pairs:
        assert (steps(state), steps(expected)) == ([2, 4], [])  # in all processes
        for what in expected.keys() - {"all"}:
            assert equal(state[what], expected[what]), what


def test_all_processes_evaluate_and_nothing_changes(start: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    done = launch(tmp_path, [job("plain", start, None), job("with", start, asked)])
    assert done.returncode == 0, done.stderr
    end_alike(tmp_path, "with", "plain")
    first, second = states(tmp_path, "with")
    assert first["wrapper"] == "DistributedDataParallel"
    assert equal(first["weights"], second["weights"])
    runs = evalkit.list_runs(tmp_path / "runs")
    assert sorted(str(run.manifest["model"]) for run in runs) == ["with step 2", "with step 4"]


SHARDED: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"bf16": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}


@pytest.mark.parametrize("mode", SHARDED)
def test_a_sharded_training_ends_as_without_it(mode: str, start: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    jobs = [job(name, start, given, "fsdp", SHARDED[mode]) for name, given in (("plain", None), ("with", asked))]
    done = launch(tmp_path, jobs)
    assert done.returncode == 0, done.stderr
    end_alike(tmp_path, "with", "plain")
    first, second = states(tmp_path, "with")
    assert first["model"].startswith("FSDP") and not equal(first["weights"], second["weights"])
    assert ("Optimized" in first["model"]) == (mode == "compiled")
    dtypes = {run.manifest["specification"]["dtype"] for run in evalkit.list_runs(tmp_path / "runs")}
    assert dtypes == {"bfloat16" if mode == "bf16" else "float32"}


def test_a_failed_evaluation_ends_all_processes_or_none(start: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    jobs = [job("on", start, asked, fails=True), job("stopped", start, asked | {"on_error": "raise"}, fails=True)]
    done = launch(tmp_path, jobs)
    assert done.returncode != 0 and "no space" in done.stderr.rpartition("goes on: no space")[2]
    assert done.stderr.count("step 2 failed and is left out; the training goes on: no space") == 1
    assert [steps(state) for state in states(tmp_path, "on")] == [[], []]
    unplanned = launch(tmp_path, [job("unplanned", start, asked | {"tasks": ["piqq"]})])
    assert unplanned.returncode != 0
    assert "piqq" in unplanned.stderr


@pytest.mark.slow
def test_an_evaluation_may_take_longer_than_the_timeout(start: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    """Of the training's own process group."""
    done = launch(tmp_path, [job("x", start, asked, seconds=25, training={"ddp_timeout": 15})], backend=None)
    assert done.returncode == 0, done.stderr
    assert [steps(state) for state in states(tmp_path, "x")] == [[2, 4], [2, 4]]


@pytest.mark.gpu
@needs_cuda
def test_a_sharded_training_on_gpus(start: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    sharded = {"use_cpu": False, "ddp_backend": "nccl", "fsdp": True, "logging_steps": 1,
               "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                               "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}  # fmt: skip
    processes = min(2, torch.cuda.device_count())
    jobs = [job(name, start, given, "fsdp", sharded) for name, given in (("plain", None), ("with", asked))]
    done = launch(tmp_path, jobs, processes, "cpu:gloo,cuda:nccl")
    assert done.returncode == 0, done.stderr
    end_alike(tmp_path, "with", "plain", processes)
