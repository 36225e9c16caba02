"""Simulation of a study on many workers, from real batch times and the real plan.

    evalkit run demo --limit 200 --dtype bfloat16
    python benchmarks/schedule.py RUN

RUN is a finished run of zeroshot8 by one process. Its journal has the seconds of every batch, from which the seconds
per token of each task follow. The plan of all official documents gives the batches of one checkpoint. The schedule is
the driver's own (`engines/cluster/scheduling.py`, two batches in hand, the longest checkpoint first). Printed: the
share of the workers' time in which they compute, from the first start to the last result, and all assumptions.
"""

from __future__ import annotations

import argparse
import heapq
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.engines.cluster.scheduling import CheckpointLoad, choose_checkpoint

SIZES = {"one size": (1.0,), "three sizes (1 : 3 : 10)": (1.0, 3.0, 10.0)}
"""Relative seconds of the checkpoints, in turn."""


@dataclass
class SimulatedCheckpoint:
    """A checkpoint with the batches that are left."""

    batches: list[float]
    """Seconds of each, in reverse order."""
    left: float
    workers: int = 0


@dataclass
class SimulatedWorker:
    """A worker."""

    number: int
    model: str | None = None
    busy: float = 0.0


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="Folder of a finished run of zeroshot8, with its journal.")
    parser.add_argument("--loading", type=float, default=5.0, help="Seconds to load and check a checkpoint.")
    parser.add_argument("--driver", type=float, default=0.002, help="Seconds of the driver for a batch, one at a time.")
    parser.add_argument("--finishing", type=float, default=20.0, help="Seconds to write a run's results, in a thread.")
    parser.add_argument(
        "--planning", type=float, default=60.0, help="Seconds until all batches of a tokenizer are planned."
    )
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    seconds = batch_seconds(arguments.run, arguments.data_dir)
    print(
        f"assumed: {len(seconds)} batches and {sum(seconds):.0f} s a checkpoint of size 1; loading "
        f"{arguments.loading} s; driver {1000 * arguments.driver} ms a batch; planning {arguments.planning} s, once; "
        f"finishing {arguments.finishing} s a checkpoint, one at a time; workers of equal speed, none lost\n"
    )
    print("| checkpoints | sizes | workers | hours | busy |\n|---|---|---|---|---|")
    for count, workers in ((1, 8), (36, 8), (36, 64)):
        for name, sizes in SIZES.items():
            if count == 1 and len(sizes) > 1:
                continue
            span, busy = simulate(seconds, [sizes[n % len(sizes)] for n in range(count)], workers, arguments)
            print(f"| {count} | {name} | {workers} | {span / 3600:.2f} | {busy:.1%} |")


def batch_seconds(folder: Path, data_dir: Path | None) -> list[float]:
    """Return the seconds of every batch of a checkpoint on all official documents."""
    from evalkit.benchmarks.multiple_choice.scoring import ScoringFacts
    from evalkit.benchmarks.registry import benchmark
    from evalkit.benchmarks.run import planned
    from evalkit.models.load import load
    from evalkit.runs.finished_rows import FinishedRows
    from evalkit.runs.folder import JOURNAL, load_run
    from evalkit.runs.journal import Journal
    from evalkit.scores.table import ScoreRow

    run, kind = load_run(folder), benchmark("multiple_choice")
    manifest = run.manifest
    measured: dict[tuple[str, int], float] = {}
    for entry, _ in Journal(folder / JOURNAL, manifest["id"], ScoreRow, print).read():
        measured[entry.task, entry.batch] = entry.seconds
    specification = manifest["specification"]
    options: dict[str, Any] = {"template": run.template, "dtype": specification["dtype"], "output": Path("none")}
    options |= {"data_dir": data_dir, "device": "cpu"}
    facts = ScoringFacts(**manifest["facts"])
    loaded = None
    rates: dict[str, float] = {}
    found: list[float] = []
    for limit in (specification["limit"], None):
        plan = planned(manifest["model"], options | {"limit": limit}, lambda _: None)
        loaded = loaded or load(plan.checkpoint, dtype="bfloat16")
        empty = FinishedRows(Journal(Path("no journal"), "none", ScoreRow, print), kind.key)
        sizes: dict[str, float] = defaultdict(float)
        spent: dict[str, float] = defaultdict(float)
        for batch in kind.batches(plan, facts, loaded.tokenizer, empty, lambda _: None).batches:
            tree = batch.content.batch
            tokens = len(tree.trunk) + len(tree.tree.tokens)
            if limit is None:
                found.append(rates[batch.task] * tokens)
            else:
                sizes[batch.task] += tokens
                spent[batch.task] += measured[batch.task, batch.number]
        rates = rates or {task: spent[task] / sizes[task] for task in sizes}
    return found


def simulate(
    seconds: list[float], sizes: list[float], count: int, arguments: argparse.Namespace
) -> tuple[float, float]:
    """Return (seconds from start to end, share of the workers' time in which they compute)."""
    checkpoints = {
        f"checkpoint {n}": SimulatedCheckpoint([size * one for one in reversed(seconds)], size * sum(seconds))
        for n, size in enumerate(sizes)
    }
    workers = [SimulatedWorker(n) for n in range(count)]
    # (time, worker): when a worker is free
    events = [(0.0, worker.number) for worker in workers]
    driver = finisher = 0.0
    while events:
        now, number = heapq.heappop(events)
        worker = workers[number]
        loads = {
            name: CheckpointLoad(one.left, one.workers - (worker.model == name), one.left)
            for name, one in checkpoints.items()
            if one.batches
        }
        chosen = choose_checkpoint(worker.model, loads, arguments.loading)
        if chosen is None:
            continue
        checkpoint = checkpoints[chosen]
        if worker.model != chosen:
            if worker.model is not None:
                checkpoints[worker.model].workers -= 1
            checkpoint.workers += 1
            worker.model = chosen
            heapq.heappush(events, (now + arguments.loading, number))
            continue
        batch = checkpoint.batches.pop()
        checkpoint.left -= batch
        # The driver sends one batch at a time, and this one while the worker computes the one before
        driver = max(driver, now - batch) + arguments.driver
        # All checkpoints have one tokenizer, so that batches are planned once, at the beginning
        planned = arguments.planning * (len(seconds) - len(checkpoint.batches)) / len(seconds)
        end = max(now, driver, planned) + batch
        worker.busy += batch
        heapq.heappush(events, (end, number))
        if not checkpoint.batches:
            finisher = max(finisher, end) + arguments.finishing
    return finisher, sum(worker.busy for worker in workers) / (count * finisher)


if __name__ == "__main__":
    main()
