"""Runs on a real cluster: the same tables as a single process, whatever is lost."""

from __future__ import annotations

import os
import re
import threading
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import torch

from evalkit.errors import EvalkitError, UsageError
from evalkit.runs.folder import load_run
from evalkit.runs.writing import is_locked
from evalkit.studies.cluster.driver import ClusterRunner
from evalkit.studies.cluster.resources import ClusterOptions
from evalkit.studies.running import Job
from tests.benchmarks.kinds import made, plan
from tests.benchmarks.kinds import same as same_run
from tests.benchmarks.longbench.made import record, write
from tests.documents import made_up
from tests.engines.cluster.conftest import (
    Nodes,
    Recorder,
    Tables,
    batches_in,
    jobs_of,
    run,
    same,
    slow,
    states,
    workers,
)
from tests.tiny import tiny_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


def kill_a_worker() -> None:
    """Kill one worker, as the system does when memory is short."""
    workers()[0].kill()


def computing() -> psutil.Process:
    """Return a worker that has a batch; the others may still load."""
    while True:
        for process in workers():
            if any("BatchWorker.compute" in part for part in process.cmdline()):
                return process


def test_two_workers_give_the_numbers_of_one_process(
    two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path
) -> None:
    jobs, progress = jobs_of(files, tmp_path, models=3), Recorder()
    assert states(run(two_nodes, jobs, progress)) == ["finished"] * 3
    assert same(jobs, expected)
    assert not any("warning" in line for line in progress.said)
    devices = load_run(jobs[0].plan.folder).manifest["devices"]
    assert {one["threads"] for one in devices} == {1}
    assert not any(is_locked(job.plan.folder) for job in jobs)


def test_a_second_time_nothing_is_computed(two_nodes: Nodes, files: Path, tmp_path: Path) -> None:
    jobs = jobs_of(files, tmp_path)
    run(two_nodes, jobs)
    progress = Recorder()
    assert states(run(two_nodes, jobs_of(files, tmp_path), progress)) == ["finished"] * 2
    assert progress.batches == 0


def test_a_killed_worker_is_replaced(two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path) -> None:
    slow(two_nodes, 0.05)
    jobs, progress = jobs_of(files, tmp_path), Recorder().at(5, kill_a_worker).at(12, kill_a_worker)
    assert states(run(two_nodes, jobs, progress)) == ["finished"] * 2
    assert sum("was lost" in line for line in progress.said) == 2
    assert not any("its log" in line for line in progress.said)  # it names no cause
    assert same(jobs, {name: expected[name] for name in ("model0", "model1")})


def test_a_node_lost_in_mid_batch(two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path) -> None:
    slow(two_nodes, 0.05)
    jobs, progress = jobs_of(files, tmp_path), Recorder().at(5, lambda: two_nodes.remove(two_nodes.nodes[0]))
    assert states(run(two_nodes, jobs, progress)) == ["finished"] * 2
    assert any("was lost" in line for line in progress.said)
    assert same(jobs, {name: expected[name] for name in ("model0", "model1")})


def test_a_node_added_in_mid_run_takes_work(two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path) -> None:
    slow(two_nodes, 1.0)  # time for a worker to start
    seen: set[int] = set()

    def look() -> None:
        seen.add(len(workers()))

    jobs, progress = jobs_of(files, tmp_path), Recorder().at(2, lambda: two_nodes.add() and None, here=True)
    for batches in range(10, 200, 2):
        progress.at(batches, look)
    assert states(run(two_nodes, jobs, progress)) == ["finished"] * 2
    assert max(seen) == 3
    assert same(jobs, {name: expected[name] for name in ("model0", "model1")})


def test_a_batch_that_kills_three_workers_is_named_and_the_others_go_on(
    two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path
) -> None:
    (two_nodes.faults / "poison").write_text("boolq 2")
    (two_nodes.faults / "abort").touch()
    progress = Recorder()
    jobs = [*jobs_of(files, tmp_path, models=1), *jobs_of(files, tmp_path, models=2, tasks=("piqa",))[1:]]
    outcomes = run(two_nodes, jobs, progress)
    assert states(outcomes) == ["failed", "finished"]
    assert "batch 2 of boolq" in outcomes[0].message and "ended 3 workers" in outcomes[0].message
    assert sum("its log: " in line and "Abort" in line for line in progress.said) >= 3
    # What was computed is kept, and without the fault the run goes on
    (two_nodes.faults / "poison").unlink()
    before = batches_in(load_run(jobs[0].plan.folder))
    assert before
    again = jobs_of(files, tmp_path, models=1)
    assert states(run(two_nodes, again)) == ["finished"]
    assert same(again, {"model0": expected["model0"]})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_that_runs_out_on_one_worker_changes_nothing(
    dtype: str, two_nodes: Nodes, files: Path, tmp_path: Path
) -> None:
    plain = jobs_of(files, tmp_path / "plain", models=1, dtype=dtype)
    run(two_nodes, plain)
    (two_nodes.faults / "memory").touch()
    jobs, progress = jobs_of(files, tmp_path / "short", models=1, dtype=dtype), Recorder()
    assert states(run(two_nodes, jobs, progress)) == ["finished"]
    assert (two_nodes.faults / "memory happened").exists()
    assert any("out of memory" in line and "another worker computes it" in line for line in progress.said)
    assert same(jobs, {"model0": load_run(plain[0].plan.folder).scores})


def test_a_worker_that_stops_answering(
    two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced; the other one goes on."""
    monkeypatch.setattr("evalkit.studies.cluster.workers._DEADLINE", 4.0)
    monkeypatch.setattr("evalkit.studies.cluster.workers._FIRST_DEADLINE", 10.0)
    slow(two_nodes, 0.05)
    jobs, progress = jobs_of(files, tmp_path, models=3), Recorder().at(5, lambda: computing().suspend())
    assert states(run(two_nodes, jobs, progress)) == ["finished"] * 3
    assert sum("was lost" in line for line in progress.said) == 1
    assert same(jobs, expected)


def test_a_worker_that_stops_for_a_while(two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path) -> None:
    slow(two_nodes, 0.3)

    def stop() -> None:
        stopped = workers()[0]
        stopped.suspend()
        time.sleep(4)
        stopped.resume()

    jobs, progress = jobs_of(files, tmp_path, models=2), Recorder().at(5, stop)
    assert states(run(two_nodes, jobs, progress)) == ["finished"] * 2
    assert not any("was lost" in line or "differ" in line for line in progress.said)
    assert same(jobs, {name: expected[name] for name in ("model0", "model1")})


def test_an_exception_in_a_batch_fails_its_run_and_restarts_no_worker(
    two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path
) -> None:
    (two_nodes.faults / "error").write_text("boolq 2")
    jobs, progress = [*jobs_of(files, tmp_path, models=1), *jobs_of(files, tmp_path, tasks=("piqa",))[1:]], Recorder()
    outcomes = run(two_nodes, jobs, progress)
    assert states(outcomes) == ["failed", "finished"]
    assert outcomes[0].message == "unexpected ValueError: injected"
    assert any("Traceback" in line or "sitecustomize" in line for line in progress.said)
    assert not any("was lost" in line for line in progress.said)
    (two_nodes.faults / "error").unlink()
    again = jobs_of(files, tmp_path, models=1)
    assert states(run(two_nodes, again)) == ["finished"]
    assert same(again, {"model0": expected["model0"]})


@pytest.mark.parametrize("moment", ["prepare", "compute"])
def test_the_only_worker_is_frozen(
    moment: str, two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is said, and the worker is replaced."""
    monkeypatch.setattr("evalkit.studies.cluster.workers._DEADLINE", 6.0)
    monkeypatch.setattr("evalkit.studies.cluster.workers._FIRST_DEADLINE", 10.0)
    monkeypatch.setattr("evalkit.studies.cluster.workers._LOADING_DEADLINE", 15.0)
    slow(two_nodes, 0.3)

    def freeze() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for process in workers():
                if f"BatchWorker.{moment}" in " ".join(process.cmdline()):
                    process.suspend()
                    return
            time.sleep(0.01)

    thread = threading.Thread(target=freeze)
    thread.start()
    jobs, progress = jobs_of(files, tmp_path, models=1), Recorder()
    assert states(run(two_nodes, jobs, progress, workers=1)) == ["finished"]
    thread.join()
    assert sum("was lost" in line and " within " in line for line in progress.said) == 1
    assert same(jobs, {"model0": expected["model0"]})


def test_every_benchmark_on_one_checkpoint(two_nodes: Nodes, tmp_path: Path) -> None:
    """The workers compute batches of four benchmarks in turn; each table is that of a single process."""
    for seed in (0,):
        tiny_checkpoint(tmp_path / f"model{seed}", seed=seed, window=1024)
    made_up(tmp_path / "documents", count=12)
    texts = [" ".join(f"word{n}" for n in range(start, start + 150)) for start in range(0, 900, 100)]
    rows = [record("passage_count", n, context=text) for n, text in enumerate(texts)]
    write(tmp_path / "rows" / "passage_count.jsonl", rows)
    kinds = ("multiple_choice", "lm_eval", "longbench", "needle")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    single = {kind: made(kind, tmp_path, tmp_path / "single") for kind in kinds}
    torch.set_num_threads(threads)
    jobs = [Job(kind, plan(kind, tmp_path, tmp_path / "cluster")) for kind in kinds]
    assert states(run(two_nodes, jobs)) == ["finished"] * 4
    for job in jobs:
        same_run(load_run(job.plan.folder), single[job.label])


def test_workers_with_other_versions_are_refused(
    cluster: Nodes, two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path
) -> None:
    other = tmp_path / "site" / "transformers-99.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 99.0\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path / "site"), cluster.env["PYTHONPATH"]])
    while cluster.nodes:
        cluster.remove(cluster.nodes[0])
    cluster.add(PYTHONPATH=path)
    here = re.escape(version("transformers"))
    with pytest.raises(EvalkitError, match=rf"every worker is refused.*transformers is 99.0 there, {here} here"):
        run(cluster, jobs_of(files, tmp_path / "none", models=1))
    cluster.add()
    jobs, progress = jobs_of(files, tmp_path / "runs", models=1), Recorder()
    assert states(run(cluster, jobs, progress)) == ["finished"]
    assert any("is refused: transformers is 99.0 there" in line for line in progress.said)
    assert same(jobs, {"model0": expected["model0"]})
    cluster.remove(cluster.nodes[0])


def test_a_checkpoint_that_changed_is_refused(two_nodes: Nodes, files: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(files / "model0", tmp_path / "files" / "model0")
    (tmp_path / "files" / "documents").symlink_to(files / "documents")
    jobs = jobs_of(tmp_path / "files", tmp_path / "runs", models=1)
    shutil.copy(files / "model1" / "model.safetensors", tmp_path / "files" / "model0" / "model.safetensors")
    [outcome] = run(two_nodes, jobs)
    assert outcome.state == "failed"
    assert "changed since this run was started (weights)" in outcome.message


def test_shipped_checkpoints(two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path) -> None:
    """The workers cannot read the folder by the time they need it."""
    import shutil

    shutil.copytree(files / "model0", tmp_path / "files" / "model0")
    (tmp_path / "files" / "documents").symlink_to(files / "documents")
    jobs = jobs_of(tmp_path / "files", tmp_path / "runs", models=1)
    [outcome] = run(two_nodes, jobs, ship=True)
    assert outcome.state == "finished"
    assert same(jobs, {"model0": expected["model0"]})


def test_a_run_of_another_process_is_left_to_it(two_nodes: Nodes, files: Path, tmp_path: Path) -> None:
    from evalkit.benchmarks.session import opened

    jobs = jobs_of(files, tmp_path)
    with opened(jobs[0].plan, lambda _: None):
        outcomes = run(two_nodes, jobs)
    assert states(outcomes) == ["in use", "finished"]
    assert f"process {os.getpid()}" in outcomes[0].message


def test_a_cluster_without_what_is_asked_for(two_nodes: Nodes, files: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(UsageError, match=r"each needs 64 CPU cores, and the cluster has 2 CPU cores and 0 GPUs"):
        run(two_nodes, jobs_of(files, tmp_path), worker_cpus=64)
    with pytest.raises(UsageError, match=r"1 GPU, and the cluster has"):
        run(two_nodes, jobs_of(files, tmp_path), worker_gpus=1)
    assert time.monotonic() - started < 30


def test_an_address_that_does_not_answer(files: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    runner = ClusterRunner(ClusterOptions(address="127.0.0.1:1"))
    with pytest.raises(EvalkitError, match=r"--ray 127.0.0.1:1: no cluster answers there"):
        runner(jobs_of(files, tmp_path), Recorder())
    assert time.monotonic() - started < 15
