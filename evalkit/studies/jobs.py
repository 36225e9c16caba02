"""Jobs and their outcomes. In: planned runs. Out: what became of each. Engines differ in who computes the batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from evalkit.benchmarks.base import Plan
from evalkit.benchmarks.remembered import remembering
from evalkit.benchmarks.session import LoadingKey, ModelHolder, finished, loading_key, run_plan
from evalkit.display import Progress
from evalkit.errors import EvalkitError, RunInUseError, first_line
from evalkit.models.locate import silent


@dataclass(frozen=True)
class Job:
    """A run to be completed."""

    label: str
    """Its name in messages."""
    plan: Plan


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    job: Job
    state: Literal["finished", "failed", "in use"]
    """"in use": another process computes it."""
    message: str = ""
    """Why it failed, or who computes it; one line."""


FAILURES = (EvalkitError, MemoryError, OSError)
"""Errors of one job, after which the others go on."""


def why_failed(error: BaseException) -> str:
    """Return an error of a job as a line for the user."""
    if isinstance(error, MemoryError):
        return "out of memory; close other programs, or give a smaller --token-budget"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, FAILURES):
        return str(error)
    return f"unexpected {type(error).__name__}: {first_line(error)}"


class JobRunner(Protocol):
    """Completes jobs; the others go on where one fails."""

    def __call__(
        self, jobs: Sequence[Job], progress: Progress, done: Callable[[Outcome], None] = lambda _: None
    ) -> list[Outcome]:
        """Compute what is missing of each job and write its results.

        Args:
            jobs: the runs, in order of preference; one or more.
            progress: receives messages and progress.
            done: called with each outcome as soon as it is known.

        Returns:
            One outcome for each job, in their order.

        Raises:
            EvalkitError: nothing can be computed at all.
        """


def run_here(
    jobs: Sequence[Job], progress: Progress, done: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Complete jobs in this process; see `JobRunner`.

    A job whose folder another process holds is left, and tried once more at the end.
    """
    outcomes: dict[int, Outcome] = {}
    holder = ModelHolder()
    # Those with the same loaded model together
    groups: dict[LoadingKey, list[int]] = {}
    for place, job in enumerate(jobs):
        groups.setdefault(loading_key(job.plan.request.model, job.plan.manifest["specification"]), []).append(place)
    with remembering():
        for places in groups.values():
            for place in places:
                outcome = outcomes[place] = _outcome(jobs[place], f"{place + 1} of {len(jobs)}", progress, holder)
                if outcome.state != "in use":
                    done(outcome)
        for place in [place for place, outcome in outcomes.items() if outcome.state == "in use"]:
            outcomes[place] = _outcome(jobs[place], f"{place + 1} of {len(jobs)}", progress, holder)
            done(outcomes[place])
    return [outcomes[place] for place in range(len(jobs))]


def _outcome(job: Job, number: str, progress: Progress, holder: ModelHolder) -> Outcome:
    try:
        if finished(job.plan, silent) is None:
            progress.say(f"{number}: {job.label}")
        run_plan(job.plan, progress, holder)
    except RunInUseError as error:
        return Outcome(job, "in use", str(error))
    except FAILURES as error:
        return Outcome(job, "failed", why_failed(error))
    return Outcome(job, "finished")
