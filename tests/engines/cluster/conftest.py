"""A real Ray cluster of several nodes on this machine, and the runs of a small study."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch

from evalkit.benchmarks.run import planned
from evalkit.benchmarks.session import run_plan
from evalkit.display import Progress
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import JOURNAL, load_run
from evalkit.studies.cluster.driver import ClusterRunner
from evalkit.studies.cluster.resources import ClusterOptions
from evalkit.studies.running import Job, Outcome
from tests.documents import made_up
from tests.tiny import tiny_checkpoint

Tables = dict[str, pd.DataFrame]
FAULTS = Path(__file__).parent / "faults"
ROOT = Path(__file__).parents[3]
HEALTH = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_timeout_ms": 2000,
          "health_check_failure_threshold": 4}  # fmt: skip
"""A lost node is noticed in seconds."""
_own = {"faults": ""}
"""Folder of faults of the test's cluster, which its processes have in their environment."""


class Recorder(Progress):
    """Keeps what is said; `at` calls a function when a number of batches is stored."""

    def __init__(self) -> None:
        super().__init__(live=False)
        self.said: list[str] = []
        self.batches = 0
        self.events: dict[int, Callable[[], None]] = {}
        self.here: set[int] = set()

    def say(self, line: str) -> None:
        """Keep a line."""
        self.said.append(line)

    def advance(self, work: float, documents: int) -> None:
        """Count a batch."""
        super().advance(work, documents)
        if documents:
            self.batches += 1
            if event := self.events.pop(self.batches, None):
                if self.batches in self.here:
                    event()
                else:  # not in the driver's thread, which would not notice its own delay
                    threading.Thread(target=event).start()

    def at(self, batches: int, event: Callable[[], None], here: bool = False) -> Recorder:
        """Call a function when a number of batches is stored: in a thread, or `here`, as Ray starts nodes."""
        self.events[batches] = event
        self.here |= {batches} if here else set()
        return self


class Nodes:
    """The nodes of the test's cluster; the driver's own node has no cores."""

    def __init__(self, faults: Path) -> None:
        from ray.cluster_utils import Cluster

        self.faults = faults
        _own["faults"] = str(faults)
        path = os.pathsep.join([str(FAULTS), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.env = {"FAULTS": str(faults), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        settings = {"num_cpus": 0, "object_store_memory": 100 << 20, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args={**settings, "_system_config": HEALTH})
        self.address = str(self._cluster.address)
        self.nodes: list[Any] = []

    def add(self, cpus: int = 1, gpus: int = 0, **env: str) -> Any:
        """Add a node; its GPUs are only declared."""
        resources = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": 100 << 20}
        node = self._cluster.add_node(**resources, env_vars={**self.env, **env})
        self.nodes.append(node)
        return node

    def remove(self, node: Any) -> None:
        """Take a node away as a power cut would."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def end(self) -> None:
        """Stop everything."""
        self._cluster.shutdown()


def workers() -> list[psutil.Process]:
    """Return the processes of workers of the test's cluster."""
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        if any("ray::BatchWorker" in part for part in process.info["cmdline"] or []):
            with suppress(psutil.Error):
                if process.environ().get("FAULTS") == _own["faults"]:
                    processes.append(process)
    return processes


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """One cluster for all tests."""
    pytest.importorskip("ray", reason="Ray is not installed")
    nodes = Nodes(tmp_path_factory.mktemp("faults"))
    yield nodes
    nodes.end()


@pytest.fixture
def two_nodes(cluster: Nodes) -> Iterator[Nodes]:
    """The cluster with two nodes of one core, without faults."""
    for file in cluster.faults.iterdir():
        file.unlink()
    while len(cluster.nodes) < 2:
        cluster.add()
    yield cluster
    while len(cluster.nodes) > 2:
        cluster.remove(cluster.nodes[-1])
    deadline = time.monotonic() + 20
    while workers() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert workers() == []


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints and documents."""
    folder = tmp_path_factory.mktemp("files")
    for seed in range(3):
        tiny_checkpoint(folder / f"model{seed}", seed=seed, window=1024)
    made_up(folder / "documents", count=40)
    return folder


def jobs_of(files: Path, output: Path, models: int = 2, **options: Any) -> list[Job]:
    """Return jobs of a suite on several checkpoints."""
    settings = {"data_dir": files / "documents", "allow_unofficial_data": True, "tasks": ("piqa", "boolq", "arc_easy"),
                "device": "cpu", "dtype": "float32", "token_budget": 128, "output": output, **options}  # fmt: skip
    names = [f"model{seed}" for seed in range(models)]
    return [Job(name, planned(files / name, settings, silent)) for name in names]


def tables_of(jobs: list[Job]) -> Tables:
    """Return the score tables of finished jobs, by label."""
    return {job.label: load_run(job.plan.folder).scores for job in jobs}


def same(jobs: list[Job], expected: Tables) -> bool:
    """Return whether the tables of jobs are those expected, to the last bit."""
    return all(table.equals(expected[name]) for name, table in tables_of(jobs).items())


def states(outcomes: list[Outcome]) -> list[str]:
    """Return the states of outcomes; print why one is not finished."""
    print(*(outcome.message for outcome in outcomes if outcome.message), sep="\n")
    return [outcome.state for outcome in outcomes]


def lines(output: Path) -> int:
    """Return the number of batches in the journals of a folder's runs."""
    return sum(path.read_bytes().count(b"\n") for path in output.glob(f"*/{JOURNAL}"))


@pytest.fixture(scope="session")
def expected(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """The tables of a single process of one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    jobs = jobs_of(files, tmp_path_factory.mktemp("single"), models=3)
    for job in jobs:
        run_plan(job.plan, Recorder())
    torch.set_num_threads(threads)
    return tables_of(jobs)


def run(cluster: Nodes, jobs: list[Job], progress: Recorder | None = None, **options: Any) -> list[Outcome]:
    """Run jobs on the cluster."""
    return ClusterRunner(ClusterOptions(address=cluster.address, **options))(jobs, progress or Recorder())


def slow(cluster: Nodes, seconds: float) -> None:
    """Make every batch take longer, so that there is time to interfere."""
    (cluster.faults / "slow").write_text(str(seconds))
