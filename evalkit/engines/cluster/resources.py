"""Resources of a worker, and how many workers each machine of a cluster has room for.

In: the machines' resources as Ray counts them, and what the user asked for. Out: `Needs` of one worker, the same for
all, since the number of threads changes the last bits of a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evalkit.brief import counted

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
