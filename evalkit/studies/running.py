"""Running jobs in this process, and the runs of a study: plan, compute what nobody else computes, record the outcomes.

In: planned runs, or a `Study` and a `JobRunner`: this process, or the workers of a cluster. Out: what became of each
run. Several processes may do this at once: each takes the runs that no other process holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from evalkit.benchmarks.registry import benchmark_of
from evalkit.benchmarks.request import remembering
from evalkit.benchmarks.session import LoadingKey, ModelHolder, finished, loading_key, run_plan
from evalkit.display import Progress
from evalkit.errors import EvalkitError, RunInUseError, first_line
from evalkit.escape import counted
from evalkit.models.loading.locate import silent
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.folder import load_run
from evalkit.runs.lock import is_locked, read_owner
from evalkit.studies.planning import Job, plan_study
from evalkit.studies.study import Study, StudyRun, record_of, save_record

_POLL = 5.0
"""Seconds between two looks at the runs of other processes."""


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


@dataclass(frozen=True)
class RunOutcome:
    """What became of a study's run."""

    state: Literal["finished", "failed", "in use"]
    folder: Path
    id: str
    rule: str | None
    """That its result is read under; None: the run's own."""
    message: str = ""
    """Why it failed, or who computes it; one line."""
    left_out: tuple[str, ...] = ()
    """Tasks that could not be run."""


def run_study(study: Study, progress: Progress, runner: JobRunner, wait: bool) -> list[tuple[StudyRun, RunOutcome]]:
    """Compute the runs of a study that no other process computes.

    Args:
        study: the study.
        progress: receives messages and progress.
        runner: computes the runs.
        wait: stay until no run is in use, and take over those whose process has ended.

    Returns:
        Each run with its outcome, in order.

    Raises:
        EvalkitError: the study cannot be planned, or nothing can be computed at all.
    """
    plan = plan_study(study, progress.say)
    jobs = [Job(one.run.label, one.plan) for one in plan.runs]
    run_of = {id(job): one.run for job, one in zip(jobs, plan.runs, strict=True)}
    recorded = {id(job): record_of(study.output, run_of[id(job)]) for job in jobs}

    def record(outcome: Outcome) -> None:
        plan = outcome.job.plan
        if outcome.state != "in use":
            save_record(study.output, run_of[id(outcome.job)], plan.folder, plan.manifest["id"], outcome.message)
        if outcome.state == "failed":
            progress.say(f"{outcome.job.label} failed: {outcome.message}")

    def failed_elsewhere(job: Job) -> str:
        """Return the error of another process that has tried a run since this one planned it."""
        found, before = record_of(study.output, run_of[id(job)]), recorded[id(job)]
        if found is None or found.id != job.plan.manifest["id"]:
            return ""
        return "" if before is not None and found.written == before.written else found.error

    outcomes = runner(jobs, progress, record) if jobs else []
    if wait:
        outcomes = _waited(outcomes, progress, runner, record, failed_elsewhere)
    of_run = {outcome.job.label: _of_study(outcome) for outcome in outcomes}
    for one in plan.kept:
        manifest, rule = one.finished.manifest, one.run.benchmark.rule
        left_out = tuple(manifest.get("left_out", ()))
        of_run[one.run.label] = RunOutcome("finished", one.finished.folder, manifest["id"], rule, left_out=left_out)
    return [(run, of_run[run.label]) for run in study.runs if run.label in of_run]


def _waited(
    outcomes: Sequence[Outcome],
    progress: Progress,
    runner: JobRunner,
    record: Callable[[Outcome], None],
    failed_elsewhere: Callable[[Job], str],
) -> list[Outcome]:
    """Return the outcomes once no run is in use; runs that another process has left unfinished are computed here.

    A run that has failed in another process meanwhile is not tried again: it would fail in every waiting process.
    """
    found = list(outcomes)
    announced: set[str] = set()
    while others := [place for place, outcome in enumerate(found) if outcome.state == "in use"]:
        free = []
        for place in others:
            job = found[place].job
            if is_locked(job.plan.folder):
                continue
            if error := failed_elsewhere(job):
                progress.say(f"{job.label} failed in another process: {error}")
                found[place] = Outcome(job, "failed", error)
            else:
                free.append(place)
        if free:
            again = runner([found[place].job for place in free], progress, record)
            for place, outcome in zip(free, again, strict=True):
                found[place] = outcome
        if left := {found[place].job.label for place in others if found[place].state == "in use"}:
            if labels := left - announced:
                announced |= labels
                progress.say(f"waiting for other processes: {', '.join(sorted(labels))}")
            time.sleep(_POLL)
    return found


def _of_study(outcome: Outcome) -> RunOutcome:
    """Return what became of a planned run; of one in use, with its process."""
    plan, message = outcome.job.plan, outcome.message
    if outcome.state == "in use" and (owner := read_owner(plan.folder)):
        message = str(owner)
    left_out = tuple(plan.manifest.get("left_out", ()))
    return RunOutcome(outcome.state, plan.folder, plan.manifest["id"], plan.manifest["rule"], message, left_out)


def outcomes_report(found: Sequence[tuple[StudyRun, RunOutcome]]) -> Report:
    """Return a report with a line for each run: its outcome, and its result or why it has none."""
    content = [_record(run, outcome) for run, outcome in found]
    rows = [[one["run"], one["state"], one["result"] or one["message"]] for one in content]
    table = simple_table("outcomes", ["run", "state", "result"], rows, texts=3)
    count = {state: sum(one["state"] == state for one in content) for state in ("finished", "failed", "in use")}
    parts = [f"{number} {state}" for state, number in count.items() if number]
    notes = [f"{one['run']}: left out: {one['left_out']}" for one in content if one["left_out"]]
    if count["failed"]:
        notes.append("the same command tries the failed runs again")
    if count["in use"]:
        notes.append("other processes compute the runs in use; --wait stays until they are finished")
    verdict = f"{counted(len(content), 'run')}: {', '.join(parts)}"
    return Report((table,), (verdict,), notes=tuple(notes), content=content, records=content)


def _record(run: StudyRun, outcome: RunOutcome) -> dict[str, Any]:
    score, result = None, ""
    if outcome.state == "finished":
        found = load_run(outcome.folder)
        score, result = benchmark_of(found).headline(found, found.other_rule(outcome.rule))
    return run.columns | {
        "id": outcome.id,
        "folder": str(outcome.folder),
        "state": outcome.state,
        "score": score,
        "result": result,
        "message": outcome.message,
        "left_out": "; ".join(outcome.left_out),
    }
