"""Runs on a real cluster: the same tables as a single process, whatever is lost."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch

from evalkit.engines.base import Job, Outcome
from evalkit.engines.cluster.engine import ClusterRunner
from evalkit.engines.cluster.ray_cluster import ClusterOptions
from evalkit.errors import EvalkitError, UsageError
from evalkit.runs.folder import JOURNAL, load_run
from evalkit.runs.lock import is_locked
from evalkit.scores.table import ScoreRow
from tests.benchmarks.longbench.made import record, write
from tests.benchmarks.test_every_benchmark import made, plan, tables
from tests.documents import made_up
from tests.engines.cluster.conftest import Nodes, Recorder, batches_in, jobs_of, same, states, workers
from tests.journals import entries_of
from tests.tiny import tiny_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

Tables = dict[str, pd.DataFrame]


def run(cluster: Nodes, jobs: list[Job], progress: Recorder | None = None, **options: Any) -> list[Outcome]:
    """Run jobs on the cluster."""
    return ClusterRunner(ClusterOptions(address=cluster.address, **options))(jobs, progress or Recorder())


def slow(cluster: Nodes, seconds: float) -> None:
    """Make every batch take longer, so that there is time to interfere."""
    (cluster.faults / "slow").write_text(str(seconds))


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
    jobs = [*jobs_of(files, tmp_path, models=1), *jobs_of(files, tmp_path, models=2, tasks=("piqa",))[1:]]
    outcomes = run(two_nodes, jobs)
    assert states(outcomes) == ["failed", "finished"]
    assert "batch 2 of boolq" in outcomes[0].message and "ended 3 workers" in outcomes[0].message
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
    """Its batches are given to the other one; the run does not wait for it."""
    monkeypatch.setattr("evalkit.engines.cluster.driver._OVERDUE", 1.0)
    slow(two_nodes, 0.05)
    jobs, progress = jobs_of(files, tmp_path, models=3), Recorder().at(5, lambda: computing().suspend())
    assert states(run(two_nodes, jobs, progress)) == ["finished"] * 3
    assert any("is overdue" in line for line in progress.said)
    assert same(jobs, expected)


def test_a_worker_that_stops_for_a_while(
    two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalkit.engines.cluster.driver._OVERDUE", 1.0)
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


def test_a_batch_that_two_workers_compute(
    two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end an idle worker computes what the other one has too; the first delivery counts."""
    monkeypatch.setattr("evalkit.engines.cluster.driver._OVERDUE", 0.0)
    monkeypatch.setattr("evalkit.engines.cluster.driver._OVERDUE_SHARE", 0.0)
    slow(two_nodes, 0.3)
    jobs, progress = jobs_of(files, tmp_path, models=1), Recorder()
    assert states(run(two_nodes, jobs, progress)) == ["finished"]
    assert any("is overdue" in line for line in progress.said)
    assert not any("computed twice" in line for line in progress.said)
    keys = [(entry.task, entry.batch) for entry, _ in entries_of(load_run(jobs[0].plan.folder), ScoreRow)]
    assert len(keys) == len(set(keys))
    assert same(jobs, {"model0": expected["model0"]})


def test_every_benchmark_on_one_checkpoint(two_nodes: Nodes, tmp_path: Path) -> None:
    """The workers compute batches of four benchmarks in turn; each table is that of a single process."""
    for seed in (0,):
        tiny_checkpoint(tmp_path / f"model{seed}", seed=seed, window=1024)
    made_up(tmp_path / "documents", count=12)
    texts = [" ".join(f"word{n}" for n in range(start, start + 150)) for start in range(0, 900, 100)]
    write(tmp_path / "rows" / "qasper.jsonl", [record("qasper", n, context=text) for n, text in enumerate(texts)])
    kinds = ("multiple_choice", "lm_eval", "longbench", "needle")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    single = {kind: tables(made(kind, tmp_path, tmp_path / "single")) for kind in kinds}
    torch.set_num_threads(threads)
    jobs = [Job(kind, plan(kind, tmp_path, tmp_path / "cluster")) for kind in kinds]
    assert states(run(two_nodes, jobs)) == ["finished"] * 4
    for job in jobs:
        found = tables(load_run(job.plan.folder))
        assert all(found[name].equals(single[job.label][name]) for name in single[job.label]), job.label


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


SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from evalkit.engines.cluster.engine import ClusterRunner
from evalkit.engines.cluster.ray_cluster import ClusterOptions
from tests.engines.cluster.conftest import Recorder, jobs_of
files, output, address = sys.argv[1:]
ClusterRunner(ClusterOptions(address=address))(jobs_of(Path(files), Path(output)), Recorder())
"""


def begin(cluster: Nodes, files: Path, output: Path) -> subprocess.Popen[bytes]:
    """Start a driver in a process of its own."""
    from tests.engines.cluster.conftest import ROOT

    command = [sys.executable, "-c", SCRIPT, str(files), str(output), cluster.address]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def lines(output: Path) -> int:
    """Return the number of finished batches."""
    return sum(path.read_bytes().count(b"\n") for path in output.glob(f"*/{JOURNAL}"))


@pytest.mark.slow
def test_a_driver_killed_at_random_moments(two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path) -> None:
    slow(two_nodes, 0.1)
    moments = random.Random(15)
    for _ in range(10):
        driver, before = begin(two_nodes, files, tmp_path), lines(tmp_path)
        wanted = before + moments.randint(1, 6)
        while driver.poll() is None and lines(tmp_path) < wanted:
            time.sleep(0.02)
        time.sleep(moments.random() * 0.1)
        driver.kill()
        driver.wait()
    (two_nodes.faults / "slow").unlink()
    jobs = jobs_of(files, tmp_path)
    assert states(run(two_nodes, jobs)) == ["finished"] * 2
    assert same(jobs, {name: expected[name] for name in ("model0", "model1")})


def test_ctrl_c_leaves_no_worker_behind(two_nodes: Nodes, files: Path, tmp_path: Path) -> None:
    slow(two_nodes, 0.3)
    driver = begin(two_nodes, files, tmp_path)
    while lines(tmp_path) < 3:
        assert driver.poll() is None
        time.sleep(0.05)
    assert workers()
    driver.send_signal(signal.SIGINT)
    assert driver.wait(timeout=30) != 0
    deadline = time.monotonic() + 10
    while workers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers() == []
    assert not any(is_locked(path.parent) for path in tmp_path.glob(f"*/{JOURNAL}"))


def test_two_studies_on_one_cluster(two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path) -> None:
    driver = begin(two_nodes, files, tmp_path / "other")
    jobs = jobs_of(files, tmp_path / "own")
    assert states(run(two_nodes, jobs, workers=1)) == ["finished"] * 2
    assert driver.wait(timeout=120) == 0
    for output in ("own", "other"):
        assert same(jobs_of(files, tmp_path / output), {name: expected[name] for name in ("model0", "model1")})
