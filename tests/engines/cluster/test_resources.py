"""How many workers of which size the machines of a cluster have, counted machine by machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.errors import UsageError
from evalkit.studies.cluster.driver import ClusterRunner
from evalkit.studies.cluster.resources import ClusterOptions, Needs, needs_of
from tests.engines.cluster.conftest import Recorder, jobs_of


def machine(cores: float, gpus: float = 0) -> dict[str, float]:
    """Return a machine's resources as Ray lists them: what it has none of is absent."""
    return {name: count for name, count in (("CPU", cores), ("GPU", gpus)) if count}


HEAD = machine(0)
"""A head node on which nothing is computed."""


SHARED: list[tuple[list[dict[str, float]], int | None, Needs, list[int]]] = [
    ([machine(8, 1), machine(8, 8)], None, Needs(1, 1), [1, 8]),
    ([machine(64, 1), machine(64, 8)], None, Needs(8, 1), [1, 8]),
    ([machine(4, 1), machine(64, 8)], None, Needs(4, 1), [1, 8]),
    ([HEAD, machine(8, 1), machine(64, 8)], None, Needs(8, 1), [0, 1, 8]),
    ([machine(4), machine(64, 8)], None, Needs(8, 1), [0, 8]),
    ([machine(2, 8), machine(64, 8)], None, Needs(1, 1), [2, 8]),
    ([machine(0, 8), machine(64, 8)], None, Needs(8, 1), [0, 8]),
    ([machine(64, 8)], 2, Needs(8, 1), [8]),
    ([machine(4), machine(64)], None, Needs(4, 0), [1, 16]),
    ([HEAD, machine(16), machine(16)], None, Needs(16, 0), [0, 1, 1]),
    ([HEAD, machine(16), machine(16)], 4, Needs(8, 0), [0, 2, 2]),
    ([machine(16), machine(16)], 3, Needs(8, 0), [2, 2]),
    ([machine(4), machine(64)], 1, Needs(64, 0), [0, 1]),
    ([machine(4), machine(64)], 17, Needs(4, 0), [1, 16]),
    ([machine(2)], 5, Needs(1, 0), [2]),
    ([HEAD], None, Needs(1, 0), [0]),
]
UNEQUAL = [machine(4, 1), machine(64, 8)]
GIVEN: list[tuple[ClusterOptions, str, list[dict[str, float]], Needs, list[int]]] = [
    (ClusterOptions(worker_gpus=0.5), "auto", [machine(8, 1), machine(64, 8)], Needs(4, 0.5), [2, 16]),
    (ClusterOptions(worker_gpus=0.3), "auto", [machine(24, 2)], Needs(4, 0.3), [6]),  # not a seventh on both
    (ClusterOptions(worker_gpus=4), "auto", [machine(8, 2), machine(64, 8)], Needs(32, 4), [0, 2]),
    (ClusterOptions(worker_gpus=1), "auto", [machine(8)], Needs(1, 1), [0]),
    (ClusterOptions(worker_gpus=0), "auto", [machine(8, 8)], Needs(8, 0), [1]),
    (ClusterOptions(worker_cpus=3), "auto", UNEQUAL, Needs(3, 1), [1, 8]),
    (ClusterOptions(worker_cpus=3), "cpu", UNEQUAL, Needs(3, 0), [1, 21]),
    (ClusterOptions(), "cpu", UNEQUAL, Needs(4, 0), [1, 16]),
]


def test_every_machine_has_the_workers_of_its_own_resources() -> None:
    """By default, and with given resources."""
    shared = [(ClusterOptions(workers), "auto", machines, *expected) for machines, workers, *expected in SHARED]
    for options, device, machines, needs, places in [*shared, *GIVEN]:
        assert needs_of(machines, options, device) == needs
        assert list(map(needs.room, machines)) == places


def test_options_that_make_no_sense(files: Path, tmp_path: Path) -> None:
    for options in ({"address": "nonsense"}, {"workers": 1, "ship": True}):
        with pytest.raises(UsageError, match=r"--ray|--ship-checkpoints"):
            ClusterOptions(**options)
    with pytest.raises(UsageError, match="--device cuda:1"):
        ClusterRunner(ClusterOptions(workers=1))(jobs_of(files, tmp_path, models=1, device="cuda:1"), Recorder())
