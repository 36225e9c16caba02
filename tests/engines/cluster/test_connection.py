"""Connections to clusters that are started as docs/scale.md says, and what they leave behind."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from evalkit.studies.cluster.connection import connect
from tests.engines.cluster.conftest import ROOT
from tests.studies.made import made_files, write_study

pytestmark = pytest.mark.filterwarnings("ignore")

Command = Callable[..., subprocess.CompletedProcess[str]]


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a user with a home folder of their own and no settings of Ray."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    settings = {"HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return {**plain, **settings, **more}


def free_port() -> int:
    """Return a port that nobody uses."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


class Head:
    """A cluster started by `ray start --head`, whose processes end with it."""

    def __init__(self, env: dict[str, str]) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        options = ["--num-cpus=1", "--object-store-memory=100000000", "--include-dashboard=false", "--block"]
        ray = str(Path(sys.executable).with_name("ray"))
        self._process = subprocess.Popen(
            [ray, "start", "--head", f"--port={port}", *options],
            env=env,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self._process.poll() is None
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                time.sleep(3)  # until its node is registered
                return
            time.sleep(0.2)
        raise AssertionError("the cluster did not start")

    def end(self) -> None:
        """End all its processes."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@pytest.fixture
def head() -> Iterator[Callable[[dict[str, str]], Head]]:
    """Start clusters, which end with the test."""
    pytest.importorskip("ray", reason="Ray is not installed")
    heads: list[Head] = []

    def start(env: dict[str, str]) -> Head:
        heads.append(Head(env))
        return heads[-1]

    yield start
    for one in heads:
        one.end()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and documents of a small study."""
    return made_files(tmp_path_factory.mktemp("study"))


def study(made: Path, name: str) -> Path:
    """Write a study of one run with an output folder of its own."""
    return write_study(made / f"{name}.yaml", {"A": "vanilla"}, output=name)


def evalkit(env: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = [sys.executable, "-m", "evalkit", *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)


def lines(text: str) -> list[str]:
    """Return the last lines of standard error, printed for a failing test."""
    print(text)
    return text.splitlines()


@pytest.mark.cluster
def test_the_recipes_work_in_their_order(made: Path, tmp_path: Path, head: Callable[[dict[str, str]], Head]) -> None:
    """Workers of this machine leave nothing in the home folder that a cluster started later would read."""
    env = environment(tmp_path)
    done = evalkit(env, "study", "run", study(made, "local"), "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / ".ray").exists()
    done = evalkit(env, "study", "run", study(made, "cluster"), "--ray", head(env).address)
    assert done.returncode == 0, done.stderr
    assert "1 finished" in done.stdout
    assert not (tmp_path / ".ray").exists()


@pytest.mark.cluster
def test_a_cluster_that_requires_a_token(made: Path, tmp_path: Path, head: Callable[[dict[str, str]], Head]) -> None:
    """The message says so and what to set, and this works."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0123456789abcdef" * 4, encoding="utf-8")
    env = environment(tmp_path)
    address = head(env).address
    command = ("study", "run", study(made, "token"), "--ray", address)
    for more in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another"}):
        started = time.monotonic()
        refused = evalkit({**env, **more}, *command)
        assert refused.returncode == 1
        [line] = [line for line in lines(refused.stderr) if line.startswith("evalkit: ")]
        assert f"--ray {address}: the cluster requires its authentication token" in line
        assert "RAY_AUTH_MODE=token" in line and "RAY_AUTH_TOKEN" in line
        assert "gcs_client" not in refused.stderr and "Traceback" not in refused.stderr
        assert time.monotonic() - started < 20
    without = environment(tmp_path / "elsewhere", RAY_AUTH_MODE="token")
    refused = evalkit(without, *command)
    assert refused.returncode == 1
    assert "authentication token" in lines(refused.stderr)[-1]
    done = evalkit({**env, "RAY_AUTH_MODE": "token"}, *command)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".ray" / "auth_token").read_text(encoding="utf-8") == "0123456789abcdef" * 4


@pytest.mark.cluster
@pytest.mark.parametrize("more", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "ab" * 32}, {}])
def test_a_users_settings_of_authentication_are_respected(more: dict[str, str], made: Path, tmp_path: Path) -> None:
    """Also a token in the home folder, which stays as it is."""
    if not more:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("cd" * 32, encoding="utf-8")
    path = study(made, "own" + "".join(more))
    shutil.rmtree(path.with_suffix(""), ignore_errors=True)
    done = evalkit(environment(tmp_path, **more), "study", "run", path, "--workers", "1")
    assert done.returncode == 0, done.stderr
    kept = (tmp_path / ".ray" / "auth_token").read_text(encoding="utf-8") if (tmp_path / ".ray").exists() else None
    assert kept == (None if more else "cd" * 32)


class FullDisk(io.StringIO):
    """Standard error whose buffer cannot be written."""

    def flush(self) -> None:
        """See `io.StringIO`."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("what", ["folder", "disk"])
def test_standard_error_is_as_before_without_space_for_the_log(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor is that of before, and no other one stays open."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setattr(ray, "init", lambda **_: None)
    if what == "folder":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    else:
        monkeypatch.setattr(sys, "stderr", FullDisk())
    descriptors, file = len(list(Path("/proc/self/fd").iterdir())), os.fstat(2)
    with pytest.raises(OSError) if what == "folder" else nullcontext():
        connect(ray, "auto")
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert os.path.samestat(os.fstat(2), file)


OTHER_VERSION = """
import wrapt

@wrapt.when_imported("ray")
def _change(module):
    module.__version__ = "2.40.1"
"""


@pytest.mark.cluster
def test_a_cluster_of_another_version(made: Path, tmp_path: Path, head: Callable[[dict[str, str]], Head]) -> None:
    """The error names both versions."""
    import ray

    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(OTHER_VERSION, encoding="utf-8")
    other = environment(tmp_path, PYTHONPATH=f"{tmp_path / 'site'}{os.pathsep}{ROOT}")
    refused = evalkit(environment(tmp_path), "study", "run", study(made, "version"), "--ray", head(other).address)
    assert refused.returncode == 1
    [line] = [line for line in lines(refused.stderr) if line.startswith("evalkit: ")]
    python = ".".join(map(str, sys.version_info[:3]))
    assert "2.40.1" in line and ray.__version__ in line and python in line
