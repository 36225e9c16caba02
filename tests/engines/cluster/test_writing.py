"""Batches on their way from the workers to the journals, and the driver's work for each of them.

On a cluster inside this process, as in `test_loop.py`.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from evalkit.runs.folder import JOURNAL
from evalkit.runs.lock import is_locked
from evalkit.studies.cluster.ray_cluster import WorkerLostError
from evalkit.studies.cluster.tracked_job import TrackedJob
from evalkit.studies.cluster.worker import BatchWorker
from tests.engines.cluster.conftest import Recorder, jobs_of, same, states
from tests.engines.cluster.test_loop import LATER, InProcessCluster, run
from tests.tiny import tiny_checkpoint


class Disk:
    """Watches the journals of a folder reach the disk; `before` is called with the number of batches that have."""

    def __init__(
        self, output: Path, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None] = lambda _: None
    ) -> None:
        self.threads: set[int] = set()
        self.synced = 0
        fsync = os.fsync

        def synced(file: int) -> None:
            if os.fstat(file).st_ino not in {path.stat().st_ino for path in output.glob(f"*/{JOURNAL}")}:
                fsync(file)
                return
            before(self.synced)
            fsync(file)
            self.threads.add(threading.get_ident())
            self.synced += 1

        monkeypatch.setattr(os, "fsync", synced)


def lines(output: Path, name: str = "*") -> int:
    """Return the number of batches in the journals."""
    return sum(path.read_bytes().count(b"\n") for path in output.glob(f"{name}-*/{JOURNAL}"))


def test_the_loop_does_not_wait_for_the_disk(
    files: Path, expected: dict[str, pd.DataFrame], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing counts before it is there."""
    early: list[int] = []
    advance = Recorder.advance
    disk = Disk(tmp_path, monkeypatch, lambda _: time.sleep(0.02))

    def checked(self: Recorder, work: float, documents: int) -> None:
        advance(self, work, documents)
        if self.batches > disk.synced:
            early.append(self.batches)

    monkeypatch.setattr(Recorder, "advance", checked)
    jobs = jobs_of(files, tmp_path, models=2)
    outcomes, progress = run(InProcessCluster(2), jobs)
    assert states(outcomes) == ["finished"] * 2
    assert threading.get_ident() not in disk.threads and len(disk.threads) == 1
    assert not early and progress.batches == disk.synced == lines(tmp_path)
    assert same(jobs, {name: expected[name] for name in ("model0", "model1")})


def test_a_full_disk_ends_its_own_run_only(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the journal stays, nothing is written after the folder is closed, and the run goes on with space."""

    def full(before: int) -> None:
        if before == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk = Disk(tmp_path, monkeypatch, full)
    outcomes, _ = run(InProcessCluster(1), jobs_of(files, tmp_path, models=1))
    assert states(outcomes) == ["failed"]
    assert "No space left" in outcomes[0].message and "not saved" in outcomes[0].message
    folder = outcomes[0].job.plan.folder
    assert not is_locked(folder)
    kept = lines(tmp_path)
    time.sleep(0.2)
    assert lines(tmp_path) == kept >= 3
    disk.synced = 100
    again = jobs_of(files, tmp_path, models=2)
    assert states(run(InProcessCluster(1), again)[0]) == ["finished"] * 2


def test_the_only_worker_is_lost_before_its_first_batch_is_counted(files: Path, tmp_path: Path) -> None:
    """The time left is then estimated without any worker."""
    lost: list[float] = []

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if worker == 1 and method == "compute" and arguments[1] == 1:
            lost.append(time.monotonic())
            return WorkerLostError("killed")
        return LATER if worker == 2 and method == "describe" and time.monotonic() - lost[0] < 0.5 else None

    assert states(run(InProcessCluster(1, fault), jobs_of(files, tmp_path, models=1))[0]) == ["finished"]


def test_ctrl_c_keeps_every_batch_that_came(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(tmp_path, monkeypatch, lambda _: time.sleep(0.1))
    cluster = InProcessCluster(1)
    computed: list[int] = []

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "compute":
            computed.append(arguments[1])
            if len(computed) == 8:
                raise KeyboardInterrupt
        return None

    cluster.fault = fault
    jobs = jobs_of(files, tmp_path, models=1)
    with pytest.raises(KeyboardInterrupt):
        run(cluster, jobs)
    assert lines(tmp_path) == 7
    assert not is_locked(jobs[0].plan.folder)


@pytest.mark.slow
def test_a_worker_that_keeps_its_checkpoint_looks_at_no_other(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 workers and 36 checkpoints, whose batches one worker has computed before: the work for each delivery."""
    for seed in range(36):
        tiny_checkpoint(tmp_path / f"model{seed}", seed=seed, window=1024)
    (tmp_path / "documents").symlink_to(files / "documents")
    jobs = jobs_of(tmp_path, tmp_path / "runs", models=36)
    real, known, prepared = BatchWorker(1), dict[Any, Any](), []

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "prepare":
            if not prepared:
                prepared.append(real.prepare(*arguments))
                names.append(arguments[0])
            return prepared[0]
        if method == "compute":
            batch = arguments[2]
            if batch.key not in known:
                known[batch.key] = real.compute(names[0], len(known), batch, False)
            return replace(known[batch.key], seconds=0.5)
        return None

    names: list[str] = []
    looks = [0]
    has_work_for = TrackedJob.has_work_for

    def counted(self: TrackedJob, worker: int) -> bool:
        looks[0] += 1
        return has_work_for(self, worker)

    monkeypatch.setattr(TrackedJob, "has_work_for", counted)
    outcomes, progress = run(InProcessCluster(64, fault, backwards=True), jobs, seconds=300)
    assert states(outcomes) == ["finished"] * 36
    assert len(known) * 36 == progress.batches
    print(looks[0] / progress.batches, "looks at a checkpoint for each batch")
    assert looks[0] < 100 * progress.batches  # they were 670
