"""Runs on a real cluster: the same tables as a single process, whatever is lost."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil
import pytest
import torch

from evalkit.benchmarks.run import planned
from evalkit.benchmarks.session import opened
from evalkit.errors import EvalkitError, UsageError
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import load_run
from evalkit.runs.writing import is_locked
from evalkit.studies.cluster.driver import ClusterRunner
from evalkit.studies.cluster.resources import ClusterOptions
from evalkit.studies.running import Job
from tests.benchmarks.kinds import made, plan
from tests.benchmarks.kinds import same as same_run
from tests.documents import made_up
from tests.engines.cluster.conftest import (
    Nodes,
    Recorder,
    Tables,
    jobs_of,
    lines,
    run,
    same,
    slow,
    states,
    workers,
)
from tests.longcontext.longbench.made import record, write
from tests.tiny import tiny_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]


def computing(method: str = "compute") -> psutil.Process:
    """Wait for a worker that does something."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in workers():
            if f"BatchWorker.{method}" in " ".join(process.cmdline()):
                return process
    raise TimeoutError(method)


def lost(progress: Recorder) -> int:
    return sum("was lost" in line for line in progress.said)


def two_jobs(files: Path, output: Path) -> list[Job]:
    """A whole run of one checkpoint, and a task of another."""
    return [*jobs_of(files, output, models=1), *jobs_of(files, output, tasks=("piqa",))[1:]]


def test_two_workers_give_the_numbers_of_one_process(
    two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path
) -> None:
    """A second time nothing is computed."""
    jobs, progress = jobs_of(files, tmp_path, models=3), Recorder()
    assert states(run(two_nodes, jobs, progress)) == ["finished"] * 3
    assert same(jobs, expected)
    assert not any("warning" in line for line in progress.said)
    assert {device["threads"] for device in load_run(jobs[0].plan.folder).manifest["devices"]} == {1}
    assert not any(is_locked(job.plan.folder) for job in jobs)
    again = Recorder()
    assert states(run(two_nodes, jobs_of(files, tmp_path, models=3), again)) == ["finished"] * 3
    assert again.batches == 0


@pytest.mark.parametrize("what", ["worker", "node"])
def test_what_is_lost_in_mid_run_is_replaced(
    what: str, two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path
) -> None:
    slow(two_nodes, 0.05)
    jobs, progress = jobs_of(files, tmp_path), Recorder()
    if what == "worker":  # as the system kills it when memory is short
        progress.at(5, lambda: workers()[0].kill()).at(12, lambda: workers()[0].kill())
    else:
        progress.at(5, lambda: two_nodes.remove(two_nodes.nodes[0]))
    assert states(run(two_nodes, jobs, progress)) == ["finished"] * 2
    assert lost(progress) >= 1 and (what == "node" or lost(progress) == 2)
    assert what == "node" or not any("its log" in line for line in progress.said)  # it names no cause
    assert same(jobs, expected)


def test_a_node_added_in_mid_run_takes_work(two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path) -> None:
    slow(two_nodes, 1.0)  # time for a worker to start
    seen: set[int] = set()
    jobs, progress = jobs_of(files, tmp_path), Recorder().at(2, lambda: two_nodes.add() and None, here=True)
    for batches in range(10, 200, 2):
        progress.at(batches, lambda: seen.add(len(workers())))
    assert states(run(two_nodes, jobs, progress)) == ["finished"] * 2
    assert max(seen) == 3 and same(jobs, expected)


@pytest.mark.parametrize("fault", ["poison", "error"])
def test_a_batch_that_cannot_be_computed_is_named_and_the_others_go_on(
    fault: str, two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path
) -> None:
    """It kills three workers, or raises an exception, which restarts no worker. What was computed is kept."""
    (two_nodes.faults / fault).write_text("boolq 2")
    (two_nodes.faults / "abort").touch()
    jobs, progress = two_jobs(files, tmp_path), Recorder()
    outcomes = run(two_nodes, jobs, progress)
    assert states(outcomes) == ["failed", "finished"]
    if fault == "poison":
        assert "batch 2 of boolq" in outcomes[0].message and "ended 3 workers" in outcomes[0].message
        assert sum("its log: " in line and "Abort" in line for line in progress.said) >= 3
    else:
        assert outcomes[0].message == "unexpected ValueError: injected" and not lost(progress)
        assert any("Traceback" in line or "sitecustomize" in line for line in progress.said)
    (two_nodes.faults / fault).unlink()
    assert lines(tmp_path)
    again = jobs_of(files, tmp_path, models=1)
    assert states(run(two_nodes, again)) == ["finished"] and same(again, expected)


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
    assert any("out of memory" in line and "another worker" in line for line in progress.said)
    assert same(jobs, {"model0": load_run(plain[0].plan.folder).scores})


@pytest.mark.parametrize(("moment", "count"), [("prepare", 1), ("compute", 1), ("compute", 2)])
def test_a_worker_that_freezes_is_replaced(
    moment: str,
    count: int,
    two_nodes: Nodes,
    files: Path,
    expected: Tables,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only worker, while it loads or computes; or one of two, while the other one goes on."""
    deadlines = {"_LOADING_DEADLINE": 15.0} if moment == "prepare" else {"_DEADLINE": 6.0, "_FIRST_DEADLINE": 10.0}
    for name, seconds in deadlines.items():
        monkeypatch.setattr(f"evalkit.studies.cluster.workers.{name}", seconds)
    slow(two_nodes, 0.3)
    thread = threading.Thread(target=lambda: computing(moment).suspend())
    thread.start()
    jobs, progress = jobs_of(files, tmp_path, models=count), Recorder()
    assert states(run(two_nodes, jobs, progress, workers=count)) == ["finished"] * count
    thread.join()
    assert sum("was lost" in line and " within " in line for line in progress.said) == 1
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
    assert not lost(progress) and not any("differ" in line for line in progress.said)
    assert same(jobs, expected)


def test_every_benchmark_on_one_checkpoint(two_nodes: Nodes, tmp_path: Path) -> None:
    """The workers compute batches of four benchmarks in turn; each table is that of a single process."""
    tiny_checkpoint(tmp_path / "model0", window=1024)
    made_up(tmp_path / "documents", count=12)
    texts = [" ".join(f"word{number}" for number in range(start, start + 150)) for start in range(0, 900, 100)]
    rows = [record("qasper", number, context=text) for number, text in enumerate(texts)]
    write(tmp_path / "rows" / "qasper.jsonl", rows)
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
    assert states(run(cluster, jobs, progress)) == ["finished"] and same(jobs, expected)
    assert any("is refused: transformers is 99.0 there" in line for line in progress.said)
    cluster.remove(cluster.nodes[0])


@pytest.mark.parametrize("ship", [False, True])
def test_a_checkpoint_that_changed_is_refused_and_one_that_is_sent_is_checked(
    ship: bool, two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path
) -> None:
    shutil.copytree(files / "model0", tmp_path / "files" / "model0")
    (tmp_path / "files" / "documents").symlink_to(files / "documents")
    jobs = jobs_of(tmp_path / "files", tmp_path / "runs", models=1)
    if ship:
        assert states(run(two_nodes, jobs, ship=True)) == ["finished"] and same(jobs, expected)
        jobs = jobs_of(tmp_path / "files", tmp_path / "again", models=1)
    shutil.copy(files / "model1" / "model.safetensors", tmp_path / "files" / "model0" / "model.safetensors")
    [outcome] = run(two_nodes, jobs, ship=ship)
    assert outcome.state == "failed" and "changed since this run was started (weights)" in outcome.message


def test_a_run_of_another_process_is_left_to_it(two_nodes: Nodes, files: Path, tmp_path: Path) -> None:
    jobs = jobs_of(files, tmp_path)
    with opened(jobs[0].plan, silent):
        outcomes = run(two_nodes, jobs)
    assert states(outcomes) == ["in use", "finished"] and f"process {os.getpid()}" in outcomes[0].message


def test_a_cluster_without_what_is_asked_for(two_nodes: Nodes, files: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    for options, noun in (({"worker_cpus": 64}, "64 CPU cores"), ({"worker_gpus": 1}, "1 GPU")):
        with pytest.raises(UsageError, match=rf"{noun}, and the cluster has 2 CPU cores and 0 GPUs"):
            run(two_nodes, jobs_of(files, tmp_path), **options)
    with pytest.raises(EvalkitError, match=r"--ray 127.0.0.1:1"):
        ClusterRunner(ClusterOptions(address="127.0.0.1:1"))(jobs_of(files, tmp_path), Recorder())
    assert time.monotonic() - started < 90


def test_a_cluster_of_unequal_machines(
    cluster: Nodes, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both machines' GPUs, which are only declared here, have a worker each."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # Ray counts what it lists
    while cluster.nodes:
        cluster.remove(cluster.nodes[0])
    nodes = [cluster.add(cpus=2, gpus=gpus) for gpus in (1, 2)]
    jobs, progress = jobs_of(files, tmp_path, device="auto", tasks=("piqa",)), Recorder()
    try:
        assert states(run(cluster, jobs, progress)) == ["finished"] * 2
    finally:
        for node in nodes:
            cluster.remove(node)
    assert "3 workers of 1 CPU core and 1 GPU each" in progress.said


class Watcher(Recorder):
    """Keeps what the user would read after every batch: (time, finished share, estimated seconds left)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float, float | None]] = []

    def advance(self, work: float, documents: int) -> None:
        """Keep the estimate."""
        super().advance(work, documents)
        if documents:
            self.seen.append((time.monotonic(), self.share(), self.seconds_left()))


def test_estimates_of_benchmarks_of_different_cost(two_nodes: Nodes, tmp_path: Path) -> None:
    """An answer of a hundred tokens takes longer than a question with two choices; there are more of the latter."""
    tiny_checkpoint(tmp_path / "model", window=1024, layers=6, hidden=512, heads=8)
    made_up(tmp_path / "documents", count=60)
    texts = [" ".join(f"word{number}" for number in range(start, start + 100)) for start in range(0, 1600, 100)]
    write(tmp_path / "rows" / "qasper.jsonl", [record("qasper", n, context=text) for n, text in enumerate(texts)])
    common = {"output": tmp_path / "runs", "device": "cpu", "dtype": "float32", "token_budget": 600}
    choices = {"data_dir": tmp_path / "documents", "allow_unofficial_data": True, "tasks": ("piqa",)}
    answers = {"suite": "longbench", "data_dir": tmp_path / "rows", "context": "none", "tasks": "qasper",
               "max_prompt_tokens": 400}  # fmt: skip
    jobs = [
        Job(name, planned(tmp_path / "model", common | options, silent))
        for name, options in (("choices", choices), ("answers", answers))
    ]
    watcher = Watcher()
    assert states(run(two_nodes, jobs, watcher)) == ["finished"] * 2
    first, last = watcher.seen[0][0], watcher.seen[-1][0]
    moments = [((when - first) / (last - first), share, left, last - when) for when, share, left in watcher.seen]
    between = [moment for moment in moments if 0.1 < moment[0] < 0.8]
    ratios = [(left or 0.0) / real for _, _, left, real in between]
    assert len(between) > 5 and 0.5 < median(ratios) < 2, moments
    assert min(ratios) > 0.3 and max(ratios) < 3
    assert median(abs(share - elapsed) for elapsed, share, _, _ in between) < 0.15
