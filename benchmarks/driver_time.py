"""CPU time of a cluster's driver for each batch: of its loop, its planning and its writing thread.

    python benchmarks/driver_time.py --limit 300

Small checkpoints with a real tokenizer and one worker of Ray, which computes the batches of the first checkpoint and
returns the same rows at once for the others, so that the driver is what they wait for. Printed: milliseconds for a
batch, seconds to write a run's results, and the batches a second for which the three threads' one interpreter has time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driver_memory import write_checkpoint

from evalkit.display import Progress
from evalkit.requests.batches import Batch
from evalkit.studies.cluster.worker import Answer, BatchWorker, ComputedBatch


class ReplayingWorker(BatchWorker):
    """Keeps what it has computed, and returns it for the same batch of another checkpoint."""

    def compute(self, job: str, batch: Batch, split: bool) -> Answer:
        """See `BatchWorker`."""
        kept: dict[Any, Answer] = self.__dict__.setdefault("kept", {})
        if batch.key in kept:
            return kept[batch.key]
        answer = super().compute(job, batch, split)
        if isinstance(answer.content, ComputedBatch):
            kept[batch.key] = answer
        return answer


class Deliveries(Progress):
    """Keeps the time, and the CPU time of the driver's thread, at each delivery."""

    def __init__(self) -> None:
        super().__init__(live=False)
        self.moments: list[tuple[float, float]] = []

    def advance(self, work: float, documents: int) -> None:
        """Keep the time."""
        super().advance(work, documents)
        self.moments.append((time.perf_counter(), time.thread_time()))


def main() -> None:
    """Run the driver and print its CPU times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=300, help="Documents of each task.")
    parser.add_argument("--token-budget", type=int, default=2048, help="Tokens of a batch; 65536 on a GPU.")
    parser.add_argument("--checkpoints", type=int, default=4)
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), arguments)


def timed(spent: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that adds its CPU time in its own thread."""

    def measured(*arguments: Any, **options: Any) -> Any:
        started = time.thread_time()
        try:
            return function(*arguments, **options)
        finally:
            spent[name] += time.thread_time() - started

    return measured


def measure(root: Path, arguments: argparse.Namespace) -> None:
    """Run the jobs and print the times of those that are replayed."""
    from evalkit.benchmarks.run import planned
    from evalkit.benchmarks.session import OpenRun
    from evalkit.cache import remembering
    from evalkit.models.loading.spec import model_spec
    from evalkit.studies.cluster import jobs, workers
    from evalkit.studies.cluster.connection import connected
    from evalkit.studies.cluster.driver import Driver
    from evalkit.studies.cluster.resources import ClusterOptions
    from evalkit.studies.running import Job

    spent: dict[str, float] = defaultdict(float)
    setattr(jobs, "_next_step", timed(spent, "planning", jobs._next_step))  # noqa: B010
    for name in ("store", "finish"):
        setattr(OpenRun, name, timed(spent, name, getattr(OpenRun, name)))
    setattr(workers, "BatchWorker", ReplayingWorker)  # noqa: B010
    spec, progress = model_spec("demo"), Deliveries()
    tokenizer = spec.load(spec.locate(), print).tokenizer
    settings: dict[str, Any] = {"output": root / "runs", "device": "cpu", "dtype": "float32"}
    settings |= {"limit": arguments.limit, "token_budget": arguments.token_budget, "data_dir": arguments.data_dir}
    options = ClusterOptions(workers=1, worker_cpus=1, worker_gpus=0)
    count = arguments.checkpoints
    with remembering(), connected(None) as ray:
        planned_runs = []
        for number in range(count):
            write_checkpoint(root / f"model{number}", number, tokenizer)
            planned_runs.append(Job(f"run {number}", planned(root / f"model{number}", settings, lambda _: None)))
        pool = workers.WorkerPool(ray, options, "cpu", progress.say)
        outcomes = Driver(pool, jobs.JobQueue(planned_runs, progress)).run()
    assert {one.state for one in outcomes} == {"finished"}, [one.message for one in outcomes]
    batches = len(progress.moments) // count
    replayed = progress.moments[batches:]
    wall, loop = (1000 * (replayed[-1][n] - replayed[0][n]) / (len(replayed) - 1) for n in (0, 1))
    planning, writing = (
        1000 * time / (batches * count) for time in (spent["planning"] - spent["finish"], spent["store"])
    )
    print("\n| batches | documents of each | loop, ms | planning, ms | writing, ms | wall, ms | finish, s |")
    print("|---|---|---|---|---|---|---|")
    print(
        f"| {batches} | {8 * arguments.limit / batches:.0f} | {loop:.2f} | {planning:.2f} | {writing:.2f} "
        f"| {wall:.2f} | {spent['finish'] / count:.2f} |"
    )
    print(f"\nat most {1000 / (loop + planning + writing):.0f} batches a second")


if __name__ == "__main__":
    main()
