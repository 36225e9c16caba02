"""Workers and heads that do not answer, on a cluster inside this process, as in `test_loop.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evalkit.errors import EvalkitError
from evalkit.studies.cluster.connection import Needs
from evalkit.studies.cluster.ray_cluster import ClusterOptions, RayCluster
from tests.engines.cluster.conftest import jobs_of, states
from tests.engines.cluster.test_loop import LATER, InProcessCluster, run


def test_a_driver_that_was_stopped_does_not_blame_the_head(files: Path, tmp_path: Path) -> None:
    """After Ctrl-Z and fg, the last answer of the head is old until the thread that asks has asked again."""
    cluster = InProcessCluster(1)
    ages: Iterator[float] = iter([0.0, 0.0, 0.0, 100.0, 100.0])
    cluster.silent_seconds = lambda: next(ages, 0.0)  # type: ignore[method-assign]
    outcomes, progress = run(cluster, jobs_of(files, tmp_path, models=1))
    assert states(outcomes) == ["finished"]
    assert not any("has not answered" in line for line in progress.said)


def test_a_head_that_is_lost_ends_the_run(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalkit.studies.cluster.worker_pool._HEAD_SILENT", 0.2)
    monkeypatch.setattr("evalkit.studies.cluster.worker_pool._HEAD_LOST", 0.5)
    cluster = InProcessCluster(1, lambda _, method, __: LATER if method == "compute" else None)
    began = time.monotonic()
    cluster.silent_seconds = lambda: time.monotonic() - began  # type: ignore[method-assign]
    with pytest.raises(EvalkitError, match="head of the Ray cluster has not answered"):
        run(cluster, jobs_of(files, tmp_path, models=1), seconds=10)


def test_a_head_is_asked_again_after_a_failed_request(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    requests: list[Callable[[], Any]] = []

    def nodes() -> list[dict[str, Any]]:
        requests.append(nodes)
        if len(requests) == 2:
            raise ray.exceptions.RaySystemError("the head restarts")
        return [{"Alive": True, "Resources": {"CPU": float(len(requests))}}]

    monkeypatch.setattr("evalkit.studies.cluster.ray_cluster._LOOK", 0.01)
    monkeypatch.setattr(ray, "nodes", nodes)
    monkeypatch.setattr(ray, "is_initialized", lambda: len(requests) < 5)
    cluster = RayCluster(Needs(1, 0.0), ClusterOptions(), 1.0)
    deadline = time.monotonic() + 10
    while cluster.capacity() < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cluster.capacity() == 5
