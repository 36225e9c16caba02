"""Jobs in this process, one after the other.

In: jobs. Out: their outcomes. A checkpoint is loaded once for its jobs, and every table is that of a single run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evalkit.benchmarks.base import Plan
from evalkit.benchmarks.loading import LoadingKey, ModelHolder, loading_key
from evalkit.benchmarks.remembered import remembering
from evalkit.benchmarks.session import finished, run_plan
from evalkit.engines.base import FAILURES, Job, Outcome, why_failed
from evalkit.errors import RunInUseError
from evalkit.models.locate import silent
from evalkit.progress import Progress


def run_here(
    jobs: Sequence[Job], progress: Progress, done: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Complete jobs in this process; see `JobRunner`.

    A job whose folder another process holds is left, and tried once more at the end.
    """
    outcomes: dict[int, Outcome] = {}
    holder = ModelHolder()

    def complete(place: int) -> None:
        outcomes[place] = outcome = _outcome(jobs[place], f"{place + 1} of {len(jobs)}", progress, holder)
        if outcome.state != "in use":
            done(outcome)

    with remembering():
        for place in _by_model(jobs):
            complete(place)
        for place in [place for place, outcome in outcomes.items() if outcome.state == "in use"]:
            complete(place)
            if outcomes[place].state == "in use":
                done(outcomes[place])
    return [outcomes[place] for place in range(len(jobs))]


def _by_model(jobs: Sequence[Job]) -> list[int]:
    """Return the numbers of the jobs in order, those with the same loaded model together."""
    groups: dict[LoadingKey, list[int]] = {}
    for place, job in enumerate(jobs):
        groups.setdefault(_model_of(job.plan), []).append(place)
    return [place for group in groups.values() for place in group]


def _model_of(plan: Plan) -> LoadingKey:
    """Return what determines the loaded model."""
    return loading_key(plan.request.model, plan.manifest["specification"])


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
