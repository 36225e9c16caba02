"""Jobs on a Ray cluster. In: jobs and options. Out: their outcomes; see `JobRunner`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evalkit.engines.base import Job, Outcome
from evalkit.engines.cluster.driver import Driver
from evalkit.engines.cluster.job_queue import JobQueue
from evalkit.engines.cluster.ray_cluster import ClusterOptions, connected
from evalkit.engines.cluster.worker_pool import WorkerPool
from evalkit.progress import Progress


@dataclass(frozen=True)
class ClusterRunner:
    """A `JobRunner` on the workers of a cluster."""

    options: ClusterOptions

    def __call__(
        self, jobs: Sequence[Job], progress: Progress, done: Callable[[Outcome], None] = lambda _: None
    ) -> list[Outcome]:
        """See `JobRunner`."""
        devices = {job.plan.request.model.device for job in jobs}
        with connected(self.options, "cpu" if devices == {"cpu"} else "auto") as cluster:
            if self.options.address and self.options.address.startswith("ray://"):
                progress.say(
                    "connected by Ray Client: if this connection breaks, the run ends (finished batches are saved); "
                    "submit the command as a Ray job, or run it on the head node (docs/scale.md)"
                )
            progress.say(f"{cluster.capacity()} workers of {cluster.needs} each")
            queue = JobQueue(jobs, [weight_of(job) for job in jobs], progress, done)
            return Driver(WorkerPool(cluster, progress.say), queue, progress, self.options.ship).run()


def weight_of(job: Job) -> float:
    """Return the relative cost of a run: the bytes of its weights times its documents."""
    plan = job.plan
    size = sum(path.stat().st_size for path in plan.checkpoint.weights())
    limit = plan.manifest["specification"].get("limit")
    counts = [one["count"] for one in plan.manifest["documents"].values()]
    return float(size * sum(count if limit is None else min(limit, count) for count in counts))
