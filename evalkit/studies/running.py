"""Planning and running: jobs in this process, and the runs of a study, all planned before anything is computed.

In: checkpoints and options, or a `Study` and a `JobRunner`: this process, or the workers of a cluster. Out: what became
of each run, recorded; or one error with all problems. Several processes may run a study at once: each takes the runs
that no other process holds.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from evalkit.benchmarks.base import Plan
from evalkit.benchmarks.outcomes import headline_entries
from evalkit.benchmarks.registry import results_of
from evalkit.benchmarks.run import planned
from evalkit.benchmarks.session import ModelHolder, finished, loading_key, run_plan
from evalkit.cache import remembering
from evalkit.display import Progress, Say, doing
from evalkit.errors import EvalkitError, RunInUseError, SeveralErrors, UsageError, first_line
from evalkit.escape import counted
from evalkit.models.loading.files import safetensors_header
from evalkit.models.loading.locate import silent
from evalkit.models.variants.settings import VANILLA
from evalkit.models.zoo.named import models
from evalkit.models.zoo.shapes import parameter_count
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.folder import Run, load_run
from evalkit.runs.writing import is_locked, read_owner
from evalkit.studies.study import Study, StudyRun, finished_run_of, record_of, save_record

GONE = "its checkpoint was deleted before this run was finished"
_VARIABLE = re.compile(r"\$\{?(\w+)")
_POLL = 5.0
"""Seconds between two looks at the runs of other processes."""

State = Literal["finished", "failed", "in use"]
""""in use": another process computes it."""


@dataclass(frozen=True)
class Job:
    """A run to be completed."""

    label: str
    plan: Plan


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    job: Job
    state: State
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
        """Compute what is missing of each job and write its results; one outcome for each job, in their order.

        `done` is called with each outcome as soon as it is known. Raises `EvalkitError` if nothing can be computed.
        """


def run_here(
    jobs: Sequence[Job], progress: Progress, done: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Complete jobs in this process; see `JobRunner`.

    A job whose folder another process holds is left, and tried once more at the end.
    """
    outcomes: dict[int, Outcome] = {}
    holder = ModelHolder()
    keys = [loading_key(job.plan.request.model, job.plan.manifest["specification"]) for job in jobs]
    # Those with the same loaded model together
    places = sorted(range(len(jobs)), key=lambda number: keys.index(keys[number]))

    def complete(number: int) -> Outcome:
        job = jobs[number]
        try:
            if finished(job.plan, silent) is None:
                progress.say(f"{number + 1} of {len(jobs)}: {job.label}")
            run_plan(job.plan, progress, holder)
        except RunInUseError as error:
            return Outcome(job, "in use", str(error))
        except FAILURES as error:
            return Outcome(job, "failed", why_failed(error))
        return Outcome(job, "finished")

    with remembering():
        for number in places:
            outcomes[number] = complete(number)
            if outcomes[number].state != "in use":
                done(outcomes[number])
        for number in [number for number in places if outcomes[number].state == "in use"]:
            outcomes[number] = complete(number)
            done(outcomes[number])
    return [outcomes[number] for number in range(len(jobs))]


def plan_checkpoints(models: Sequence[str], options: Mapping[str, Any], say: Say) -> list[Job]:
    """Plan the same benchmark for several checkpoints; raise `SeveralErrors` with all problems."""
    jobs, problems, say = list[Job](), dict[str, None](), once(say)
    with remembering(), doing(f"planning {counted(len(models), 'run')}"):
        for model in models:
            try:
                jobs.append(Job(model, _checked(planned(model, options, say))))
            except EvalkitError as error:
                problems[str(error)] = None
    _raise_any(list(problems))
    return jobs


def plan_of(study: Study, run: StudyRun, say: Say) -> Plan:
    """Plan a run of a study; its weight files are complete. Raises as `benchmarks.run.planned`."""
    unset = _VARIABLE.search(run.checkpoint.model)
    if unset and not Path(run.checkpoint.model).exists():
        raise UsageError(f"environment variable {unset[1]} is not set; export it, or write the folder of checkpoints")
    return _checked(planned(run.checkpoint.model, {**run.options, "output": study.output}, say))


def _checked(plan: Plan) -> Plan:
    """Return a plan; raise if a weight file is shorter than its header says, before any other run is computed."""
    for path in plan.checkpoint.weights():
        if path.suffix == ".safetensors":
            safetensors_header(path)
    return plan


def plan_runs(study: Study, say: Say) -> list[tuple[StudyRun, Plan | Run]]:
    """Plan all runs of a study, without recording them.

    Returns:
        Each run with its plan. Where a checkpoint is gone, with the finished run: trainers delete earlier steps. A run
        without either is left out if a pattern names its checkpoint, and is a problem if the user does.

    Raises:
        SeveralErrors: checkpoints or options are invalid, or two entries are the same run; all problems.
    """
    plans, say = list[tuple[StudyRun, Plan | Run]](), once(say)
    problems: dict[str, str] = {}
    first: dict[str, StudyRun] = {}
    same: list[str] = []
    with remembering(), doing(f"planning {counted(len(study.runs), 'run')}"):
        for run in study.runs:
            try:
                plan = plan_of(study, run, say)
            except EvalkitError as error:
                if (kept := _kept(study, run)) is not None:
                    plans.append((run, kept))
                    say(f"{run.label}: finished, and not checked again, since it cannot be planned ({error})")
                elif run.checkpoint.is_gone:
                    say(f"{run.label}: left out, since {GONE}")
                else:
                    problems.setdefault(str(error), run.label)
                continue
            plans.append((run, plan))
            if warning := _other_attention(run, plan):
                say(warning)
            identity = plan.manifest["id"]
            if (other := first.setdefault(identity, run)) is not run:
                same.append(f"{other.label} and {run.label} are the same run ({identity}); remove one")
    lines = [f"{label}: {message}" for message, label in problems.items()]
    _raise_any(lines + same, f"study {study.path} has ")
    return plans


def _other_attention(run: StudyRun, plan: Plan) -> str:
    """Return a warning if a checkpoint has the name of one of evalkit's models, and another attention; else empty."""
    named = next((model for model in models() if model.name == run.checkpoint.name), None)
    if named is None or plan.checkpoint.gguf is not None:
        return ""
    expected, stored = named.shape.variant.name, plan.checkpoint.config().get("attention_variant", VANILLA)
    if stored == expected:
        return ""
    about = f"its name is that of a model with {expected} attention, and its config.json says {stored}"
    return f"warning: {run.checkpoint.label}: {about}; what patched code saves is converted by evalkit models convert"


def _kept(study: Study, run: StudyRun) -> Run | None:
    """Return the finished run of a checkpoint that is gone; None if it is there, and damaged."""
    with suppress(EvalkitError, OSError):
        return None if Path(run.checkpoint.model).expanduser().exists() else finished_run_of(study, run)
    return None


def once(say: Say) -> Say:
    """Return a function that says each message once: the runs of a checkpoint have the same."""
    said: set[str] = set()

    def say_once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    return say_once


def _raise_any(problems: Sequence[str], where: str = "") -> None:
    if problems:
        raise SeveralErrors(f"{where}{counted(len(problems), 'problem')}; nothing was computed", problems)


@dataclass(frozen=True)
class RunOutcome:
    run: StudyRun
    plan: Plan | Run
    state: State
    message: str = ""
    """Why it failed, or who computes it; one line."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return the tasks that could not be run."""
        return tuple(self.plan.manifest.get("left_out", ()))


def run_study(study: Study, progress: Progress, runner: JobRunner, wait: bool) -> list[RunOutcome]:
    """Compute the runs of a study that no other process computes; return the outcome of each, in order.

    `wait`: stay until no run is in use, and take over those whose process has ended.

    Raises:
        EvalkitError: the study cannot be planned or recorded, or nothing can be computed at all.
    """
    plans = plan_runs(study, progress.say)
    jobs, say_once = list[Job](), once(progress.say)
    runs: dict[str, StudyRun] = {}
    """By their ids, as what follows."""
    written: dict[str, str] = {}
    """When the record that is known of a run was written."""
    outcomes: dict[str, Outcome] = {}
    for run, plan in plans:
        if isinstance(plan, Run):
            continue
        known, identity = record_of(study.output, run), plan.manifest["id"]
        # Unless it is recorded: another process may write why it failed meanwhile
        if known is None or known.id != identity:
            save_record(study.output, run, plan.folder, identity, parameters=parameter_count(plan.checkpoint))
            known = record_of(study.output, run)
        runs[identity], written[identity] = run, known.written if known else ""
        jobs.append(Job(run.label, plan))

    def record(outcome: Outcome) -> None:
        plan = outcome.job.plan
        if outcome.state != "in use":
            identity = plan.manifest["id"]
            save_record(study.output, runs[identity], plan.folder, identity, outcome.message)
        if outcome.state == "failed":
            progress.say(f"{outcome.job.label} failed: {outcome.message}")

    def complete(jobs: Sequence[Job]) -> list[Job]:
        """Compute what is free; return the jobs that are in use."""
        for outcome in runner(jobs, progress, record) if jobs else ():
            outcomes[outcome.job.plan.manifest["id"]] = outcome
        return [job for job in jobs if outcomes[job.plan.manifest["id"]].state == "in use"]

    waiting = complete(jobs)
    while wait and waiting:
        held, free = list[Job](), list[Job]()
        for job in waiting:
            identity = job.plan.manifest["id"]
            now = record_of(study.output, runs[identity])
            if is_locked(job.plan.folder):
                held.append(job)
            elif now and now.id == identity and now.error and now.written != written[identity]:
                # It would fail in every waiting process
                progress.say(f"{job.label} failed in another process: {now.error}")
                outcomes[identity] = Outcome(job, "failed", now.error)
            else:
                free.append(job)
        if waiting := held + complete(free):
            say_once(f"waiting for other processes: {', '.join(sorted({job.label for job in waiting}))}")
            time.sleep(_POLL)
    results = []
    for run, plan in plans:
        outcome = outcomes.get(plan.manifest["id"])
        if isinstance(plan, Run) or outcome is None:
            results.append(RunOutcome(run, plan, "finished"))
            continue
        owner = read_owner(plan.folder) if outcome.state == "in use" else None
        results.append(RunOutcome(run, plan, outcome.state, str(owner) if owner else outcome.message))
    return results


def outcomes_report(outcomes: Sequence[RunOutcome]) -> Report:
    """Return a report with a line for each run: its outcome, and its result or why it has none."""
    content = []
    for outcome in outcomes:
        plan, headline, result = outcome.plan, None, ""
        if outcome.state == "finished":
            rule = outcome.run.benchmark.rule if isinstance(plan, Run) else plan.manifest["rule"]
            run = load_run(plan.folder)
            headline, result = results_of(run).headline(run.other_rule(rule))
        content.append(
            outcome.run.columns
            | {
                "id": plan.manifest["id"],
                "folder": str(plan.folder),
                "state": outcome.state,
                **headline_entries(headline),
                "result": result,
                "message": outcome.message,
                "left_out": "; ".join(outcome.left_out),
            }
        )
    rows = [[record["run"], record["state"], record["result"] or record["message"]] for record in content]
    table = simple_table("outcomes", ["run", "state", "result"], rows, texts=3)
    count = Counter(outcome.state for outcome in outcomes)
    parts = [f"{count[state]} {state}" for state in get_args(State) if count[state]]
    notes = [f"{record['run']}: left out: {record['left_out']}" for record in content if record["left_out"]]
    if count["failed"]:
        notes.append("the same command tries the failed runs again")
    if count["in use"]:
        notes.append("other processes compute the runs in use; --wait stays until they are finished")
    verdict = f"{counted(len(content), 'run')}: {', '.join(parts)}"
    return Report((table,), (verdict,), notes=tuple(notes), content=content, records=content)
