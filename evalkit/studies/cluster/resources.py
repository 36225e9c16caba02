"""Which workers a cluster has: options, and the size and number of workers that follow from its machines.

In: options of the command line, and Ray's list of machines. Out: the `Needs` of each worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evalkit.errors import UsageError
from evalkit.escape import counted
from evalkit.inputs.settings import setting

_ROUNDING = 1e-9
"""Shares of a GPU such as a third are rounded."""

Machine = Mapping[str, float]
"""Resources of a machine by Ray's names; a resource that it does not have is absent."""


@dataclass(frozen=True)
class ClusterOptions:
    """Which workers are used; raises `UsageError` if an option is malformed."""

    workers: int | None = setting(None, "Compute with this many workers by Ray: GPUs, or shares of the cores, of this "
                                  "machine or of --ray.", metavar="N", shows_least=True,
                                  has_variable=False)  # fmt: skip
    address: str | None = setting(None, "Compute on this Ray cluster: HOST:PORT, or auto (docs/scale.md).",
                                  metavar="ADDRESS", option="--ray", has_variable=False)  # fmt: skip
    worker_cpus: int | None = setting(None, "CPU cores of a worker, which are its threads.", "an equal share",
                                      metavar="N", shows_least=True, has_variable=False)  # fmt: skip
    worker_gpus: float | None = setting(None, "GPUs of a worker; 0.5: two workers share one.", "1 where there are any",
                                        metavar="N", has_variable=False)  # fmt: skip
    ship: bool = setting(False, "Send the checkpoints to the workers, which have no file system in common with this "
                         "machine.", option="--ship-checkpoints", has_variable=False)  # fmt: skip

    def __post_init__(self) -> None:
        host, _, port = (self.address or "auto").removeprefix("ray://").rpartition(":")
        if self.address not in (None, "auto") and not (host and port.isdigit()):
            raise UsageError(f"--ray {self.address}: expected HOST:PORT of a cluster's head node, or auto")
        if self.ship and self.address is None:
            raise UsageError("--ship-checkpoints is for other machines; add --ray ADDRESS, or leave it out")


class Needs(NamedTuple):
    """Resources of one worker."""

    cpus: int
    gpus: float

    def room(self, machine: Machine) -> int:
        """Return the number of workers that a machine has room for."""
        by_cores = int(machine.get("CPU", 0) // self.cpus)
        return min(by_cores, _gpu_workers(machine, self.gpus)) if self.gpus else by_cores

    def __str__(self) -> str:
        gpus = f" and {self.gpus:g} GPU{'s' * (self.gpus != 1)}" if self.gpus else ""
        return f"{counted(self.cpus, 'CPU core')}{gpus}"


def needs_of(machines: Sequence[Machine], options: ClusterOptions, device: str) -> Needs:
    """Return the resources of a worker; `device` is "cpu" for no GPUs, unless the options give some.

    With GPUs, a worker has as many cores as leave every machine one worker for each of its GPUs (or shares of them).
    Without, it has the cores of the smallest machine or, of a given number of workers, the most cores with which the
    machines have room for this number.
    """
    gpus = options.worker_gpus
    if gpus is None:
        gpus = 1.0 if device != "cpu" and any(machine.get("GPU") for machine in machines) else 0.0
    if options.worker_cpus is not None:
        return Needs(options.worker_cpus, gpus)
    # A head node often has no cores, so that no worker runs there
    with_cores = [machine for machine in machines if machine.get("CPU", 0) >= 1]
    cores = [int(machine["CPU"]) for machine in with_cores]
    if gpus:
        sharing = [_gpu_workers(machine, gpus) for machine in with_cores]
        cpus = min((count // workers for count, workers in zip(cores, sharing, strict=True) if workers), default=1)
    elif options.workers is None:
        cpus = min(cores, default=1)
    else:
        sizes = range(max(cores, default=1), 0, -1)
        cpus = next((size for size in sizes if sum(count // size for count in cores) >= options.workers), 1)
    return Needs(max(1, cpus), gpus)


def _gpu_workers(machine: Machine, gpus: float) -> int:
    """Return the number of workers for which a machine has GPUs; a share is of one GPU, never of two."""
    count = machine.get("GPU", 0)
    return int(count) * int(1 / gpus + _ROUNDING) if gpus < 1 else int(count / gpus + _ROUNDING)


def described(resources: Machine) -> str:
    """Return resources for messages."""
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    return f"{cpus:g} CPU core{'s' * (cpus != 1)} and {gpus:g} GPU{'s' * (gpus != 1)}"
