"""Options of commands that compute runs by workers of a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.parameters import option_group, typed_option
from evalkit.errors import UsageError

if TYPE_CHECKING:
    from evalkit.engines.base import JobRunner

WORKERS = option_group(
    typed_option("--workers", type=click.IntRange(min=1), metavar="N", help="Compute with this many workers by Ray: "
                 "GPUs, or shares of the cores, of this machine or of --ray."),
    typed_option("--ray", metavar="ADDRESS", help="Compute on this Ray cluster: HOST:PORT, or auto (docs/scale.md)."),
    typed_option("--worker-cpus", type=click.IntRange(min=1), metavar="N", help="CPU cores of a worker, which are its "
                 "threads.  [default: an equal share]"),
    typed_option("--worker-gpus", type=click.FloatRange(min=0), metavar="N", help="GPUs of a worker; 0.5: two workers "
                 "share one.  [default: 1 where there are any]"),
    typed_option("--ship-checkpoints", is_flag=True, help="Send the checkpoints to the workers, which have no file "
                 "system in common with this machine."),
)  # fmt: skip
_NAMES = ("workers", "ray", "worker_cpus", "worker_gpus", "ship_checkpoints")


def worker_options(command: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of this module from a command's options and return them."""
    return {name: command.pop(name) for name in _NAMES}


def runner_of(options: dict[str, Any]) -> JobRunner:
    """Return what computes the runs: workers if these are asked for, else this process.

    Raises:
        UsageError: an option of workers is given without workers.
    """
    if options["workers"] is None and options["ray"] is None:
        for name in _NAMES:
            if options[name]:
                raise UsageError(f"--{name.replace('_', '-')}: is for workers; add --workers N or --ray ADDRESS")
        from evalkit.engines.here import run_here

        return run_here
    from evalkit.engines.cluster.engine import ClusterRunner
    from evalkit.engines.cluster.ray_cluster import ClusterOptions

    cpus, gpus = options["worker_cpus"], options["worker_gpus"]
    return ClusterRunner(ClusterOptions(options["workers"], options["ray"], cpus, gpus, options["ship_checkpoints"]))


def has_workers(options: dict[str, Any]) -> bool:
    """Return whether workers are asked for."""
    return options["workers"] is not None or options["ray"] is not None
