"""How many workers of which size the machines of a cluster have, counted machine by machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.errors import UsageError
from evalkit.studies.cluster.driver import ClusterRunner
from evalkit.studies.cluster.resources import ClusterOptions, Needs, needs_of
from tests.engines.cluster.conftest import Nodes, Recorder, jobs_of, states


def machine(cores: float, gpus: float = 0) -> dict[str, float]:
    """Return a machine's resources as Ray lists them: what it has none of is absent."""
    return {name: count for name, count in (("CPU", cores), ("GPU", gpus)) if count}


HEAD = machine(0)
"""A head node on which nothing is computed."""


@pytest.mark.parametrize(
    ("machines", "workers", "needs", "places"),
    [
        ([machine(8, 1), machine(8, 8)], None, Needs(1, 1), [1, 8]),
        ([machine(64, 1), machine(64, 8)], None, Needs(8, 1), [1, 8]),
        ([machine(64, 1), machine(8, 8)], None, Needs(1, 1), [1, 8]),
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
        ([machine(8)], 3, Needs(2, 0), [4]),
        ([HEAD], None, Needs(1, 0), [0]),
    ],
)
def test_every_machine_has_the_workers_of_its_own_resources(
    machines: list[dict[str, float]], workers: int | None, needs: Needs, places: list[int]
) -> None:
    found = needs_of(machines, ClusterOptions(workers), "auto")
    assert found == needs
    assert [found.room(one) for one in machines] == places


@pytest.mark.parametrize(
    ("options", "device", "machines", "needs", "places"),
    [
        (ClusterOptions(worker_gpus=0.5), "auto", [machine(8, 1), machine(64, 8)], Needs(4, 0.5), [2, 16]),
        # Three on each, not a seventh on both
        (ClusterOptions(worker_gpus=0.3), "auto", [machine(24, 2)], Needs(4, 0.3), [6]),
        (ClusterOptions(worker_gpus=4), "auto", [machine(8, 2), machine(64, 8)], Needs(32, 4), [0, 2]),
        (ClusterOptions(worker_gpus=1), "auto", [machine(8)], Needs(1, 1), [0]),
        (ClusterOptions(worker_gpus=0), "auto", [machine(8, 8)], Needs(8, 0), [1]),
        (ClusterOptions(worker_cpus=3), "auto", [machine(4, 1), machine(64, 8)], Needs(3, 1), [1, 8]),
        (ClusterOptions(worker_cpus=3), "cpu", [machine(4, 1), machine(64, 8)], Needs(3, 0), [1, 21]),
        (ClusterOptions(), "cpu", [machine(4, 1), machine(64, 8)], Needs(4, 0), [1, 16]),
    ],
)
def test_given_resources(
    options: ClusterOptions, device: str, machines: list[dict[str, float]], needs: Needs, places: list[int]
) -> None:
    assert needs_of(machines, options, device) == needs
    assert [needs.room(one) for one in machines] == places


def test_options_that_make_no_sense(files: Path, tmp_path: Path) -> None:
    for options in ({"address": "nonsense"}, {"workers": 1, "ship": True}):
        with pytest.raises(UsageError, match=r"--ray|--ship-checkpoints"):
            ClusterOptions(**options)
    with pytest.raises(UsageError, match="--device cuda:1"):
        ClusterRunner(ClusterOptions(workers=1))(jobs_of(files, tmp_path, models=1, device="cuda:1"), Recorder())


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_of_unequal_machines(
    cluster: Nodes, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both machines' GPUs, which are only declared here, have a worker each."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # Ray counts what it lists
    while cluster.nodes:
        cluster.remove(cluster.nodes[0])
    nodes = [cluster.add(cpus=2, gpus=1), cluster.add(cpus=2, gpus=2)]
    jobs, progress = jobs_of(files, tmp_path, device="auto", tasks=("piqa",)), Recorder()
    try:
        assert states(ClusterRunner(ClusterOptions(address=cluster.address))(jobs, progress)) == ["finished"] * 2
    finally:
        for node in nodes:
            cluster.remove(node)
    assert "3 workers of 1 CPU core and 1 GPU each" in progress.said
