"""The driver's loop on a cluster inside this process, for orders of events that a real cluster shows rarely.

The workers are real (`BatchWorker` on tiny checkpoints); only the transport is replaced: calls are pickled, and a test
decides when and how each is answered.
"""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.compute as pc
import pytest

from evalkit.benchmarks.registry import benchmark
from evalkit.errors import UsageError
from evalkit.runs.columns import from_bytes, record_batch, to_bytes
from evalkit.runs.folder import load_run
from evalkit.runs.score_table import ScoreRow
from evalkit.studies.cluster.driver import ClusterRunner, Driver
from evalkit.studies.cluster.ray_cluster import ClusterOptions, WorkerLostError
from evalkit.studies.cluster.tracked_job import Flight, TrackedJob
from evalkit.studies.cluster.worker import (
    BatchWorker,
    ComputedBatch,
    PreparedRun,
    WorkerDescription,
    WorkerFailure,
    versions,
)
from evalkit.studies.cluster.worker_pool import WorkerHandle
from evalkit.studies.planning import Job
from tests.engines.cluster.conftest import Recorder, jobs_of, same, states
from tests.journals import entries_of

Fault = Callable[[int, str, tuple[Any, ...]], Any]
"""(worker, method, arguments) → an answer, an exception, LATER, or None for the worker's own answer."""
LATER = object()
SHORT = WorkerFailure("memory", "out of memory on 100 tokens")


class InProcessCluster:
    """Workers that answer when `answered` asks, one call at a time, the last one first if `backwards`."""

    needs = "1 CPU core"

    def __init__(self, count: int, fault: Fault | None = None, backwards: bool = False) -> None:
        self.count = count
        self.fault = fault or (lambda *_: None)
        self.backwards = backwards
        self.workers: dict[int, BatchWorker] = {}
        self.calls: list[tuple[object, int, str, tuple[Any, ...]]] = []
        self.answers: dict[object, Any] = {}
        self.log: list[tuple[int, str]] = []
        self.started = 0
        self.idle = 0

    def capacity(self) -> int:
        """See `RayCluster`, as the other methods."""
        return self.count

    def describe(self) -> str:
        return f"{self.count} CPU cores"

    describe_free = describe
    is_local = True

    def silent_seconds(self) -> float:
        return 0.0

    def start_worker(self) -> int:
        self.started += 1
        self.workers[self.started] = BatchWorker(1)
        return self.started

    def stop_worker(self, worker: int) -> None:
        self.workers.pop(worker, None)

    def call(self, worker: int, method: str, *arguments: Any) -> object:
        call = object()
        self.calls.append((call, worker, method, pickle.loads(pickle.dumps(arguments))))
        return call

    def put(self, value: Any) -> Any:
        return value

    def answered(self, calls: Sequence[object], seconds: float) -> list[object]:
        self.idle += 1
        found = []
        for entry in list(self.calls):
            call, worker, method, arguments = entry
            if call not in calls:
                self.calls.remove(entry)
                continue
            answer = self.fault(worker, method, arguments)
            if answer is LATER:
                continue
            self.calls.remove(entry)
            self.log.append((worker, method))
            if answer is not None and method == "compute":
                self.workers[worker]._turn += 1  # as if it had been computed
            self.answers[call] = getattr(self.workers[worker], method)(*arguments) if answer is None else answer
            found.append(call)
            if not self.backwards:
                return found
        if not found:
            time.sleep(min(seconds, 0.01))
        return found[::-1]

    def answer(self, call: object) -> Any:
        found = self.answers.pop(call)
        if isinstance(found, Exception):
            raise found
        return found

    def log_of(self, *_: object) -> list[str]:
        return []


class StuckError(Exception):
    """The loop does not end."""


def run(cluster: InProcessCluster, jobs: list[Job], seconds: float = 40.0) -> tuple[list[Any], Recorder]:
    """Run jobs; raise `StuckError` if it takes too long."""
    progress = Recorder()
    driver = Driver(cluster, jobs, progress)  # type: ignore[arg-type]
    end, keep = time.monotonic() + seconds, driver.pool.keep

    def bounded() -> None:
        if time.monotonic() > end:
            raise StuckError([(job.label, job.phase, len(job.ready), job.in_hands) for job in driver.queue.jobs])
        keep()

    driver.pool.keep = bounded  # type: ignore[method-assign]
    return driver.run(), progress


def planned_batches(job: Job) -> set[tuple[str, int]]:
    """Return the journal's entries of a finished run."""
    return {(entry.task, entry.batch) for entry, rows in entries_of(load_run(job.plan.folder), ScoreRow) if rows}


def test_answers_in_another_order(files: Path, expected: dict[str, pd.DataFrame], tmp_path: Path) -> None:
    """Each batch is stored under its own task and number, whichever of a worker's two is answered first."""
    jobs = jobs_of(files, tmp_path, models=2)
    outcomes, _ = run(InProcessCluster(1, backwards=True), jobs)
    assert states(outcomes) == ["finished"] * 2
    assert same(jobs, {name: expected[name] for name in ("model0", "model1")})
    for job in jobs:
        for entry, rows in entries_of(load_run(job.plan.folder), ScoreRow):
            assert {row[0] for row in rows} == {entry.task}


def test_calls_that_arrive_in_another_order_are_computed_in_that_of_their_numbers() -> None:
    import threading

    done: list[int] = []
    worker = BatchWorker(1)

    def compute(job: str, batch: Any, split: bool) -> Any:
        done.append(batch)
        return WorkerFailure("memory", "")

    worker._compute = compute  # type: ignore[method-assign]
    threads = [threading.Thread(target=worker.compute, args=("job", n, n, False)) for n in (1, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(5)
    assert done == [0, 1]


def test_the_holder_lacks_memory_and_another_worker_has_it(files: Path, tmp_path: Path) -> None:
    """The other one loads the checkpoint, however long that takes."""

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "compute" and worker == 1 and arguments[2].task == "boolq" and not arguments[3]:
            return SHORT
        if method == "prepare" and worker == 1:
            found = cluster.workers[1].prepare(*arguments)
            return replace(found, seconds=1e6) if isinstance(found, PreparedRun) else found
        return None

    cluster = InProcessCluster(2, fault)
    outcomes, progress = run(cluster, jobs_of(files, tmp_path, models=1))
    assert states(outcomes) == ["finished"]
    assert not any("it is split" in line for line in progress.said)


def test_no_worker_has_memory(files: Path, tmp_path: Path) -> None:
    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        return SHORT if method == "compute" and arguments[2].task == "boolq" and not arguments[3] else None

    outcomes, progress = run(InProcessCluster(2, fault), jobs_of(files, tmp_path, models=1))
    assert states(outcomes) == ["finished"]
    assert any("no worker has memory for" in line for line in progress.said)


@pytest.mark.parametrize("what", ["memory", "refused"])
def test_a_worker_that_never_starts_is_not_waited_for(
    what: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cores are another job's."""
    monkeypatch.setattr("evalkit.studies.cluster.worker_pool._STARTING", 0.5)

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if worker == 2:
            return LATER
        if what == "refused" and method == "prepare":
            return WorkerFailure("refused", "the checkpoint is not here")
        return SHORT if what == "memory" and method == "compute" and not arguments[3] else None

    outcomes, _ = run(InProcessCluster(2, fault), jobs_of(files, tmp_path, models=1))
    assert states(outcomes) == ["failed" if what == "refused" else "finished"]


def test_runs_that_differ_in_settings_without_effect_share_a_loaded_model(files: Path, tmp_path: Path) -> None:
    """As `context: none` has none."""
    jobs = [
        *jobs_of(files, tmp_path, models=1, tasks=("piqa",), context="none"),
        *jobs_of(files, tmp_path, models=1, tasks=("boolq",), dtype="float32"),
        *jobs_of(files, tmp_path, models=1, tasks=("arc_easy",)),
    ]
    cluster = InProcessCluster(1)
    outcomes, progress = run(cluster, jobs)
    assert states(outcomes) == ["finished"] * 3
    assert sum("LlamaForCausalLM" in line for line in progress.said) == 1
    assert not any("was lost" in line for line in progress.said)


def test_a_worker_stays_with_a_checkpoint_that_is_being_planned(files: Path, tmp_path: Path) -> None:
    cluster = InProcessCluster(1)
    outcomes, _ = run(cluster, jobs_of(files, tmp_path, models=3))
    assert states(outcomes) == ["finished"] * 3
    assert [method for _, method in cluster.log].count("prepare") == 3


def test_a_machine_lost_while_its_workers_load(files: Path, tmp_path: Path) -> None:
    """Four workers of one machine are lost at once; those that replace them go on."""

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "describe":
            return WorkerDescription(f"machine{worker > 4}", worker, versions(), "")
        return WorkerLostError("the node is gone") if method == "prepare" and worker <= 4 else None

    outcomes, _ = run(InProcessCluster(4, fault), jobs_of(files, tmp_path, models=1))
    assert states(outcomes) == ["finished"]


def test_workers_that_are_refused_while_others_compute(files: Path, tmp_path: Path) -> None:
    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        refused = method == "prepare" and worker != 5
        return WorkerFailure("refused", "not on this machine") if refused else None

    outcomes, progress = run(InProcessCluster(5, fault), jobs_of(files, tmp_path, models=1))
    assert states(outcomes) == ["finished"]
    assert sum("is refused for model0" in line for line in progress.said) >= 3


@pytest.mark.slow
def test_workers_that_never_start_well(files: Path, tmp_path: Path) -> None:
    from evalkit.errors import EvalkitError

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        return WorkerLostError("No module named 'evalkit'")

    cluster = InProcessCluster(1, fault)
    with pytest.raises(EvalkitError, match=r"no worker could be started: .* No module named 'evalkit'"):
        run(cluster, jobs_of(files, tmp_path, models=1))


def test_an_unexpected_error_ends_its_own_run_only(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = benchmark("multiple_choice")
    finish = type(kind).finish

    def fails(self: Any, plan: Any, finished: Any, writer: Any) -> None:
        if "model0" in str(writer.folder):
            raise RuntimeError("cannot finish")
        finish(self, plan, finished, writer)

    monkeypatch.setattr(type(kind), "finish", fails)
    outcomes, _ = run(InProcessCluster(1), jobs_of(files, tmp_path, models=2))
    assert states(outcomes) == ["failed", "finished"]
    assert outcomes[0].message == "unexpected RuntimeError: cannot finish"


@pytest.mark.parametrize("differs", [False, True])
def test_a_batch_is_delivered_twice(
    differs: bool, files: Path, expected: dict[str, pd.DataFrame], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second delivery is dropped by its key, whatever its rows are."""
    deliver = Driver._deliver

    def twice(self: Driver, job: TrackedJob, flight: Flight, answer: ComputedBatch, worker: WorkerHandle) -> None:
        deliver(self, job, flight, answer, worker)
        rows = from_bytes(answer.rows, ScoreRow)
        if differs:
            rows = rows.set_column(rows.schema.get_field_index("ll_end"), "ll_end", pc.add(rows["ll_end"], 1e-9))
        again = to_bytes(record_batch(rows, ScoreRow))
        deliver(self, job, flight, replace(answer, rows=again, checksum=zlib.crc32(again)), worker)

    monkeypatch.setattr(Driver, "_deliver", twice)
    jobs = jobs_of(files, tmp_path, models=1)
    outcomes, _ = run(InProcessCluster(2), jobs)
    assert states(outcomes) == ["finished"]
    keys = [(entry.task, entry.batch) for entry, _ in entries_of(load_run(jobs[0].plan.folder), ScoreRow)]
    assert len(keys) == len(set(keys))
    assert same(jobs, {"model0": expected["model0"]})


def test_a_batch_that_exceeds_its_deadline(
    files: Path, expected: dict[str, pd.DataFrame], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker, which still gives signs of life, is replaced, and another one computes it."""
    monkeypatch.setattr("evalkit.studies.cluster.tracked_job._DEADLINE", 0.5)
    monkeypatch.setattr("evalkit.studies.cluster.tracked_job._DEADLINE_SHARE", 0.0)
    hung: list[tuple[str, int]] = []

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "compute" and arguments[1] > 2 and worker == 1:
            hung.append(arguments[2].key)
            return LATER
        return None

    jobs, cluster = jobs_of(files, tmp_path, models=1), InProcessCluster(1, fault)
    outcomes, progress = run(cluster, jobs)
    assert states(outcomes) == ["finished"]
    assert cluster.started == 2 and hung
    assert sum("the batch was not computed within" in line for line in progress.said) == 1
    assert same(jobs, {"model0": expected["model0"]})


def test_a_batch_that_always_exceeds_its_deadline_ends_its_run(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalkit.studies.cluster.tracked_job._DEADLINE", 0.3)
    monkeypatch.setattr("evalkit.studies.cluster.tracked_job._DEADLINE_SHARE", 0.0)

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "compute" and arguments[2].key == ("boolq", 2):
            hung.add(worker)
        return LATER if method == "compute" and worker in hung else None

    hung: set[int] = set()
    jobs = [*jobs_of(files, tmp_path, models=1), *jobs_of(files, tmp_path, tasks=("piqa",))[1:]]
    outcomes, _ = run(InProcessCluster(1, fault), jobs)
    assert states(outcomes) == ["failed", "finished"]
    assert "batch 2 of boolq" in outcomes[0].message and "ended 3 workers" in outcomes[0].message
    assert "was not computed within" in outcomes[0].message


def test_options_that_make_no_sense(files: Path, tmp_path: Path) -> None:
    jobs = jobs_of(files, tmp_path, models=1, device="cuda:1")
    with pytest.raises(UsageError, match=r"--device cuda:1: workers are given their GPUs"):
        ClusterRunner(ClusterOptions(workers=1))(jobs, Recorder())
    with pytest.raises(UsageError, match=r"--ray nonsense: expected HOST:PORT"):
        ClusterOptions(address="nonsense")
    with pytest.raises(UsageError, match=r"--ship-checkpoints is for other machines"):
        ClusterOptions(workers=1, ship=True)


def test_the_loop_rests_while_there_is_nothing_to_do(files: Path, tmp_path: Path) -> None:
    cluster = InProcessCluster(1)
    started = time.monotonic()
    run(cluster, jobs_of(files, tmp_path, models=1))
    assert cluster.idle < 200 + 100 * (time.monotonic() - started)
