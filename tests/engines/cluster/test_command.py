"""Drivers in processes of their own, which are ended, or whose cluster is lost: they end, and lose nothing scored."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from evalkit.runs.folder import JOURNAL
from evalkit.runs.writing import is_locked
from tests.engines.cluster.conftest import (
    FAULTS,
    ROOT,
    Nodes,
    Tables,
    jobs_of,
    run,
    same,
    slow,
    states,
    workers,
)

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

STUDY = """
output: runs
settings: {data_dir: DOCUMENTS, allow_unofficial_data: true, dtype: float32, device: cpu, token_budget: 128}
checkpoints: {model0: FILES/model0, model1: FILES/model1}
benchmarks: {reasoning: {suite: zeroshot8, tasks: [piqa, boolq, arc_easy]}}
"""

SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from evalkit.studies.cluster.driver import ClusterRunner
from evalkit.studies.cluster.resources import ClusterOptions
from tests.engines.cluster.conftest import Recorder, jobs_of
files, output, address = sys.argv[1:]
ClusterRunner(ClusterOptions(address=address))(jobs_of(Path(files), Path(output)), Recorder())
"""


def begin(cluster: Nodes, files: Path, output: Path) -> subprocess.Popen[bytes]:
    """Start a driver in a process of its own."""
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


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return what a condition returns as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def faulty(folder: Path) -> dict[str, str]:
    """Return the environment of processes with the faults that a folder names."""
    path = f"{FAULTS}{os.pathsep}{ROOT}"
    return {**os.environ, "FAULTS": str(folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@contextmanager
def command(files: Path, folder: Path, *options: str, seconds: float = 0.5) -> Iterator[subprocess.Popen[str]]:
    """Start `evalkit study run` with batches that take some seconds longer; end it and its cluster."""
    study = STUDY.replace("DOCUMENTS", str(files / "documents")).replace("FILES", str(files))
    (folder / "study.yaml").write_text(study, encoding="utf-8")
    (folder / "slow").write_text(str(seconds))
    words = [sys.executable, "-m", "evalkit", "study", "run", "study.yaml", *options]
    with subprocess.Popen(words, cwd=folder, env=faulty(folder), text=True, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                kill(psutil.Process(process.pid))
            if process.stderr and not process.stderr.closed:
                print(process.stderr.read())


def kill(process: psutil.Process) -> None:
    """Kill a process and its children."""
    for one in [*process.children(recursive=True), process]:
        with suppress(psutil.Error):
            one.kill()


def named(process: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    """Return the children of a command by their name."""
    found = []
    for one in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            # A process that ends has no command line
            found += [one] * (name in Path((one.cmdline() or [""])[0]).name)
    return found


def stored(folder: Path) -> int:
    """Return the number of finished batches of a study."""
    return lines(folder / "runs")


def test_sigterm_while_the_driver_waits_for_a_batch(files: Path, tmp_path: Path) -> None:
    with command(files, tmp_path, "--workers", "1", seconds=3.0) as process:
        until(lambda: stored(tmp_path))
        time.sleep(0.7)
        process.terminate()
        _, said = process.communicate(timeout=30)
    assert process.returncode == 143
    assert said.strip().endswith("finished batches are saved: run the same command again to resume")


@pytest.mark.parametrize("batches", [0, 3])
def test_the_raylet_dies(batches: int, files: Path, tmp_path: Path) -> None:
    """While workers load, or compute: without it no worker starts, and there is no other machine."""
    with command(files, tmp_path, "--workers", "2") as process:
        until(lambda: named(process, "BatchWorker"))
        [raylet] = named(process, "raylet")
        until(lambda: stored(tmp_path) >= batches)
        raylet.kill()
        _, said = process.communicate(timeout=90)
    assert process.returncode == 1
    assert (
        "evalkit: no worker is left and none can start, since Ray's raylet has ended; the last one was lost: " in said
    )
    assert stored(tmp_path) >= batches


@pytest.mark.slow
def test_the_head_is_lost(files: Path, tmp_path: Path) -> None:
    """Head and raylet of the only machine are gone."""
    script = "from ray.cluster_utils import Cluster; print(Cluster(initialize_head=True, head_node_args={'num_cpus': 1,"
    script += " 'include_dashboard': False}).address, flush=True); input()"
    words = [sys.executable, "-c", script]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=faulty(tmp_path), **pipes) as head:
        assert head.stdout is not None
        address = next(line for line in head.stdout if line[0].isdigit()).strip()
        cluster = psutil.Process(head.pid)
        try:
            with command(files, tmp_path, "--ray", address) as process:
                until(lambda: stored(tmp_path) >= 2)
                kill(cluster)
                _, said = process.communicate(timeout=90)
        finally:
            kill(cluster)
    assert process.returncode == 1
    assert "the head of the Ray cluster has not answered for 15 s" in said
    assert (
        "evalkit: the head of the Ray cluster has not answered for 50 s; finished batches are saved: start the" in said
    )
