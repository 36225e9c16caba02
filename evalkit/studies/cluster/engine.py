"""Jobs on a Ray cluster. In: jobs and options. Out: their outcomes; see `JobRunner`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evalkit.benchmarks.remembered import remembering
from evalkit.benchmarks.session import finished
from evalkit.display import Progress
from evalkit.errors import UsageError
from evalkit.escape import counted
from evalkit.studies.cluster.driver import Driver
from evalkit.studies.cluster.job_queue import JobQueue
from evalkit.studies.cluster.ray_cluster import ClusterOptions, connected
from evalkit.studies.cluster.worker_pool import WorkerPool
from evalkit.studies.engines import Job, Outcome, why_failed


@dataclass(frozen=True)
class ClusterRunner:
    """A `JobRunner` on the workers of a cluster."""

    options: ClusterOptions

    def __call__(
        self, jobs: Sequence[Job], progress: Progress, done: Callable[[Outcome], None] = lambda _: None
    ) -> list[Outcome]:
        """See `JobRunner`. Finished runs need no cluster."""
        outcomes: dict[int, Outcome] = {}
        for place, job in enumerate(jobs):
            if (outcome := _finished(job, progress)) is not None:
                outcomes[place] = outcome
                done(outcome)
        left = [place for place in range(len(jobs)) if place not in outcomes]
        if left:
            outcomes |= zip(left, self._computed([jobs[place] for place in left], progress, done), strict=True)
        return [outcomes[place] for place in range(len(jobs))]

    def _computed(self, jobs: list[Job], progress: Progress, done: Callable[[Outcome], None]) -> list[Outcome]:
        options = self.options
        devices = {job.plan.request.model.device for job in jobs}
        if numbered := [device for device in devices if ":" in device]:
            raise UsageError(
                f"--device {numbered[0]}: workers are given their GPUs; name none of them, only auto, cpu or cuda"
            )
        with remembering(), connected(options, "cpu" if devices == {"cpu"} else "auto") as cluster:
            if options.address and options.address.startswith("ray://"):
                progress.say(
                    "connected by Ray Client: if this connection breaks, the run ends (finished batches are saved); "
                    "submit the command as a Ray job, or run it on the head node (docs/scale.md)"
                )
            room = cluster.capacity()
            short = f", which is all that there is room for: the cluster has {cluster.describe()}"
            lacks = options.workers is not None and room < options.workers
            progress.say(f"{counted(room, 'worker')} of {cluster.needs}{' each' * (room != 1)}{short * lacks}")
            sizes = [size_of(job) for job in jobs]
            queue = JobQueue(jobs, sizes, progress, done, options.ship, bool(cluster.needs.gpus))
            return Driver(WorkerPool(cluster, progress.say), queue, progress).run()


def _finished(job: Job, progress: Progress) -> Outcome | None:
    """Return the outcome of a finished run, or of one that is damaged; None if it is to be computed."""
    try:
        return None if finished(job.plan, progress.say) is None else Outcome(job, "finished")
    except Exception as error:
        return Outcome(job, "failed", why_failed(error))


def size_of(job: Job) -> float:
    """Return the relative cost of a run among those of its benchmark: the bytes of its weights times its documents."""
    plan = job.plan
    try:
        size = sum(path.stat().st_size for path in plan.checkpoint.weights())
    except OSError:  # gone since it was planned, which opening the run reports
        size = 1
    specification = plan.manifest["specification"]
    limit = specification.get("sample", specification.get("limit"))
    counts = [one["count"] for one in plan.manifest["documents"].values()]
    return float(size * sum(count if limit is None else min(limit, count) for count in counts))
