"""Simulation of a study on many workers, from real batches and the measured times of the driver.

    evalkit run demo --limit 200 --dtype bfloat16
    python benchmarks/schedule.py RUN

RUN is a finished run of zeroshot8 by one process. Its journal has the seconds of every batch, from which the seconds
per token of each task follow. The plan of all official documents gives the batches of one checkpoint. The choice of a
checkpoint is the driver's own (`studies/cluster/scheduling.py`); the rest is modelled as the driver does it. A worker
has two batches in hand and gets the next one when the loop has taken its last one. One thread opens, plans and
finishes runs, in order: it plans batches when fewer than four for each worker of a checkpoint are ready. Another
thread writes. These two and the loop share one interpreter, equally while several have work. Printed: the share of the
workers' time in which they compute, from the first start to the last result, and the share of the interpreter's.
"""

from __future__ import annotations

import argparse
import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evalkit.studies.cluster.scheduling import CheckpointLoad, choose_checkpoint

SIZES = {"one": (1.0,), "1 : 3 : 10": (1.0, 3.0, 10.0)}
"""Relative seconds of the checkpoints, in turn."""
IN_HANDS, AHEAD = 2, 4
"""Batches of a worker, and planned batches for each worker of a checkpoint, as in the driver."""


@dataclass(frozen=True)
class DriverCosts:
    """CPU seconds of the driver, as `driver_time.py` prints them; of a batch unless said otherwise."""

    loop: float
    planning: float
    writing: float
    finishing: float
    """Of a run of all documents."""
    encoding: float = 33.7
    """Seconds in which the tokenizer encodes all documents, once; not in the interpreter."""


COSTS = {2048: DriverCosts(0.0029, 0.0010, 0.0006, 4.0), 65536: DriverCosts(0.0264, 0.0162, 0.0014, 4.0)}
"""By the tokens of a batch: of a CPU, and of a GPU."""


@dataclass
class SimulatedCheckpoint:
    """A checkpoint and its batches."""

    batches: list[float]
    """Seconds of each."""
    left: float
    """Seconds of those that no worker has."""
    planned: int = 0
    given: int = 0
    stored: int = 0
    prepared: bool = False
    """Whether a worker has prepared it, so that it can be planned."""
    filling: bool = False
    workers: int = 0

    @property
    def ready(self) -> int:
        """Return the number of planned batches that no worker has."""
        return self.planned - self.given


@dataclass
class SimulatedWorker:
    """A worker."""

    model: str | None = None
    loading: bool = False
    hands: deque[float] = field(default_factory=deque)
    """Batches, the first of which it computes."""


@dataclass
class SimulatedThread:
    """A thread of the driver with its tasks, in order."""

    tasks: deque[list[Any]] = field(default_factory=deque)
    """[seconds without the interpreter, seconds of the interpreter, what happens then]."""


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="Folder of a finished run of zeroshot8, with its journal.")
    parser.add_argument("--loading", type=float, default=5.0, help="Seconds to load and check a checkpoint.")
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    print("| tokens a batch | seconds a checkpoint | checkpoints | sizes | workers | minutes | busy | driver |")
    print("|---|---|---|---|---|---|---|---|")
    for budget, costs in COSTS.items():
        batches = batch_seconds(arguments.run, arguments.data_dir, budget)
        for whole in (None,) if budget == min(COSTS) else (30.0, 120.0, 600.0):
            seconds = [one if whole is None else one * whole / sum(batches) for one in batches]
            for count, workers in ((1, 8), (36, 8), (36, 64)):
                for name, sizes in SIZES.items():
                    if len(sizes) > 1 and (count == 1 or whole not in (None, 120.0)):
                        continue
                    simulation = Simulation(
                        seconds, [sizes[n % len(sizes)] for n in range(count)], workers, costs, arguments.loading
                    )
                    span, busy, driver = simulation.run()
                    shown = f"{budget:,} | {sum(seconds):,.0f} | {count} | {name} | {workers}"
                    print(f"| {shown} | {span / 60:,.1f} | {busy:.0%} | {driver:.0%} |", flush=True)
    print(f"\nassumed: loading {arguments.loading} s, workers of equal speed, none lost; {COSTS}")


def batch_seconds(folder: Path, data_dir: Path | None, budget: int) -> list[float]:
    """Return the seconds of every batch of at most so many tokens, of a checkpoint on all official documents."""

    from evalkit.benchmarks.registry import benchmark
    from evalkit.benchmarks.run import planned
    from evalkit.inputs.validated import restored
    from evalkit.models.loading.load import load
    from evalkit.runs.folder import JOURNAL, load_run
    from evalkit.runs.journal import FinishedRows, Journal

    run = load_run(folder)
    computation = benchmark("multiple_choice").computation
    manifest = run.manifest
    measured: dict[tuple[str, int], float] = {}
    for entry, _ in Journal(folder / JOURNAL, manifest["id"], computation.rows, print).read():
        measured[entry.task, entry.batch] = entry.seconds
    specification = manifest["specification"]
    options: dict[str, Any] = {"template": run.template, "dtype": specification["dtype"], "output": Path("none")}
    options |= {"data_dir": data_dir, "device": "cpu"}
    facts = restored(manifest["facts"], computation.facts)
    loaded = None
    rates: dict[str, float] = {}
    found: list[float] = []
    for limit in (specification["limit"], None):
        if limit is None:
            facts = replace(facts, token_budget=budget)
        plan = planned(manifest["model"], options | {"limit": limit}, lambda _: None)
        loaded = loaded or load(plan.checkpoint, dtype="bfloat16")
        empty = FinishedRows(Journal(Path("no journal"), "none", computation.rows, print), computation.key)
        sizes: dict[str, float] = defaultdict(float)
        spent: dict[str, float] = defaultdict(float)
        for batch in computation.batches(plan, facts, loaded.tokenizer, empty, lambda _: None).batches:
            tree = batch.content.tree
            tokens = len(tree.trunk) + len(tree.tree.tokens)
            if limit is None:
                found.append(rates[batch.task] * tokens)
            else:
                sizes[batch.task] += tokens
                spent[batch.task] += measured[batch.task, batch.number]
        rates = rates or {task: spent[task] / sizes[task] for task in sizes}
    return found


class Simulation:
    """A study.

    Args:
        seconds: of the batches of a checkpoint of size 1.
        sizes: of the checkpoints.
        workers: number of workers.
        costs: of the driver.
        loading: seconds to load a checkpoint.
    """

    def __init__(
        self, seconds: list[float], sizes: list[float], workers: int, costs: DriverCosts, loading: float
    ) -> None:
        self._costs = costs
        self._loading = loading
        self._checkpoints = {
            f"checkpoint {n}": SimulatedCheckpoint([size * one for one in seconds], size * sum(seconds))
            for n, size in enumerate(sizes)
        }
        self._workers = [SimulatedWorker() for _ in range(workers)]
        self._loop, self._planner, self._writer = (SimulatedThread() for _ in range(3))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._now = self._interpreter = 0.0
        self._encoded = 0
        """Batches whose documents are encoded; all checkpoints have one tokenizer."""

    def run(self) -> tuple[float, float, float]:
        """Return (seconds from start to end, workers' share of it, interpreter's share of it)."""
        for worker in self._workers:
            self._give(worker)
        threads = (self._loop, self._planner, self._writer)
        while self._events or any(thread.tasks for thread in threads):
            first = [thread.tasks[0] for thread in threads if thread.tasks]
            sharing = sum(not task[0] for task in first)
            ends = [task[0] or task[1] * sharing for task in first]
            step = min(ends, default=float("inf"))
            if self._events and self._events[0][0] <= self._now + step:
                step = max(self._events[0][0] - self._now, 0.0)
                self._pass(first, step, sharing)
                heapq.heappop(self._events)[2]()
                continue
            self._pass(first, step, sharing)
            for thread in threads:
                if thread.tasks and thread.tasks[0][0] <= 0 and thread.tasks[0][1] <= 1e-12:
                    thread.tasks.popleft()[2]()
        assert all(one.stored == len(one.batches) for one in self._checkpoints.values())
        computed = sum(sum(one.batches) for one in self._checkpoints.values())
        return self._now, computed / (len(self._workers) * self._now), self._interpreter / self._now

    def _pass(self, tasks: list[list[Any]], step: float, sharing: int) -> None:
        """Let time pass for the first tasks of the threads."""
        self._now += step
        for task in tasks:
            if task[0]:
                task[0] = max(task[0] - step, 0.0) if task[0] - step > 1e-12 else 0.0
            else:
                task[1] -= step / sharing
                self._interpreter += step / sharing

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self._now + seconds, self._count, event))

    def _give(self, worker: SimulatedWorker) -> None:
        """Give a worker batches, or a checkpoint to load."""
        while not worker.loading and len(worker.hands) < IN_HANDS:
            own = self._checkpoints.get(worker.model or "")
            if own is not None and own.given < len(own.batches):
                if own.ready:
                    batch = own.batches[own.given]
                    own.given += 1
                    own.left -= batch
                    worker.hands.append(batch)
                    if len(worker.hands) == 1:
                        self._compute(worker)
                    self._fill(own)
                    continue
                return
            if worker.hands:
                return
            loads = {
                name: CheckpointLoad(max(one.left, 1e-9), one.workers, one.left if one.stored else None)
                for name, one in self._checkpoints.items()
                if one.ready or (not one.prepared and not one.workers)
            }
            chosen = choose_checkpoint(worker.model, loads, self._loading)
            if chosen is None:
                return
            if own is not None:
                own.workers -= 1
            self._checkpoints[chosen].workers += 1
            worker.model, worker.loading = chosen, True
            self._after(self._loading, lambda: self._loop.tasks.append([0.0, self._costs.loop, prepared]))

            def prepared(model: SimulatedCheckpoint = self._checkpoints[chosen]) -> None:
                worker.loading = False
                model.prepared = True
                self._fill(model)
                self._give(worker)

    def _fill(self, checkpoint: SimulatedCheckpoint) -> None:
        """Plan batches when few are ready."""
        enough = AHEAD * max(1, checkpoint.workers)
        count = min(2 * enough, len(checkpoint.batches) - checkpoint.planned)
        if not checkpoint.prepared or checkpoint.filling or checkpoint.ready >= enough or not count:
            return
        checkpoint.filling = True
        new = max(0, checkpoint.planned + count - self._encoded)
        self._encoded += new
        encoding = self._costs.encoding * new / len(checkpoint.batches)

        def filled() -> None:
            checkpoint.filling = False
            checkpoint.planned += count
            self._fill(checkpoint)
            for worker in self._workers:
                self._give(worker)

        self._planner.tasks.append([encoding, count * self._costs.planning, filled])

    def _compute(self, worker: SimulatedWorker) -> None:
        def computed() -> None:
            # The next one starts at once, while the loop takes this one
            model = self._checkpoints[worker.model or ""]
            worker.hands.popleft()
            if worker.hands:
                self._compute(worker)
            self._loop.tasks.append([0.0, self._costs.loop, lambda: self._taken(worker, model)])

        self._after(worker.hands[0], computed)

    def _taken(self, worker: SimulatedWorker, model: SimulatedCheckpoint) -> None:
        def stored() -> None:
            model.stored += 1
            if model.stored == len(model.batches):
                self._planner.tasks.append([0.0, self._costs.finishing, lambda: None])

        self._writer.tasks.append([0.0, self._costs.writing, stored])
        self._give(worker)


if __name__ == "__main__":
    main()
