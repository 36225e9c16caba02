"""Connection to a Ray cluster, or the start of one on this machine.

In: an address, or none. Out: Ray, connected, or an error in one line. Ray repeats failed requests for minutes, cannot
be interrupted meanwhile, and reports the reason only in its log; so a process of its own tries the connection first.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from evalkit.compatibility.ray import patient_start
from evalkit.errors import EvalkitError, UsageError, first_line

INSTALL = "pip install 'evalkit-checkpoints[ray]'"
_ATTEMPT = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"
_ATTEMPTS, _ANSWER_SECONDS = "5", 30.0
"""Failed requests after which Ray gives up, about a second each, and seconds in which a cluster must answer."""
_PORT_SECONDS = "RAY_gcs_server_port_wait_time_s"
_START_SECONDS = 300.0
"""Seconds for each step of the start of a cluster on this machine."""
_STORE = 256 << 20
"""Bytes of the object store of a cluster on this machine; batches are small."""
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
_TOKEN = secrets.token_hex(32)
"""Token of the clusters that this process starts; the same for all, since Ray's library keeps the first."""
_MODE, _TOKEN_VARIABLES = "RAY_AUTH_MODE", ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_TOKEN_FILE = Path(".ray", "auth_token")
"""File of a user's token in the home folder."""
_REJECTED = re.compile("InvalidAuthToken|AuthenticationError")
"""What Ray says if a cluster rejects the token, or the lack of one."""
_EXCEPTION = re.compile(r"\n(?=[\w.]+: )")


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
    # Standard output is for results, and Ray Client prints its messages there
    with redirect_stdout(sys.stderr), ExitStack() as environment:
        try:
            if address is None:
                environment.enter_context(_own_cluster(ray))
            else:
                _check_answer(address)
                ray.init(address=address, **_QUIET)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def _own_cluster(ray: Any) -> Iterator[None]:
    """Start a cluster on this machine; the environment is as before at the end of the block."""
    before = {name: os.environ.get(name) for name in (_MODE, *_TOKEN_VARIABLES, _PORT_SECONDS)}
    os.environ.setdefault(_PORT_SECONDS, f"{_START_SECONDS:.0f}")
    # Ray would write a token into the home folder, which clusters started later would then require
    if not any(before[name] for name in _TOKEN_VARIABLES) and not (Path.home() / _TOKEN_FILE).exists():
        os.environ[_TOKEN_VARIABLES[0]] = _TOKEN
    try:
        try:
            with patient_start(_START_SECONDS):
                ray.init(address="local", include_dashboard=False, object_store_memory=_STORE, **_QUIET)
        except Exception as error:  # Ray raises any, also plain ones
            raise EvalkitError(
                f"--workers: Ray does not start on this machine ({first_line(error)}); without Ray, leave out the "
                "option, and give evalkit study run STUDY --wait in several shells"
            ) from error
        yield
    finally:
        # Ray sets the mode for its processes
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _check_answer(address: str) -> None:
    """Connect to a running cluster in another process; raise `EvalkitError` with the reason if that fails."""
    command = [sys.executable, "-c", _ATTEMPT, address]
    environment = {**os.environ, "RAY_NUM_REDIS_GET_RETRIES": _ATTEMPTS}
    unanswered = f"no Ray cluster answers there within {_ANSWER_SECONDS:.0f} s; start one with ray start --head"
    try:
        attempt = subprocess.run(command, env=environment, capture_output=True, timeout=_ANSWER_SECONDS, check=False)
        if attempt.returncode == 0:
            return
        log = attempt.stderr.decode(errors="replace")
        # The traceback ends with the message, which for other versions has several lines
        reason = " ".join(_EXCEPTION.split(log)[-1].split())
    except subprocess.TimeoutExpired as error:
        log, reason = (error.stderr or b"").decode(errors="replace"), unanswered
    if _REJECTED.search(log):
        reason = (
            f"the cluster requires its authentication token; set {_MODE}=token, and unless the token is in "
            f"~/{_TOKEN_FILE.as_posix()}, {' or '.join(_TOKEN_VARIABLES)}"
        )
    raise EvalkitError(f"--ray {address}: {reason}")
