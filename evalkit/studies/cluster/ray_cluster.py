"""Ray: workers as actors. Every call of Ray is here or in `connection.py`.

In: options. Out: a `RayCluster`, whose workers answer by futures (`Call`), or an `EvalkitError` in one line.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.errors import UsageError, first_line
from evalkit.escape import counted
from evalkit.studies.cluster.connection import ANSWER_SECONDS, Needs, connect, described, needs_of, own_cluster, room
from evalkit.studies.cluster.worker import BatchWorker

IN_HANDS = 2
"""Batches that a worker has at a time: one is computed while the next one is made ready."""
_LOOK = 1.0
"""Seconds between two looks at the machines of a cluster."""
_LOG_LINES = 8
_CAUSE = re.compile(r"error|exception|fault|fatal|abort|assert|killed|SIG[A-Z]{3}|out of memory", re.IGNORECASE)
"""What a line of a worker's log has that names a cause."""
INSTALL = "pip install 'evalkit-checkpoints[ray]'"

Call = Any
"""A future of a worker's answer (`ray.ObjectRef`)."""


@dataclass(frozen=True)
class ClusterOptions:
    """Which workers are used.

    Raises:
        UsageError: an option is malformed.
    """

    workers: int | None = None
    """Number of workers; None: as many as the cluster has room for."""
    address: str | None = None
    """Address of a running cluster, or "auto"; None: a cluster on this machine."""
    worker_cpus: int | None = None
    """CPU cores of a worker, which are its threads; None: an equal share."""
    worker_gpus: float | None = None
    """GPUs of a worker, below 1 for several workers on one; None: one, if there are any and the device is not "cpu"."""
    ship: bool = False
    """Whether checkpoints are sent to the workers, which have no file system in common with this machine."""

    def __post_init__(self) -> None:
        host, _, port = (self.address or "auto").removeprefix("ray://").rpartition(":")
        if self.address not in (None, "auto") and not (host and port.isdigit()):
            raise UsageError(f"--ray {self.address}: expected HOST:PORT of a cluster's head node, or auto")
        if self.ship and self.address is None:
            raise UsageError("--ship-checkpoints is for other machines; add --ray ADDRESS, or leave it out")


class WorkerLostError(Exception):
    """A worker is gone; the message is Ray's reason."""


class RayCluster:
    """A connected cluster. Use `connected`."""

    def __init__(self, needs: Needs, options: ClusterOptions, share: float) -> None:
        import ray

        self._ray: Any = ray
        self.needs = needs
        self.is_local = options.address is None
        """Whether it is this process's own, which no machine joins."""
        self._most = options.workers
        self._seen = _machines(ray), time.monotonic()
        """The machines, and when the head of the cluster was asked last."""
        threading.Thread(target=self._look, name="evalkit-ray-look", daemon=True).start()
        settings = {"num_cpus": needs.cpus, "num_gpus": needs.gpus, "max_restarts": 0, "max_task_retries": 0}
        # One more for signs of life
        settings["max_concurrency"] = IN_HANDS + 1
        # Ray would set one thread, which is slower and has other last bits
        threads = {name: str(needs.cpus) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self._actor = ray.remote(BatchWorker).options(**settings, runtime_env={"env_vars": threads})
        self._share = share

    def capacity(self) -> int:
        """Return the number of workers that the machines of the cluster have room for, up to the largest number."""
        count = sum(room(one, self.needs) for one in self._seen[0])
        return count if self._most is None else min(count, self._most)

    def silent_seconds(self) -> float:
        """Return how long the head of the cluster has not answered."""
        return max(0.0, time.monotonic() - self._seen[1] - _LOOK)

    def _look(self) -> None:
        """Ask for the machines again and again, in a thread: without a head, there is no answer."""
        while self._ray.is_initialized():
            with suppress(Exception):  # a request that fails counts as no answer
                self._seen = _machines(self._ray), time.monotonic()
            time.sleep(_LOOK)

    def describe(self) -> str:
        """Return the resources of the cluster, for messages."""
        return described(self._ray.cluster_resources())

    def describe_free(self) -> str:
        """Return the resources that no job uses, for messages."""
        return described(self._ray.available_resources())

    def start_worker(self) -> Any:
        """Ask for a worker; it starts as soon as there is room for it."""
        return self._actor.remote(self.needs.cpus, self._share)

    def stop_worker(self, worker: Any) -> None:
        """End a worker at once, unless the cluster has no head to ask for it."""
        if self.silent_seconds() < ANSWER_SECONDS:
            with suppress(Exception):
                self._ray.kill(worker, no_restart=True)

    def call(self, worker: Any, method: str, *arguments: Any) -> Call:
        """Call a method of a worker; two calls may run at once."""
        return getattr(worker, method).remote(*arguments)

    def put(self, value: Any) -> Any:
        """Store a large value once in the cluster, for an argument of `call`."""
        return self._ray.put(value)

    def answered(self, calls: Sequence[Call], seconds: float) -> list[Call]:
        """Return the calls that are answered; wait for the first one, up to some seconds."""
        if not calls:
            time.sleep(seconds)
            return []
        ready, rest = self._ray.wait(list(calls), num_returns=1, timeout=seconds)
        if rest:
            ready += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return list(ready)

    def answer(self, call: Call) -> Any:
        """Return the answer of an answered call.

        Raises:
            WorkerLostError: the worker is gone.
        """
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            raise WorkerLostError(_reason(error)) from error

    def log_of(self, actor: str, file: str) -> list[str]:
        """Return the last lines of a worker's standard error, if its file or the cluster's dashboard has them."""
        with suppress(OSError, ValueError):
            if file and Path(file).is_file():
                return _last_lines(Path(file).read_text(encoding="utf-8", errors="replace"))
        with suppress(Exception):  # needs the dashboard of the cluster
            from ray.util.state import get_log

            text = "".join(get_log(actor_id=actor, suffix="err", tail=_LOG_LINES, timeout=5))
            return _last_lines(text)
        return []


@contextmanager
def connected(options: ClusterOptions, device: str) -> Iterator[RayCluster]:
    """Connect to a cluster, or start one on this machine; end it and all workers at the end of the block.

    Args:
        options: which workers are used.
        device: "cpu" asks for no GPUs.

    Raises:
        UsageError: Ray is not installed, or the cluster has not the resources that are asked for.
        EvalkitError: the cluster does not answer.
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
            if options.address is None:
                environment.enter_context(own_cluster(ray))
            else:
                connect(ray, options.address)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
            machines = _machines(ray)
            needs = needs_of(machines, options.workers, options.worker_cpus, options.worker_gpus, device)
            most_cpus = max((machine.get("CPU", 1) for machine in machines), default=1)
            share = needs.gpus if needs.gpus else needs.cpus / max(most_cpus, 1)
            cluster = RayCluster(needs, options, min(1.0, share))
            count, advice = cluster.capacity(), "see --worker-cpus and --worker-gpus"
            if options.address is None and count < (options.workers or 1):
                raise UsageError(
                    f"this machine has {cluster.describe()}: room for {counted(count, 'worker')} of {needs}, not "
                    f"for {options.workers}; {advice}"
                )
            if not count:
                raise UsageError(
                    f"no machine of the cluster has room for a worker: each needs {needs}, and the cluster has "
                    f"{cluster.describe()}; {advice}"
                )
            yield cluster
        finally:
            ray.shutdown()


class _WithoutRay(io.TextIOBase):
    """Standard output without the messages that Ray prints there: it is for results only."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._dropped = False

    def write(self, text: str) -> int:
        """Write a text unless it is Ray's, or the end of such a line."""
        self._dropped, after = bool(_RAYS.search(text)), self._dropped
        if not self._dropped and not (after and text == "\n"):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


_RAYS = re.compile(r"\((raylet|autoscaler|gcs_server|\w+ pid=\d+)[^)]*\)")
"""Beginning of a message of Ray."""


def _machines(ray: Any) -> list[dict[str, float]]:
    """Return the resources of each machine of the cluster that is up."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _reason(error: BaseException) -> str:
    """Return why a worker is gone, from Ray's long message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    detail = next((line for line in lines if "exit detail" in line or line.startswith("The actor")), "")
    text = detail.partition("Worker exit detail:")[2] or detail or first_line(error)
    return text.partition("Some common causes")[0].strip().rstrip(".")[:200]


def _last_lines(text: str) -> list[str]:
    """Return the last lines of a worker's log from the first one that names a cause; Ray writes others."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()][-_LOG_LINES:]
    causes = [place for place, line in enumerate(lines) if _CAUSE.search(line)]
    return lines[causes[0] :] if causes else []
