"""Running a study: plan, compute what nobody else computes, record what became of each run.

In: a `Study` and a `JobRunner`. Out: the outcome of each run. Several processes may do this at once: each takes the
runs that no other process holds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evalkit.benchmarks.registry import benchmark_of
from evalkit.brief import counted
from evalkit.engines.base import JobRunner, Outcome
from evalkit.progress import Progress
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.folder import load_run
from evalkit.runs.lock import is_locked, read_owner
from evalkit.studies.planning import PlannedRun, plan_study
from evalkit.studies.records import save_record
from evalkit.studies.study_file import Study, StudyRun

_POLL = 5.0
"""Seconds between two looks at the runs of other processes."""


def run_study(study: Study, progress: Progress, runner: JobRunner, wait: bool) -> list[tuple[StudyRun, Outcome]]:
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
    planned = plan_study(study, progress.say)
    jobs = [one.job for one in planned]
    run_of = {id(job): one for job, one in zip(jobs, planned, strict=True)}

    def record(outcome: Outcome) -> None:
        one = run_of[id(outcome.job)]
        if outcome.state != "in use":
            save_record(study.output, one.run, one.plan.folder, one.plan.manifest["id"], outcome.message)
        if outcome.state == "failed":
            progress.say(f"{outcome.job.label} failed: {outcome.message}")

    outcomes = runner(jobs, progress, record)
    if wait:
        outcomes = _waited(outcomes, progress, runner, record)
    return [(one.run, _named_owner(one, outcome)) for one, outcome in zip(planned, outcomes, strict=True)]


def _waited(outcomes: Sequence[Outcome], progress: Progress, runner: JobRunner, record: Any) -> list[Outcome]:
    """Return the outcomes once no run is in use; runs that another process has left are computed here."""
    found = list(outcomes)
    waiting: set[str] = set()
    while others := [place for place, outcome in enumerate(found) if outcome.state == "in use"]:
        free = [place for place in others if not is_locked(found[place].job.plan.folder)]
        for place, outcome in zip(free, runner([found[place].job for place in free], progress, record), strict=True):
            found[place] = outcome
        if labels := {found[place].job.label for place in others if found[place].state == "in use"} - waiting:
            waiting |= labels
            progress.say(f"waiting for other processes: {', '.join(sorted(labels))}")
        if len(free) < len(others):
            time.sleep(_POLL)
    return found


def _named_owner(one: PlannedRun, outcome: Outcome) -> Outcome:
    """Return the outcome; of a run in use, with its process."""
    owner = read_owner(one.plan.folder) if outcome.state == "in use" else None
    return replace(outcome, message=str(owner)) if owner else outcome


def outcomes_report(found: Sequence[tuple[StudyRun, Outcome]]) -> Report:
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


def _record(run: StudyRun, outcome: Outcome) -> dict[str, Any]:
    score, result = None, ""
    if outcome.state == "finished":
        finished = load_run(outcome.job.plan.folder)
        score, result = benchmark_of(finished).headline(finished)
    return {
        "run": run.label,
        "checkpoint": run.checkpoint.name,
        "seed": run.checkpoint.seed,
        "step": run.checkpoint.step,
        "benchmark": run.benchmark.name,
        "id": outcome.job.plan.manifest["id"],
        "folder": str(outcome.job.plan.folder),
        "state": outcome.state,
        "score": score,
        "result": result,
        "message": outcome.message,
        "left_out": "; ".join(outcome.job.plan.manifest.get("left_out", ())),
    }
