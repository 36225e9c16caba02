"""`evalkit.InLoop` in the processes of a training: DistributedDataParallel and `fully_shard`, over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import evalkit
from evalkit.benchmarks.registry import results_of
from evalkit.runs.folder import JOURNAL
from evalkit.runs.score_table import SEGMENTS
from tests.devices import needs_cuda
from tests.documents import made_up
from tests.tiny import tiny_checkpoint
from tests.training.loops import ATTENTIONS, asked, built, in_loop, launch, passes, reports, states
from tests.training.trainers import equal

pytestmark = pytest.mark.training

TOLERANCE = 2e-5
"""Of a log-likelihood, relative: sums in another order, in float32."""
KINDS = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("start") / "tiny", window=1024)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of several batches."""
    return made_up(tmp_path_factory.mktemp("documents"), 24)


def job(name: str, model: str, kind: str, steps: int, arguments: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return {"name": name, "model": model, "kind": kind, "steps": steps, "arguments": arguments} | more


def only_run(folder: Path) -> evalkit.Run:
    [run] = evalkit.list_runs(folder)
    return run


def assert_same_scores(run: evalkit.Run, expected: evalkit.Run) -> None:
    """Equal tokens, log-likelihoods up to rounding, and under every rule equal decisions beyond it."""
    mine, theirs = run.scores, expected.scores
    keys = ["task", "subtask", "doc_id", "choice"]
    assert mine[keys].equals(theirs[keys]) and not mine.duplicated(keys).any()
    for segment in SEGMENTS:
        assert mine[f"n_{segment}"].equals(theirs[f"n_{segment}"])
        values = [torch.tensor(table[f"ll_{segment}"].to_numpy(copy=True)) for table in (mine, theirs)]
        torch.testing.assert_close(*values, rtol=TOLERANCE, atol=0, equal_nan=True)
    for rule in ("ppl", "acc", "acc_norm"):
        decided = [results_of(each).comparable().by_rule(rule) for each in (run, expected)]
        # No two choices of these documents are as near each other as rounding
        assert (decided[0] == decided[1]).all(), rule


@pytest.mark.parametrize("processes", [2, 4])
def test_rows_are_those_of_one_process(processes: int, folder: Path, documents: Path, tmp_path: Path) -> None:
    """Shared with and without common prefixes, in small batches; all processes compute some of them."""
    models = ("vanilla", "integral", "nano")
    small = {"token_budget": 300, "tasks": ["piqa", "boolq", "arc_easy"]}
    jobs = [
        job(f"{model}-{kind}", model, kind, 0, asked(documents, tmp_path / f"{model}-{kind}", folder, **small))
        for model in models
        for kind in KINDS
    ]
    done = launch(tmp_path / "jobs", jobs, processes)
    assert done.returncode == 0, done.stderr
    for model in models:
        expected = in_loop(asked(documents, tmp_path / model, folder, **small))(built(model), 0)
        alone = only_run(tmp_path / model)
        for kind in KINDS:
            logged, batches = reports(tmp_path / "jobs", f"{model}-{kind}", processes)
            run = only_run(tmp_path / f"{model}-{kind}")
            assert logged["0"] == pytest.approx(expected)
            assert min(batches) > 0 and max(batches) - min(batches) <= 1 and sum(batches) > processes
            assert_same_scores(run, alone)
            # Whole weights have one identity, those that are sharded that of their shards
            assert (run.manifest["id"] == alone.manifest["id"]) == (kind == "ddp")
            assert (run.manifest["sharing"]["way"] == "tree") == (model != "nano")


def test_plain_modules_are_scored_in_rows_by_all_processes(folder: Path, documents: Path, tmp_path: Path) -> None:
    """Of a sharded module all processes make as many passes, also where one has fewer batches, or shorter ones."""
    jobs = [job(kind, "nano", kind, 0, asked(documents, tmp_path / kind, folder), largest=True) for kind in KINDS]
    done = launch(tmp_path / "jobs", jobs)
    assert done.returncode == 0, done.stderr
    in_loop(asked(documents, tmp_path / "alone", folder))(built("nano"), 0)
    for kind in KINDS:
        run = only_run(tmp_path / kind)
        assert_same_scores(run, only_run(tmp_path / "alone"))
        assert run.manifest["sharing"]["way"] == "rows"
        (first, of_first), (second, of_second) = passes(tmp_path / "jobs", kind)
        assert first == second or kind == "ddp"
        assert min(sum(of_first) / len(of_first), sum(of_second) / len(of_second)) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_ends_as_without_it(kind: str, folder: Path, documents: Path, tmp_path: Path) -> None:
    """All that an update depends on, bit for bit in each process, after 100 updates of each attention."""
    jobs = []
    for name in (*ATTENTIONS, "nano"):
        given = asked(documents, tmp_path / name, folder, every=40, tasks=["piqa"])
        jobs += [job(f"{name}-without", name, kind, 100, None), job(f"{name}-with", name, kind, 100, given)]
    done = launch(tmp_path / "jobs", jobs)
    assert done.returncode == 0, done.stderr
    for name in (*ATTENTIONS, "nano"):
        pairs = zip(
            states(tmp_path / "jobs", f"{name}-without"), states(tmp_path / "jobs", f"{name}-with"), strict=True
        )
        for expected, state in pairs:
            for what in expected:
                assert equal(state[what], expected[what]), (name, what)
        assert list(reports(tmp_path / "jobs", f"{name}-with")[0]) == ["40", "80"]
    first, second = states(tmp_path / "jobs", "vanilla-with")
    assert equal(first["weights"], second["weights"]) == (kind == "ddp")


def test_failures_are_those_of_all_processes(folder: Path, documents: Path, tmp_path: Path) -> None:
    """In the second batch of one process, or in the middle of the model: the training goes on, bit for bit."""
    given = asked(documents, tmp_path / "runs", folder, every=2, on_error="warn", token_budget=300)
    jobs = [job("without", "nano", "fsdp", 4, None)]
    faults = [{"kind": "raise", "rank": 1, "count": 2}, {"kind": "raise", "rank": 0, "count": 1}, {"kind": "forward"}]
    for number, fault in enumerate(faults):
        arguments = given | {"output": str(tmp_path / str(number))}
        jobs.append(job(f"fault-{number}", "nano", "fsdp", 4, arguments, fault=fault))
    done = launch(tmp_path / "jobs", jobs)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step 2 failed and is left out; the training goes on: no space") == 2
    assert done.stderr.count("a defect of the model") >= 1
    for number in range(len(faults)):
        assert list(reports(tmp_path / "jobs", f"fault-{number}")[0]) == ["4"]
        for expected, state in zip(
            states(tmp_path / "jobs", "without"), states(tmp_path / "jobs", f"fault-{number}"), strict=True
        ):
            for what in expected:
                assert equal(state[what], expected[what]), (number, what)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_goes_on_without_double_rows(
    kind: str, folder: Path, documents: Path, tmp_path: Path
) -> None:
    given = asked(documents, tmp_path / "runs", folder, every=2, token_budget=300)
    fault = {"kind": "kill", "rank": 1, "count": 2}
    killed = launch(tmp_path / "jobs", [job("x", "nano", kind, 2, given, fault=fault)])
    assert killed.returncode != 0
    run = only_run(tmp_path / "runs")
    stored = (run.folder / JOURNAL).read_bytes()
    assert stored and not run.complete
    again = [
        job("x", "nano", kind, 2, given),
        job("whole", "nano", kind, 2, given | {"output": str(tmp_path / "whole")}),
    ]
    done = launch(tmp_path / "jobs", again)
    assert done.returncode == 0, done.stderr
    (logged, batches), (expected, all_batches) = (reports(tmp_path / "jobs", name) for name in ("x", "whole"))
    assert logged == expected and sum(batches) == sum(all_batches) - 2
    run = only_run(tmp_path / "runs")
    assert (run.folder / JOURNAL).read_bytes().startswith(stored)
    assert_same_scores(run, only_run(tmp_path / "whole"))
    [table] = (tmp_path / "runs").glob("*.csv")
    assert len(table.read_text().splitlines()) == 2


def test_an_evaluation_anywhere_in_a_sharded_training(folder: Path, documents: Path, tmp_path: Path) -> None:
    """Before the first pass, when torch has not yet registered its hooks, and between two backward passes."""
    given = asked(documents, tmp_path / "runs", folder, tasks=["piqa"])
    jobs = [
        job("without", "vanilla", "fsdp", 2, None),
        job("first", "vanilla", "fsdp", 2, given | {"every": 4}, first=True),
        job("between", "vanilla", "fsdp", 2, given | {"output": str(tmp_path / "between")}, between=True),
        job("unsynced-without", "vanilla", "fsdp", 2, None, unsynced=True),
        job(
            "unsynced",
            "vanilla",
            "fsdp",
            2,
            given | {"output": str(tmp_path / "unsynced")},
            between=True,
            unsynced=True,
        ),
        job("budget", "nano", "fsdp", 4, given | {"output": str(tmp_path / "budget"), "every": 2, "budget": "50%"}),
        # Its config names the device of the process
        job("device", "nano", "ddp", 0, given | {"output": str(tmp_path / "device")}, differs=True),
    ]
    done = launch(tmp_path / "jobs", jobs)
    assert done.returncode == 0, done.stderr
    for name, other in (("first", "without"), ("between", "without"), ("unsynced", "unsynced-without")):
        for expected, state in zip(states(tmp_path / "jobs", other), states(tmp_path / "jobs", name), strict=True):
            for what in expected:
                assert equal(state[what], expected[what]), (name, what)
    sizes = {run.manifest["specification"]["sample"] for run in evalkit.list_runs(tmp_path / "budget")}
    assert len(sizes) == 1 and list(reports(tmp_path / "jobs", "budget")[0]) == ["2", "4"]
    assert done.stderr.count("budget: ") == 1
    assert len(evalkit.list_runs(tmp_path / "runs")) == 1 and len(evalkit.list_runs(tmp_path / "between")) == 2


def test_bf16_shards_are_scored_as_they_are_trained(folder: Path, documents: Path, tmp_path: Path) -> None:
    """Under `MixedPrecisionPolicy`: a run in bfloat16, near the one in float32, and the training is not changed."""
    given = asked(documents, tmp_path / "runs", folder, every=2)
    jobs = [job("without", "vanilla", "fsdp", 3, None, half=True), job("with", "vanilla", "fsdp", 3, given, half=True)]
    done = launch(tmp_path / "jobs", jobs)
    assert done.returncode == 0, done.stderr
    for expected, state in zip(states(tmp_path / "jobs", "without"), states(tmp_path / "jobs", "with"), strict=True):
        for what in expected:
            assert equal(state[what], expected[what]), what
    assert only_run(tmp_path / "runs").manifest["specification"]["dtype"] == "bfloat16"


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_on_gpus(kind: str, folder: Path, documents: Path, tmp_path: Path) -> None:
    """The training is not changed, bit for bit, and its memory is given back; rows are those of the CPU."""
    processes = min(2, torch.cuda.device_count())
    jobs = []
    for name in ("vanilla", "integral", "nano"):
        given = asked(documents, tmp_path / name, folder, every=2)
        jobs += [job(f"{name}-without", name, kind, 5, None, device="cuda"),
                 job(f"{name}-with", name, kind, 5, given, device="cuda"),
                 job(f"{name}-start", name, kind, 0, given | {"output": str(tmp_path / f"{name}-start"), "every": None},
                     device="cuda")]  # fmt: skip
    done = launch(tmp_path / "jobs", jobs, processes, "cpu:gloo,cuda:nccl")
    assert done.returncode == 0, done.stderr
    for name in ("vanilla", "integral", "nano"):
        pairs = zip(
            states(tmp_path / "jobs", f"{name}-without", processes),
            states(tmp_path / "jobs", f"{name}-with", processes),
            strict=True,
        )
        for expected, state in pairs:
            for what in expected:
                assert equal(state[what], expected[what]), (name, what)
        in_loop(asked(documents, tmp_path / f"{name}-cpu", folder))(built(name), 0)
        mine, theirs = only_run(tmp_path / f"{name}-start").scores, only_run(tmp_path / f"{name}-cpu").scores
        values = [torch.tensor(table["ll_continuation"].to_numpy(copy=True)) for table in (mine, theirs)]
        # Float32 matrix products of a GPU sum in another order
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4, equal_nan=True)
