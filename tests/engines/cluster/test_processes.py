"""Commands on real clusters, which are ended or whose head is lost; clusters that are started as docs/scale.md says."""

from __future__ import annotations

import os
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
from tests.engines.cluster.conftest import FAULTS, ROOT, lines
from tests.studies.made import write_study

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]
Head = Callable[[dict[str, str]], tuple[str, int]]


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of a user with a home folder of their own and no settings of Ray, and faults in that folder."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    settings = {"HOME": str(home), "FAULTS": str(home), "PYTHONPATH": f"{FAULTS}{os.pathsep}{ROOT}",
                "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}  # fmt: skip
    return {**plain, **settings, **more}


def command(files: Path, folder: Path, *options: str) -> list[str]:
    """`evalkit study run` on two checkpoints, whose files are in another folder."""
    settings = {"data_dir": str(files / "documents"), "allow_unofficial_data": True, "dtype": "float32",
                "device": "cpu", "token_budget": 128}  # fmt: skip
    folder.mkdir(exist_ok=True)
    checkpoints = {name: str(files / name) for name in ("model0", "model1")}
    benchmarks = {"reasoning": {"suite": "zeroshot8", "tasks": ["piqa", "boolq", "arc_easy"]}}
    path = write_study(folder / "study.yaml", checkpoints, benchmarks, settings=settings)
    return [sys.executable, "-m", "evalkit", "study", "run", str(path), *options]


def evalkit(env: dict[str, str], words: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=180, check=False)
    print(done.stderr)
    return done


@contextmanager
def begun(files: Path, folder: Path, *options: str, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A command whose batches take some seconds longer, once one is stored; it and its cluster end with the test."""
    (folder / "slow").write_text(str(seconds))
    words = command(files, folder, *options)
    with subprocess.Popen(words, env=environment(folder), text=True, stderr=subprocess.PIPE) as process:
        try:
            until(lambda: lines(folder / "runs"))
            yield process
        finally:
            if process.poll() is None:
                for member in [*psutil.Process(process.pid).children(recursive=True), process]:
                    with suppress(psutil.Error):
                        member.kill()


@pytest.fixture
def head() -> Iterator[Head]:
    """Start clusters by `ray start --head`, which end with the test; return address and process group."""
    pytest.importorskip("ray", reason="Ray is not installed")
    heads: list[subprocess.Popen[bytes]] = []

    def answers(port: int) -> bool:
        assert heads[-1].poll() is None
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        return False

    def start(env: dict[str, str]) -> tuple[str, int]:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = int(server.getsockname()[1])
        options = ["--num-cpus=1", "--object-store-memory=100000000", "--include-dashboard=false", "--block"]
        words = [str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}", *options]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        heads.append(subprocess.Popen(words, env=env, start_new_session=True, **quiet))
        until(lambda: answers(port))
        time.sleep(3)  # until its node is registered
        return f"127.0.0.1:{port}", heads[-1].pid

    yield start
    for process in heads:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_driver_that_is_ended_leaves_no_worker_and_no_lock(kind: signal.Signals, files: Path, tmp_path: Path) -> None:
    with begun(files, tmp_path, "--workers", "1", seconds=3.0) as process:
        members = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(kind)
        _, said = process.communicate(timeout=30)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[kind]
    assert said.strip().endswith("finished batches are saved: run the same command again to resume")
    psutil.wait_procs(members, timeout=10)
    assert not [member for member in members if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]
    assert not any(is_locked(path.parent) for path in tmp_path.glob(f"runs/*/{JOURNAL}"))


@pytest.mark.slow
def test_the_head_is_lost(files: Path, tmp_path: Path, head: Head) -> None:
    """Head and raylet of the only machine are gone."""
    address, group = head(environment(tmp_path))
    with begun(files, tmp_path, "--ray", address, seconds=0.5) as process:
        for member in psutil.Process(group).children(recursive=True):
            member.kill()
        _, said = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "evalkit: the head of the Ray cluster has not answered for 50 s; finished batches are saved" in said


def test_the_recipes_work_in_their_order(files: Path, tmp_path: Path, head: Head) -> None:
    """Workers of this machine leave nothing in the home folder that a cluster started later would read."""
    env = environment(tmp_path)
    assert evalkit(env, command(files, tmp_path / "local", "--workers", "1")).returncode == 0
    done = evalkit(env, command(files, tmp_path / "cluster", "--ray", head(env)[0]))
    assert done.returncode == 0 and "2 finished" in done.stdout
    assert not (tmp_path / ".ray").exists()


def test_a_cluster_that_requires_a_token(files: Path, tmp_path: Path, head: Head) -> None:
    """The message says so and what to set, and this works; the user's token stays."""
    token, text = tmp_path / ".ray" / "auth_token", "0123456789abcdef" * 4
    token.parent.mkdir()
    token.write_text(text, encoding="utf-8")
    env = environment(tmp_path)
    address, _ = head(env)
    words = command(files, tmp_path / "token", "--ray", address)
    for more in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another"}):
        done = evalkit({**env, **more}, words)
        [line] = [line for line in done.stderr.splitlines() if line.startswith("evalkit: ")]
        assert done.returncode == 1 and "gcs_client" not in done.stderr and "Traceback" not in done.stderr
        assert f"--ray {address}" in line and "RAY_AUTH_MODE=token" in line and "RAY_AUTH_TOKEN" in line
    assert evalkit({**env, "RAY_AUTH_MODE": "token"}, words).returncode == 0
    assert evalkit(env, command(files, tmp_path / "own", "--workers", "1")).returncode == 0
    assert token.read_text(encoding="utf-8") == text
