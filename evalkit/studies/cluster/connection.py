"""Connection to a Ray cluster, or the start of one on this machine.

In: an address, or none. Out: Ray, connected, or an error in one line. Ray repeats failed requests for a long
time and reports why they fail only in its log on standard error, so this log is read.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from evalkit.errors import EvalkitError, UsageError, first_line

INSTALL = "pip install 'evalkit-checkpoints[ray]'"
_ANSWER_SECONDS = 10.0
"""Seconds in which a cluster must answer."""
_STORE = 256 << 20
"""Bytes of the object store of a cluster on this machine; batches are small."""
_QUIET = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
_TOKEN = secrets.token_hex(32)
"""Token of the clusters that this process starts; the same for all, since Ray's library keeps the first."""
_MODE, _TOKEN_VARIABLES = "RAY_AUTH_MODE", ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_TOKEN_FILE = Path(".ray", "auth_token")
"""File of a user's token in the home folder."""
_REJECTED = "InvalidAuthToken"
"""In Ray's log if a cluster rejects the token, or the lack of one."""
_LOG_LINE = re.compile(r"\[[\d-]+ [\d:,]+ [A-Z] \d+ \d+\] .*\n?")
"""Line of Ray's log."""
_MESSAGE = re.compile(r"\((raylet|autoscaler|gcs_server|\w+ pid=\d+)[^)]*\)")
"""Beginning of a message that Ray prints on standard output."""
_VERSIONS = re.compile(r"\b(Ray|Python): (\S+)")


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Connect to a cluster (see `ClusterOptions.address`), or start one here; yield Ray's module, and end all workers.

    Raises:
        UsageError: Ray is not installed.
        EvalkitError: the cluster does not answer, or Ray does not start.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"--workers and --ray need Ray, which is not installed: {INSTALL}") from error
    # Ray sends usage statistics unless this is set
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    before = signal.getsignal(signal.SIGTERM)
    with redirect_stdout(_WithoutRay(sys.stdout)), ExitStack() as environment:
        try:
            if address is None:
                environment.enter_context(_own_cluster(ray))
            else:
                connect(ray, address)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def _own_cluster(ray: Any) -> Iterator[None]:
    """Start a cluster on this machine; the environment is as before at the end of the block."""
    before = {name: os.environ.get(name) for name in (_MODE, *_TOKEN_VARIABLES)}
    # Ray would write a token into the home folder, which clusters started later would then require
    if not any(before[name] for name in _TOKEN_VARIABLES) and not (Path.home() / _TOKEN_FILE).exists():
        os.environ[_TOKEN_VARIABLES[0]] = _TOKEN
    try:
        try:
            ray.init(address="local", include_dashboard=False, object_store_memory=_STORE, **_QUIET)
        except (ray.exceptions.RayError, RuntimeError, OSError, ValueError) as error:
            raise EvalkitError(f"--workers: Ray does not start on this machine: {_why(error)}") from error
        yield
    finally:
        # Ray sets the mode for its processes
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def connect(ray: Any, address: str) -> None:
    """Connect to a running cluster; raise `EvalkitError` if it does not answer or accept the connection."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address != "auto":
        try:
            socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise EvalkitError(
                f"--ray {address}: no cluster answers there ({first_line(error)}); start one with ray start --head"
            ) from error
    failure: list[BaseException] = []

    def attempt() -> None:
        try:
            ray.init(address=address, **_QUIET)
        except BaseException as error:
            failure.append(error)

    # Ray itself waits for minutes
    thread = threading.Thread(target=attempt, name="evalkit-ray", daemon=True)
    with _ray_log() as log:
        thread.start()
        deadline = time.monotonic() + _ANSWER_SECONDS
        while thread.is_alive() and time.monotonic() < deadline and _REJECTED not in log():
            thread.join(0.1)
        rejected = _REJECTED in log() or any(isinstance(error, ray.exceptions.AuthenticationError) for error in failure)
    if rejected and (thread.is_alive() or failure):
        raise EvalkitError(
            f"--ray {address}: the cluster requires its authentication token; set {_MODE}=token, and unless the token "
            f"is in ~/{_TOKEN_FILE.as_posix()}, {' or '.join(_TOKEN_VARIABLES)}"
        ) from (failure[0] if failure else None)
    if thread.is_alive():
        raise EvalkitError(f"--ray {address}: no Ray cluster answers there within {_ANSWER_SECONDS:.0f} s")
    if failure:
        raise EvalkitError(f"--ray {address}: {_why(failure[0])}") from failure[0]


def _why(error: BaseException) -> str:
    pairs = _VERSIONS.findall(str(error))
    if [name for name, _ in pairs] == ["Ray", "Python"] * 2:
        cluster, here = (" and ".join(map(" ".join, pairs[start : start + 2])) for start in (0, 2))
        return f"the cluster has {cluster}, this process has {here}; install the same versions everywhere"
    return first_line(error)


@contextmanager
def _ray_log() -> Iterator[Callable[[], str]]:
    """Collect what this process writes to the descriptor of standard error; print what is not Ray's log at the end."""
    with ExitStack() as stack:
        try:
            terminal = os.dup(2)
        except OSError:  # it is closed
            yield lambda: ""
            return
        stack.callback(os.close, terminal)
        path = Path(stack.enter_context(tempfile.TemporaryDirectory()), "log")

        def log() -> str:
            return path.read_text(encoding="utf-8", errors="replace")

        with path.open("wb") as file:
            os.dup2(file.fileno(), 2)
        try:
            yield log
        finally:
            with suppress(OSError, ValueError):  # the folder's disk is full
                sys.stderr.flush()
            os.dup2(terminal, 2)
            sys.stderr.write(_LOG_LINE.sub("", log()))


class _WithoutRay(io.TextIOBase):
    """Standard output without the messages that Ray prints there: it is for results only."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._dropped = False

    def write(self, text: str) -> int:
        """Write a text unless it is Ray's, or the end of such a line."""
        is_end = self._dropped and text == "\n"
        self._dropped = bool(_MESSAGE.search(text))
        if not (self._dropped or is_end):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()
