"""Drivers in processes of their own, which are ended, or whose cluster is lost: they end, and lose nothing scored.

And connections to clusters that are started as docs/scale.md says.
"""

from __future__ import annotations

import os
import random
import signal
import socket
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
    lines,
    run,
    same,
    slow,
    states,
    workers,
)
from tests.studies.made import write_study

pytestmark = pytest.mark.filterwarnings("ignore")
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


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return what a condition returns as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


@pytest.mark.cluster
@pytest.mark.slow
def test_a_driver_killed_at_random_moments(two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path) -> None:
    slow(two_nodes, 0.1)
    moments = random.Random(15)
    for _ in range(10):
        driver, enough = begin(two_nodes, files, tmp_path), lines(tmp_path) + moments.randint(1, 6)
        while driver.poll() is None and lines(tmp_path) < enough:
            time.sleep(0.02)
        time.sleep(moments.random() * 0.1)
        driver.kill()
        driver.wait()
    (two_nodes.faults / "slow").unlink()
    jobs = jobs_of(files, tmp_path)
    assert states(run(two_nodes, jobs)) == ["finished"] * 2 and same(jobs, expected)


@pytest.mark.cluster
def test_ctrl_c_leaves_no_worker_behind(two_nodes: Nodes, files: Path, tmp_path: Path) -> None:
    slow(two_nodes, 0.3)
    driver = begin(two_nodes, files, tmp_path)
    until(lambda: lines(tmp_path) >= 3)
    assert driver.poll() is None and workers()
    driver.send_signal(signal.SIGINT)
    assert driver.wait(timeout=30) != 0
    until(lambda: not workers(), 10)
    assert not any(is_locked(path.parent) for path in tmp_path.glob(f"*/{JOURNAL}"))


@pytest.mark.cluster
def test_two_studies_on_one_cluster(two_nodes: Nodes, files: Path, expected: Tables, tmp_path: Path) -> None:
    driver, jobs = begin(two_nodes, files, tmp_path / "other"), jobs_of(files, tmp_path / "own")
    assert states(run(two_nodes, jobs, workers=1)) == ["finished"] * 2
    assert driver.wait(timeout=120) == 0
    assert same(jobs, expected) and same(jobs_of(files, tmp_path / "other"), expected)


# Commands


def faulty(folder: Path) -> dict[str, str]:
    """The environment of processes with the faults that a folder names."""
    path = f"{FAULTS}{os.pathsep}{ROOT}"
    return {**os.environ, "FAULTS": str(folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def study(files: Path, folder: Path) -> Path:
    """Write a study of two checkpoints, whose files are in another folder."""
    settings = {"data_dir": str(files / "documents"), "allow_unofficial_data": True, "dtype": "float32",
                "device": "cpu", "token_budget": 128}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = {name: str(files / name) for name in ("model0", "model1")}
    benchmarks = {"reasoning": {"suite": "zeroshot8", "tasks": ["piqa", "boolq", "arc_easy"]}}
    return write_study(folder / "study.yaml", checkpoints, benchmarks, settings=settings)


@contextmanager
def command(files: Path, folder: Path, *options: str, seconds: float = 0.5) -> Iterator[subprocess.Popen[str]]:
    """Start `evalkit study run` with batches that take some seconds longer; end it and its cluster."""
    path = study(files, folder)
    (folder / "slow").write_text(str(seconds))
    words = [sys.executable, "-m", "evalkit", "study", "run", str(path), *options]
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
    for member in [*process.children(recursive=True), process]:
        with suppress(psutil.Error):
            member.kill()


def named(process: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    """The children of a command by their name."""
    children = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            # A process that ends has no command line
            children += [child] * (name in Path((child.cmdline() or [""])[0]).name)
    return children


@pytest.mark.cluster
def test_sigterm_while_the_driver_waits_for_a_batch(files: Path, tmp_path: Path) -> None:
    with command(files, tmp_path, "--workers", "1", seconds=3.0) as process:
        until(lambda: lines(tmp_path / "runs"))
        time.sleep(0.7)
        process.terminate()
        _, said = process.communicate(timeout=30)
    assert process.returncode == 143
    assert said.strip().endswith("finished batches are saved: run the same command again to resume")


@pytest.mark.cluster
@pytest.mark.parametrize("batches", [0, 3])
def test_the_raylet_dies(batches: int, files: Path, tmp_path: Path) -> None:
    """While workers load, or compute: without it no worker starts, and there is no other machine."""
    with command(files, tmp_path, "--workers", "2") as process:
        until(lambda: named(process, "BatchWorker"))
        [raylet] = named(process, "raylet")
        until(lambda: lines(tmp_path / "runs") >= batches)
        raylet.kill()
        _, said = process.communicate(timeout=90)
    assert process.returncode == 1 and "evalkit: no worker is left and none can start" in said
    assert lines(tmp_path / "runs") >= batches


@pytest.mark.cluster
@pytest.mark.slow
def test_the_head_is_lost(files: Path, tmp_path: Path) -> None:
    """Head and raylet of the only machine are gone."""
    script = "from ray.cluster_utils import Cluster; print(Cluster(initialize_head=True, head_node_args={'num_cpus': 1,"
    script += " 'include_dashboard': False}).address, flush=True); input()"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], env=faulty(tmp_path), **pipes) as head:
        assert head.stdout is not None
        address = next(line for line in head.stdout if line[0].isdigit()).strip()
        cluster = psutil.Process(head.pid)
        try:
            with command(files, tmp_path, "--ray", address) as process:
                until(lambda: lines(tmp_path / "runs") >= 2)
                kill(cluster)
                _, said = process.communicate(timeout=90)
        finally:
            kill(cluster)
    assert process.returncode == 1
    assert "the head of the Ray cluster has not answered for 15 s" in said
    assert "evalkit: the head of the Ray cluster has not answered for 50 s; finished batches are saved" in said


# Connections


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of a user with a home folder of their own and no settings of Ray."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    settings = {"HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return {**plain, **settings, **more}


@pytest.fixture
def head() -> Iterator[Callable[[dict[str, str]], str]]:
    """Start clusters by `ray start --head`, which end with the test; each call returns the address."""
    pytest.importorskip("ray", reason="Ray is not installed")
    heads: list[subprocess.Popen[bytes]] = []

    def answers(port: int) -> bool:
        assert heads[-1].poll() is None
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        return False

    def start(env: dict[str, str]) -> str:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = int(server.getsockname()[1])
        options = ["--num-cpus=1", "--object-store-memory=100000000", "--include-dashboard=false", "--block"]
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}", *options]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        heads.append(subprocess.Popen(command, env=env, start_new_session=True, **quiet))
        until(lambda: answers(port))
        time.sleep(3)  # until its node is registered
        return f"127.0.0.1:{port}"

    yield start
    for process in heads:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def evalkit(env: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "evalkit", "study", "run", *map(str, arguments)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=180, check=False)
    print(done.stderr)
    return done


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The only line of an error."""
    [line] = [line for line in done.stderr.splitlines() if line.startswith("evalkit: ")]
    assert done.returncode == 1 and "gcs_client" not in done.stderr and "Traceback" not in done.stderr
    return line


Head = Callable[[dict[str, str]], str]


@pytest.mark.cluster
def test_the_recipes_work_in_their_order(files: Path, tmp_path: Path, head: Head) -> None:
    """Workers of this machine leave nothing in the home folder that a cluster started later would read."""
    env = environment(tmp_path)
    assert evalkit(env, study(files, tmp_path / "local"), "--workers", "1").returncode == 0
    assert not (tmp_path / ".ray").exists()
    done = evalkit(env, study(files, tmp_path / "cluster"), "--ray", head(env))
    assert done.returncode == 0 and "2 finished" in done.stdout
    assert not (tmp_path / ".ray").exists()


@pytest.mark.cluster
def test_a_cluster_that_requires_a_token(files: Path, tmp_path: Path, head: Head) -> None:
    """The message says so and what to set, and this works."""
    token, text = tmp_path / ".ray" / "auth_token", "0123456789abcdef" * 4
    token.parent.mkdir()
    token.write_text(text, encoding="utf-8")
    env = environment(tmp_path)
    address = head(env)
    command = (study(files, tmp_path / "token"), "--ray", address)
    for more in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another"}):
        started = time.monotonic()
        line = refused(evalkit({**env, **more}, *command))
        assert f"--ray {address}" in line and "RAY_AUTH_MODE=token" in line and "RAY_AUTH_TOKEN" in line
        assert time.monotonic() - started < 20
    done = evalkit(environment(tmp_path / "elsewhere", RAY_AUTH_MODE="token"), *command)
    assert done.returncode == 1 and "authentication token" in done.stderr.splitlines()[-1]
    assert evalkit({**env, "RAY_AUTH_MODE": "token"}, *command).returncode == 0
    assert token.read_text(encoding="utf-8") == text


@pytest.mark.cluster
@pytest.mark.parametrize("more", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "ab" * 32}, {}])
def test_a_users_settings_of_authentication_are_respected(more: dict[str, str], files: Path, tmp_path: Path) -> None:
    """Also a token in the home folder, which stays as it is."""
    token = tmp_path / ".ray" / "auth_token"
    if not more:
        token.parent.mkdir()
        token.write_text("cd" * 32, encoding="utf-8")
    assert evalkit(environment(tmp_path, **more), study(files, tmp_path / "own"), "--workers", "1").returncode == 0
    assert (token.read_text(encoding="utf-8") if token.exists() else None) == (None if more else "cd" * 32)


OTHER_VERSION = """
import wrapt

@wrapt.when_imported("ray")
def _change(module):
    module.__version__ = "2.40.1"
"""


@pytest.mark.cluster
def test_a_cluster_of_another_version(files: Path, tmp_path: Path, head: Head) -> None:
    """The error names both versions."""
    import ray

    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(OTHER_VERSION, encoding="utf-8")
    other = environment(tmp_path, PYTHONPATH=f"{tmp_path / 'site'}{os.pathsep}{ROOT}")
    line = refused(evalkit(environment(tmp_path), study(files, tmp_path / "version"), "--ray", head(other)))
    python = ".".join(map(str, sys.version_info[:3]))
    assert "2.40.1" in line and ray.__version__ in line and python in line
