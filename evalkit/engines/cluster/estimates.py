"""Estimated costs of jobs, and the time that is left for them.

In: jobs, with what has been measured of them. Out: weights in one unit for all benchmarks, and seconds of the workers.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from evalkit.benchmarks.base import Plan
from evalkit.engines.cluster.tracked_job import TrackedJob
from evalkit.models.locate import silent
from evalkit.studies.costs import cost_of
from evalkit.studies.speed import Speed

_SPEED = {"cpu": Speed(1e11, 1e10), "cuda": Speed(5e14, 2e12)}
"""Typical speed of a worker's device. Only the ratios of jobs are used, until batches are measured."""


@dataclass(frozen=True)
class TimeEstimate:
    """Work of all jobs in seconds of one worker, or in the unit of weights before a batch is measured."""

    done: float
    total: float
    seconds: float | None
    """Time that is left; None before a batch is measured."""


def cost_in_seconds(plan: Plan, device: Literal["cpu", "cuda"], tokenizer: Any) -> float | None:
    """Return the benchmark's own estimate of a whole run, with a worker's tokenizer; None if it has none."""
    try:
        # Without a device, since the driver does not import torch
        return cost_of(plan, None, silent, tokenizer).seconds(_SPEED[device])
    except Exception:  # the run itself reports what is wrong
        return None


def weigh(jobs: Sequence[TrackedJob]) -> None:
    """Set the weights of jobs to their costs; without one, to what jobs of the same benchmark cost for their size."""
    costed = [job for job in jobs if job.cost]
    ratios = _ratios((job.kind, job.cost or 0.0, job.size) for job in costed)
    for job in jobs:
        job.weight = job.cost or job.size * ratios.get(job.kind, ratios.get("", 1.0))


class Estimator:
    """Estimates the time left, and measures which share of the workers' time their batches are."""

    def __init__(self) -> None:
        self._looked: float | None = None
        """When the workers were counted last; seconds of a monotonic clock."""
        self._available = self._before = 0.0
        """Seconds of all workers since the first delivery, and seconds of the batches delivered until then."""
        self._loaded = 0.0
        """Seconds of loading until the first delivery."""

    def estimate(
        self, jobs: Sequence[TrackedJob], workers: int, held: Collection[str | None], loading: Sequence[float]
    ) -> TimeEstimate:
        """Estimate what is left: of a job by its own batches, else by those of its benchmark, else by all.

        Args:
            jobs: all jobs.
            workers: number of workers, which share the work; 0 counts as 1, since another one starts.
            held: checkpoints that workers have loaded or are loading.
            loading: seconds of each time that a worker has loaded one.
        """
        workers = max(workers, 1)
        measured = [job for job in jobs if job.measured_work]
        rates = _ratios(
            (job.kind, job.measured_seconds, job.weight * job.measured_work / job.total) for job in measured
        )
        done = left = 0.0
        for job in jobs:
            rate = rates.get(job.kind, rates.get("", 1.0))
            if job.measured_work:
                rate = job.measured_seconds * job.total / (job.measured_work * job.weight)
            share = 0.0 if job.phase == "ended" else job.left
            left += rate * share
            done += rate * (job.weight - share)
        if not measured:
            return TimeEstimate(done, done + left, None)
        waiting = {job.model for job in jobs if job.phase != "ended"}.difference(held)
        spent = sum(job.measured_seconds for job in measured)
        batches = sum(len(job.delivered) for job in measured)
        left_each = left / self._busy(workers, spent, batches, sum(loading)) + fmean(loading or [0.0]) * len(waiting)
        return TimeEstimate(done, done + left, left_each / workers)

    def _busy(self, workers: int, spent: float, batches: int, loaded: float) -> float:
        """Return the share of the workers' time, without loading, in which they compute batches."""
        now = time.monotonic()
        if self._looked is None:
            self._before, self._loaded = spent, loaded
        else:
            self._available += workers * (now - self._looked)
        self._looked = now
        # The first few batches say little: as if each worker had been busy with two
        known = 2 * workers * spent / batches
        available = max(self._available - (loaded - self._loaded), 0.0)
        return min(1.0, (spent - self._before + known) / max(available + known, 1e-9))


def _ratios(parts: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return the sum of the second over that of the third values by the first, and of all by ""."""
    sums: dict[str, tuple[float, float]] = {}
    for kind, above, below in parts:
        for name in (kind, ""):
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + above, before[1] + below
    return {name: above / below for name, (above, below) in sums.items() if below}
