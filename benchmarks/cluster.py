"""Cost of a cluster: the same run by a plain process, by one worker and by two, each of one thread.

    python benchmarks/cluster.py --limit 200 --dtype bfloat16

Times are from the start of the run's plan to its results, without the start of Ray: for the plain process all of
`run_plan`, for workers the driver's loop, in which workers start, load the checkpoint and compute. Also printed:
whether all tables are equal to the last bit. The driver's own time for a batch: `driver_time.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd


def main() -> None:
    """Measure each in its own process and print the table."""
    arguments = parse()
    if arguments.workers is not None:
        print(json.dumps(measure(arguments)))
        return
    found: dict[int, list[float]] = {0: [], 1: [], 2: []}
    tables: list[pd.DataFrame] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.turns):
            for workers in found:
                output = Path(folder) / f"{turn}-{workers}"
                command = [sys.executable, __file__, *sys.argv[1:], "--workers", str(workers), "--output", str(output)]
                done = subprocess.run(
                    command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
                )
                found[workers].append(json.loads(done.stdout.splitlines()[-1]))
                tables.append(pd.read_parquet(next(output.glob("*/scores.parquet"))))
    plain, one, two = map(min, found.values())
    print("| | seconds | ratio |\n|---|---|---|")
    print(f"| plain process, one thread | {plain:.1f} | 1.00 |")
    print(f"| one worker of one thread | {one:.1f} | {one / plain:.2f} |")
    print(f"| two workers of one thread | {two:.1f} | one worker's {one / two:.2f}× |")
    print(f"\ntables equal to the last bit: {all(table.equals(tables[0]) for table in tables)}")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu", help='"cuda": the workers share its GPUs')
    parser.add_argument("--tasks", nargs="*", default=(), help="tasks of zeroshot8; default: all")
    parser.add_argument("--template", default="inst")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--turns", type=int, default=1, help="Times that each is measured; the shortest counts.")
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> float:
    """Return the seconds of a run."""
    import torch

    from evalkit.benchmarks.run import planned
    from evalkit.benchmarks.session import run_plan
    from evalkit.display import Progress
    from evalkit.studies.running import Job

    options: dict[str, Any] = {
        "output": arguments.output,
        "device": arguments.device,
        "dtype": arguments.dtype,
        "limit": arguments.limit,
        "template": arguments.template,
        "data_dir": arguments.data_dir,
    }
    if arguments.tasks:
        options["tasks"] = list(arguments.tasks)
    progress = Progress(live=False)
    plan = planned(arguments.model, options, progress.say)
    if not arguments.workers:
        started = time.perf_counter()
        run_plan(plan, progress)
        return time.perf_counter() - started
    from evalkit.studies.cluster.connection import connected
    from evalkit.studies.cluster.driver import Driver
    from evalkit.studies.cluster.jobs import JobQueue
    from evalkit.studies.cluster.resources import ClusterOptions
    from evalkit.studies.cluster.workers import WorkerPool

    gpus = None if arguments.device == "cpu" else torch.cuda.device_count() / arguments.workers
    options_of_workers = ClusterOptions(workers=arguments.workers, worker_cpus=1, worker_gpus=gpus)
    with connected(None) as ray:
        pool = WorkerPool(ray, options_of_workers, arguments.device, progress.say)
        started = time.perf_counter()
        [outcome] = Driver(pool, JobQueue([Job("run", plan)], progress)).run()
        assert outcome.state == "finished", outcome.message
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
