"""Connection to a Ray cluster, or the start of one on this machine.

In: an address, or none. Out: Ray connected, or an `EvalkitError` in one line. Ray repeats failed requests for a long
time and reports why they fail only in its log on standard error, so this log is read.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.errors import EvalkitError, first_line
from evalkit.escape import counted

Machine = Mapping[str, float]
"""Resources of a machine by Ray's names; a resource that it does not have is absent."""
_ROUNDING = 1e-9
"""Shares of a GPU such as a third are rounded."""


@dataclass(frozen=True)
class Needs:
    """Resources of one worker."""

    cpus: int
    gpus: float

    def __str__(self) -> str:
        gpus = f" and {self.gpus:g} GPU{'s' * (self.gpus != 1)}" if self.gpus else ""
        return f"{counted(self.cpus, 'CPU core')}{gpus}"


def needs_of(
    machines: Sequence[Machine], workers: int | None, cpus: int | None, gpus: float | None, device: str
) -> Needs:
    """Return the resources of a worker.

    With GPUs, a worker has as many cores as leave every machine one worker for each of its GPUs (or shares of them).
    Without, it has the cores of the smallest machine or, of a given number of workers, the most cores with which the
    machines have room for this number.

    Args:
        machines: all machines of the cluster.
        workers: number of workers; None: as many as there is room for.
        cpus: cores of a worker, if given.
        gpus: GPUs of a worker, if given; below 1 for several workers on one.
        device: "cpu" for none, unless `gpus` is given.
    """
    if gpus is None:
        gpus = 1.0 if device != "cpu" and any(one.get("GPU") for one in machines) else 0.0
    if cpus is not None:
        return Needs(cpus, gpus)
    # A head node often has no cores, so that no worker runs there
    cores = [(int(one.get("CPU", 0)), _gpu_workers(one, gpus)) for one in machines if one.get("CPU", 0) >= 1]
    if gpus:
        cpus = min((count // sharing for count, sharing in cores if sharing), default=1)
    elif workers is None:
        cpus = min((count for count, _ in cores), default=1)
    else:
        sizes = range(max((count for count, _ in cores), default=1), 0, -1)
        cpus = next((size for size in sizes if sum(count // size for count, _ in cores) >= workers), 1)
    return Needs(max(1, cpus), gpus)


def room(machine: Machine, needs: Needs) -> int:
    """Return the number of workers that a machine has room for."""
    by_cores = int(machine.get("CPU", 0) // needs.cpus)
    return min(by_cores, _gpu_workers(machine, needs.gpus)) if needs.gpus else by_cores


def described(resources: Machine) -> str:
    """Return resources for messages."""
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    return f"{cpus:g} CPU core{'s' * (cpus != 1)} and {gpus:g} GPU{'s' * (gpus != 1)}"


def _gpu_workers(machine: Machine, gpus: float) -> int:
    """Return the number of workers for which a machine has GPUs; a share is of one GPU, never of two."""
    count = machine.get("GPU", 0)
    if not gpus:
        return 0
    return int(count) * int(1 / gpus + _ROUNDING) if gpus < 1 else int(count / gpus + _ROUNDING)


ANSWER_SECONDS = 10.0
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
_VERSIONS = re.compile(r"\b(Ray|Python): (\S+)")


@contextmanager
def own_cluster(ray: Any) -> Iterator[None]:
    """Start a cluster on this machine; the environment is as before at the end of the block.

    Raises:
        EvalkitError: Ray does not start.
    """
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
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def connect(ray: Any, address: str) -> None:
    """Connect to a running cluster.

    Raises:
        EvalkitError: there is none, it does not answer or does not accept the connection.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address != "auto":
        try:
            socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
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
        deadline = time.monotonic() + ANSWER_SECONDS
        while thread.is_alive() and time.monotonic() < deadline and _REJECTED not in log():
            thread.join(0.1)
        rejected = _REJECTED in log() or any(isinstance(one, ray.exceptions.AuthenticationError) for one in failure)
    if rejected and (thread.is_alive() or failure):
        raise EvalkitError(
            f"--ray {address}: the cluster requires its authentication token; set {_MODE}=token, and unless the token "
            f"is in ~/{_TOKEN_FILE.as_posix()}, {' or '.join(_TOKEN_VARIABLES)}"
        ) from (failure[0] if failure else None)
    if thread.is_alive():
        raise EvalkitError(f"--ray {address}: no Ray cluster answers there within {ANSWER_SECONDS:.0f} s")
    if failure:
        raise EvalkitError(f"--ray {address}: {_why(failure[0])}") from failure[0]


def _why(error: BaseException) -> str:
    """Return Ray's error on one line; of different versions, both, which are on lines of their own."""
    found = _VERSIONS.findall(str(error))
    if [name for name, _ in found] == ["Ray", "Python"] * 2:
        cluster, here = (" and ".join(" ".join(one) for one in found[start : start + 2]) for start in (0, 2))
        return f"the cluster has {cluster}, this process has {here}; install the same versions everywhere"
    return first_line(error)


@contextmanager
def _ray_log() -> Iterator[Callable[[], str]]:
    """Collect what this process writes to the descriptor of standard error; print what is not Ray's log at the end."""
    try:
        terminal = os.dup(2)
    except OSError:  # it is closed
        yield lambda: ""
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "log")
            with path.open("wb") as file:
                os.dup2(file.fileno(), 2)
            try:
                yield lambda: path.read_text(encoding="utf-8", errors="replace")
            finally:
                with suppress(OSError, ValueError):  # the folder's disk is full
                    sys.stderr.flush()
                os.dup2(terminal, 2)
                sys.stderr.write(_LOG_LINE.sub("", path.read_text(encoding="utf-8", errors="replace")))
    finally:
        os.close(terminal)
