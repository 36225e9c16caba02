"""The driver's loop on workers inside this process, for orders of events that a real cluster shows rarely.

The workers are real (`BatchWorker` on tiny checkpoints); only Ray is replaced: calls are pickled, and a test decides
when and how each is answered.
"""

from __future__ import annotations

import errno
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.session import opened
from evalkit.errors import EvalkitError
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import JOURNAL, load_run
from evalkit.runs.writing import is_locked
from evalkit.studies.cluster import workers as pool_module
from evalkit.studies.cluster.driver import Driver
from evalkit.studies.cluster.jobs import JobQueue, TrackedJob
from evalkit.studies.cluster.resources import ClusterOptions
from evalkit.studies.cluster.worker import Answer, BatchWorker, WorkerDescription, WorkerFailure, versions
from evalkit.studies.cluster.workers import WorkerPool
from evalkit.studies.running import Job, Outcome
from tests.engines.cluster.conftest import Recorder, Tables, jobs_of, lines, same, states
from tests.journals import entries_of

Fault = Callable[[int, str, tuple[Any, ...]], Any]
"""(worker, method, arguments) → an answer, an exception, LATER, or None for the worker's own answer."""
LATER = object()
SHORT = Answer(WorkerFailure("memory", "out of memory on 100 tokens"))
REFUSED = Answer(WorkerFailure("refused", "the checkpoint is not here"))


class LostError(Exception):
    """A worker is gone."""


class Call(NamedTuple):
    """A call that is not answered."""

    number: int
    worker: int
    method: str
    arguments: tuple[Any, ...]


class InProcessRay:
    """Ray's functions, with workers that answer when `wait` asks: one call at a time, all and the last if `backwards`.

    `run` starts a driver on it.
    """

    exceptions = SimpleNamespace(RayError=LostError)

    def __init__(self, cores: int, fault: Fault | None = None, backwards: bool = False) -> None:
        self.resources = {"CPU": float(cores)}
        self.fault, self.backwards = fault or (lambda *_: None), backwards
        self.workers: dict[int, BatchWorker] = {}
        self.calls: list[Call] = []
        self.answers: dict[int, Any] = {}
        self.log: list[tuple[int, str]] = []
        self.started = self.waits = 0
        self.is_open = True

    # Functions of Ray

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": self.resources}]

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    available_resources = cluster_resources

    def is_initialized(self) -> bool:
        return self.is_open

    def remote(self, kind: Callable[..., BatchWorker]) -> Any:
        def start(*arguments: Any) -> Any:
            self.started += 1
            self.workers[self.started] = kind(*arguments)
            return InProcessActor(self, self.started)

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))

    def kill(self, worker: Any, no_restart: bool) -> None:
        self.workers.pop(worker.number, None)

    def put(self, value: Any) -> Any:
        return value

    def wait(self, calls: Sequence[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        self.waits += timeout > 0
        ready: list[int] = []
        for call in [call for call in self.calls if call.number in calls]:
            if ready and not self.backwards:
                break
            if (answer := self.fault(call.worker, call.method, call.arguments)) is LATER:
                continue
            self.calls.remove(call)
            self.log.append((call.worker, call.method))
            own = self.workers[call.worker]
            self.answers[call.number] = getattr(own, call.method)(*call.arguments) if answer is None else answer
            ready.append(call.number)
        if not ready:
            time.sleep(min(timeout, 0.01))
        return ready[::-1], [call for call in calls if call not in ready and self.backwards]

    def get(self, call: int) -> Any:
        if isinstance(answer := self.answers.pop(call), LostError):
            raise answer
        return answer

    def run(self, jobs: list[Job], seconds: float = 40.0) -> tuple[list[Outcome], Recorder]:
        """Run jobs; raise a `TimeoutError` if it takes too long."""
        progress, end = Recorder(), time.monotonic() + seconds
        self.pool = pool = WorkerPool(self, ClusterOptions(worker_cpus=1), "cpu", progress.say)
        tend = pool.tend

        def bounded() -> None:
            if time.monotonic() > end:
                raise TimeoutError([(job.label, job.phase, len(job.ready), job.in_hands) for job in driver.queue.jobs])
            tend()

        pool.tend = bounded  # type: ignore[method-assign]
        driver = Driver(pool, JobQueue(jobs, progress))
        try:
            return driver.run(), progress
        finally:
            self.is_open = False


class InProcessActor:
    """A worker: `actor.method.remote(…)` is a call."""

    def __init__(self, ray: InProcessRay, number: int) -> None:
        self.ray, self.number = ray, number

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> int:
            number = next(_numbers)
            self.ray.calls.append(Call(number, self.number, method, pickle.loads(pickle.dumps(arguments))))
            return number

        return SimpleNamespace(remote=remote)


_numbers = count()


def test_answers_in_another_order(files: Path, expected: Tables, tmp_path: Path) -> None:
    """Each batch is stored under its own task and number, whichever of a worker's two is answered first."""
    jobs = jobs_of(files, tmp_path, models=2)
    outcomes, progress = InProcessRay(1, backwards=True).run(jobs)
    assert states(outcomes) == ["finished"] * 2
    assert same(jobs, expected)
    for job in jobs:
        documents = load_run(job.plan.folder).scores.groupby("task")["subtask"].unique()
        for entry, rows in entries_of(load_run(job.plan.folder)):
            assert {row.document.rpartition(" ")[0] for row in rows} <= {*documents[entry.task]}
    assert sum("LlamaForCausalLM" in line for line in progress.said) == 2


@pytest.mark.parametrize("who", ["holder", "all"])
def test_memory_that_runs_out(who: str, files: Path, expected: Tables, tmp_path: Path) -> None:
    """Another worker loads the checkpoint, however long that takes; a batch is split only if no worker has memory."""

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "compute" and arguments[1].task == "boolq" and not arguments[2] and (worker == 1 or who == "all"):
            return SHORT
        if method == "prepare" and worker == 1 and who == "holder":
            answer = ray.workers[1].prepare(*arguments)
            return answer._replace(content=replace(answer.content, seconds=1e6))
        return None

    ray, jobs = InProcessRay(2, fault), jobs_of(files, tmp_path, models=1)
    outcomes, progress = ray.run(jobs)
    assert states(outcomes) == ["finished"]
    assert any("it is split" in line for line in progress.said) == (who == "all")
    assert same(jobs, expected)  # a batch that fits when it is computed alone


@pytest.mark.parametrize("what", ["memory", "refused"])
def test_a_worker_that_never_starts_is_not_waited_for(
    what: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cores are another job's."""
    monkeypatch.setattr(pool_module, "_STARTING", 0.5)

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if worker == 2:
            return LATER
        if method == "prepare" and what == "refused":
            return REFUSED
        return SHORT if method == "compute" and what == "memory" and not arguments[2] else None

    outcomes, _ = InProcessRay(2, fault).run(jobs_of(files, tmp_path, models=1))
    assert states(outcomes) == ["failed" if what == "refused" else "finished"]


@pytest.mark.slow
def test_runs_that_differ_in_settings_without_effect_share_a_loaded_model(files: Path, tmp_path: Path) -> None:
    """As `context: none` has none. A worker stays with a checkpoint that is being planned."""
    jobs = [
        *jobs_of(files, tmp_path, models=1, tasks=("piqa",), context="none"),
        *jobs_of(files, tmp_path, models=2, tasks=("boolq",), dtype="float32"),
        *jobs_of(files, tmp_path, models=1, tasks=("arc_easy",)),
    ]
    outcomes, progress = InProcessRay(1).run(jobs)
    assert states(outcomes) == ["finished"] * 4
    assert sum("LlamaForCausalLM" in line for line in progress.said) == 2
    assert not any("was lost" in line for line in progress.said)


def test_a_machine_lost_while_its_workers_load(files: Path, tmp_path: Path) -> None:
    """Four workers of one machine are lost at once; of those that replace them, all but one are refused."""

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "describe":
            return WorkerDescription(f"machine{worker > 4}", worker, versions(), "")
        if method == "prepare" and worker <= 4:
            return LostError("the node is gone")
        return REFUSED if method == "prepare" and worker != 8 else None

    outcomes, progress = InProcessRay(4, fault).run(jobs_of(files, tmp_path, models=1))
    assert states(outcomes) == ["finished"]
    assert sum("is refused for model0" in line for line in progress.said) == 3


def test_workers_that_never_start_well(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_GROWTH", 0.05)
    ray = InProcessRay(1, lambda *_: LostError("No module named 'evalkit'"))
    with pytest.raises(EvalkitError, match=r"no worker could be started: .* No module named 'evalkit'"):
        ray.run(jobs_of(files, tmp_path, models=1))


@pytest.mark.slow
def test_an_unexpected_error_ends_its_own_run_only(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(benchmark("multiple_choice"))
    finish = kind.finish

    def fails(self: Any, plan: Any, finished: Any, writer: Any) -> None:
        if "model0" in str(writer.folder):
            raise RuntimeError("cannot finish")
        finish(self, plan, finished, writer)

    monkeypatch.setattr(kind, "finish", fails)
    outcomes, _ = InProcessRay(1).run(jobs_of(files, tmp_path, models=2))
    assert states(outcomes) == ["failed", "finished"]
    assert outcomes[0].message == "unexpected RuntimeError: cannot finish"


def test_batches_that_come_twice_or_damaged(
    files: Path, expected: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second delivery is dropped by its key, whatever its rows are; damaged rows are computed again."""
    computed, delivered = Driver._computed, list[Any]()

    def twice(self: Driver, worker: Any, job: TrackedJob, flight: Any, content: Any) -> None:
        delivered.append(content.rows)
        damaged = replace(content, rows=content.rows[:40] + b"?" + content.rows[41:])
        computed(self, worker, job, flight, damaged if len(delivered) in (2, 5) else content)
        if len(delivered) not in (2, 5):
            computed(self, worker, job, flight, replace(content, rows=delivered[0]))

    monkeypatch.setattr(Driver, "_computed", twice)
    jobs = jobs_of(files, tmp_path, models=1)
    outcomes, progress = InProcessRay(2).run(jobs)
    assert states(outcomes) == ["finished"]
    assert sum("was damaged on the way" in line for line in progress.said) == 2
    keys = [(entry.task, entry.batch) for entry, _ in entries_of(load_run(jobs[0].plan.folder))]
    assert len(keys) == len({*keys}) == len(delivered) - 2
    assert same(jobs, expected)


@pytest.mark.slow
def test_deadlines(files: Path, expected: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not load or compute in time is replaced; a batch that costs three workers ends its run."""
    monkeypatch.setattr(pool_module, "_LOADING_DEADLINE", 1.0)
    monkeypatch.setattr(pool_module, "_DEADLINE", 0.3)
    monkeypatch.setattr(pool_module, "_DEADLINE_SHARE", 0.0)
    hung: set[int] = set()

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        is_last = method == "compute" and arguments[1].key == ("boolq", 2)
        if (worker == 1 and method == "prepare") or (worker == 2 and len(ray.log) > 6) or is_last:
            hung.add(worker)
        return LATER if worker in hung else None

    jobs = [*jobs_of(files, tmp_path, models=1), *jobs_of(files, tmp_path, tasks=("piqa",))[1:]]
    ray = InProcessRay(1, fault)
    outcomes, progress = ray.run(jobs)
    assert states(outcomes) == ["failed", "finished"]
    assert "batch 2 of boolq" in outcomes[0].message and "ended 3 workers" in outcomes[0].message
    assert sum("the checkpoint was not loaded within 1 s" in line for line in progress.said) == 1
    assert sum("the batch was not computed within 0 s" in line for line in progress.said) == ray.started - 2 == 4
    ray, again = InProcessRay(1), jobs_of(files, tmp_path, models=1)
    assert states(ray.run(again)[0]) == ["finished"]
    assert same(again, expected)


@pytest.mark.slow
def test_a_driver_that_was_stopped_does_not_blame_the_head(files: Path, tmp_path: Path) -> None:
    """After Ctrl-Z and fg, the last answer of the head is old until the thread that asks has asked again."""
    pools: list[WorkerPool] = []

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "compute" and not pools:
            pools.append(ray.pool)
            ray.pool._time -= 100
        return None

    ray = InProcessRay(1, fault)
    outcomes, progress = ray.run(jobs_of(files, tmp_path, models=1))
    assert states(outcomes) == ["finished"] and pools
    assert not any("has not answered" in line for line in progress.said)


@pytest.mark.slow
def test_a_head_that_is_lost_ends_the_run(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single request that fails does not."""
    monkeypatch.setattr(pool_module, "_LOOK", 0.01)
    monkeypatch.setattr(pool_module, "_HEAD_SILENT", 0.2)
    monkeypatch.setattr(pool_module, "_HEAD_LOST", 0.5)
    ray = InProcessRay(1, lambda _, method, __: LATER if method == "compute" else None)
    requests = count()

    def nodes() -> list[dict[str, Any]]:
        if (number := next(requests)) == 2 or number > 20:
            raise LostError("no head")
        return [{"Alive": True, "Resources": ray.resources}]

    monkeypatch.setattr(ray, "nodes", nodes)
    with pytest.raises(EvalkitError, match="head of the Ray cluster has not answered"):
        ray.run(jobs_of(files, tmp_path, models=1), seconds=10)
    assert next(requests) > 20


class Disk:
    """Watches the journals of a folder reach the disk; `before` is called with the number of batches that have."""

    def __init__(self, output: Path, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
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


@pytest.mark.slow
def test_the_loop_does_not_wait_for_the_disk(
    files: Path, expected: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing counts before it is there. The loop rests while there is nothing to do."""
    early: list[int] = []
    advance = Recorder.advance
    disk = Disk(tmp_path, monkeypatch, lambda _: time.sleep(0.02))

    def checked(self: Recorder, work: float, documents: int) -> None:
        advance(self, work, documents)
        if self.batches > disk.synced:
            early.append(self.batches)

    monkeypatch.setattr(Recorder, "advance", checked)
    ray, jobs, started = InProcessRay(2), jobs_of(files, tmp_path, models=2), time.monotonic()
    outcomes, progress = ray.run(jobs)
    assert states(outcomes) == ["finished"] * 2
    assert ray.waits < 200 + 100 * (time.monotonic() - started)
    assert threading.get_ident() not in disk.threads and len(disk.threads) == 1
    assert not early and progress.batches == disk.synced == lines(tmp_path)
    assert same(jobs, expected)


def test_a_full_disk_ends_its_own_run_only(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the journal stays, nothing is written after the folder is closed, and the run goes on with space."""

    def full(before: int) -> None:
        if before == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk = Disk(tmp_path, monkeypatch, full)
    outcomes, _ = InProcessRay(1).run(jobs_of(files, tmp_path, models=1))
    assert states(outcomes) == ["failed"]
    assert "No space left" in outcomes[0].message and "batch 3" in outcomes[0].message
    assert not is_locked(outcomes[0].job.plan.folder)
    kept = lines(tmp_path)
    time.sleep(0.2)
    assert lines(tmp_path) == kept >= 3
    disk.synced = 100
    assert states(InProcessRay(1).run(jobs_of(files, tmp_path, models=1))[0]) == ["finished"]


def test_the_only_worker_is_lost_before_its_first_batch_is_counted(files: Path, tmp_path: Path) -> None:
    """The time left is then estimated without any worker."""
    lost: list[float] = []

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if worker == 1 and method == "compute" and ray.log[-1][1] == "compute":
            lost.append(time.monotonic())
            return LostError("killed")
        return LATER if worker == 2 and method == "describe" and time.monotonic() - lost[0] < 0.5 else None

    ray = InProcessRay(1, fault)
    assert states(ray.run(jobs_of(files, tmp_path, models=1))[0]) == ["finished"]


def test_ctrl_c_keeps_every_batch_that_came(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(tmp_path, monkeypatch, lambda _: time.sleep(0.1))

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if [name for _, name in ray.log].count("compute") == 7:
            raise KeyboardInterrupt
        return None

    ray, jobs = InProcessRay(1, fault), jobs_of(files, tmp_path, models=1)
    with pytest.raises(KeyboardInterrupt):
        ray.run(jobs)
    assert lines(tmp_path) == 7
    assert not is_locked(jobs[0].plan.folder)


def test_a_run_of_another_process_is_left_to_it(files: Path, tmp_path: Path) -> None:
    jobs = jobs_of(files, tmp_path)
    with opened(jobs[0].plan, silent):
        outcomes, _ = InProcessRay(1).run(jobs)
    assert states(outcomes) == ["in use", "finished"] and f"process {os.getpid()}" in outcomes[0].message


@pytest.mark.slow
def test_estimates_are_those_of_the_measured_seconds(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two jobs is measured: the other one, of the same kind and size, is expected to take as long."""
    monkeypatch.setattr("evalkit.studies.cluster.jobs._ESTIMATE_EVERY", 0.0)
    seen: list[tuple[float, float | None, float | None]] = []

    def fault(worker: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method != "compute":
            return None
        answer = ray.workers[worker].compute(*arguments)
        return answer._replace(content=replace(answer.content, seconds=arguments[1].work / 100))

    def estimate(queue: JobQueue) -> None:
        real(queue)
        seen.append((queue.progress.share(), queue.progress.seconds_left(), queue.jobs[0].seconds_left))
        totals.update({job.label: job.total / 100 for job in queue.jobs if job.total})

    real, totals = JobQueue._estimate, dict[str, float]()
    monkeypatch.setattr(JobQueue, "_estimate", estimate)
    ray = InProcessRay(1, fault)
    assert states(ray.run(jobs_of(files, tmp_path))[0]) == ["finished"] * 2
    whole = sum(totals.values())
    middle = [(share, left) for share, left, _ in seen if left is not None and 0.1 < share < 0.9]
    assert len(middle) > 5
    assert all(left == pytest.approx((1 - share) * whole, rel=0.02) for share, left in middle)
    own = [left for _, _, left in seen if left is not None]
    assert own == sorted(own, reverse=True) and 0 < own[0] < totals["model0"] and own[-1] == 0
