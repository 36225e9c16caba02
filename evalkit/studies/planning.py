"""Planning of a study: all of its runs before anything is computed. No torch.

In: a `Study`, or checkpoints and options. Out: the plan of each run, recorded; or one error with all problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.benchmarks.base import Plan
from evalkit.benchmarks.request import remembering
from evalkit.benchmarks.run import planned
from evalkit.display import Say, doing
from evalkit.errors import EvalkitError, SeveralErrors
from evalkit.escape import counted
from evalkit.models.loading.files import safetensors_header
from evalkit.models.zoo.shapes import parameter_count
from evalkit.runs.folder import Run
from evalkit.studies.study import Study, StudyRun, finished_run_of, record_of, save_record

GONE = "its checkpoint was deleted before this run was finished"


@dataclass(frozen=True)
class Job:
    """A run to be completed."""

    label: str
    """Its name in messages."""
    plan: Plan


@dataclass(frozen=True)
class PlannedRun:
    """A run of a study with its plan."""

    run: StudyRun
    plan: Plan


@dataclass(frozen=True)
class KeptRun:
    """A finished run whose checkpoint is gone: trainers delete earlier steps."""

    run: StudyRun
    finished: Run


@dataclass(frozen=True)
class StudyPlan:
    """The plans of a study's runs."""

    runs: tuple[PlannedRun, ...]
    kept: tuple[KeptRun, ...]
    """Finished runs that cannot be planned any more."""


def plan_study(study: Study, say: Say) -> StudyPlan:
    """Plan all runs of a study and record where each one is.

    Raises:
        SeveralErrors: checkpoints or options are invalid, or two entries are the same run; all problems.
        RunError: the records cannot be written.
    """
    found = plan_runs(study, say)
    for one in found.runs:
        known, identity = record_of(study.output, one.run), one.plan.manifest["id"]
        # Unless it is recorded: another process may write why it failed meanwhile
        if known is None or known.id != identity:
            count = parameter_count(one.plan.checkpoint)
            save_record(study.output, one.run, one.plan.folder, identity, parameters=count)
    return found


def plan_runs(study: Study, say: Say) -> StudyPlan:
    """Plan all runs of a study, without recording them. Raises as `plan_study`.

    Where a checkpoint is gone, its finished runs are kept; the others are left out if a pattern names it, and are
    problems if the user does.
    """
    found, kept, say = list[PlannedRun](), list[KeptRun](), _once(say)
    problems: dict[str, list[StudyRun]] = {}
    with remembering(), doing(f"planning {counted(len(study.runs), 'run')}"):
        for run in study.runs:
            try:
                found.append(PlannedRun(run, plan_of(study, run, say)))
            except EvalkitError as error:
                if (finished := _kept(study, run)) is not None:
                    kept.append(KeptRun(run, finished))
                    say(f"{run.label}: finished, and not checked again, since it cannot be planned ({error})")
                elif run.checkpoint.is_gone:
                    say(f"{run.label}: left out, since {GONE}")
                else:
                    problems.setdefault(str(error), []).append(run)
    lines = [f"{_whose(runs)}: {message}" for message, runs in problems.items()]
    first: dict[str, PlannedRun] = {}
    for one in found:
        if (other := first.setdefault(one.plan.manifest["id"], one)) is not one:
            lines.append(_same(other, one))
    _raise_any(lines, f"study {study.path} has ")
    return StudyPlan(tuple(found), tuple(kept))


def _kept(study: Study, run: StudyRun) -> Run | None:
    """Return the finished run of a checkpoint that is gone; None if it is there, and damaged."""
    with suppress(EvalkitError, OSError):
        return None if Path(run.checkpoint.model).expanduser().exists() else finished_run_of(study, run)
    return None


def plan_of(study: Study, run: StudyRun, say: Say) -> Plan:
    """Plan a run of a study; its weight files are complete. Raises as `benchmarks.run.planned`."""
    return _checked(planned(run.checkpoint.model, {**run.options, "output": study.output}, say))


def plan_checkpoints(models: Sequence[str], options: Mapping[str, Any], say: Say) -> list[Job]:
    """Plan the same benchmark for several checkpoints.

    Raises:
        SeveralErrors: checkpoints or options are invalid; all problems.
    """
    jobs, problems, say = list[Job](), dict[str, None](), _once(say)
    with remembering(), doing(f"planning {counted(len(models), 'run')}"):
        for model in models:
            try:
                jobs.append(Job(model, _checked(planned(model, options, say))))
            except EvalkitError as error:
                problems[str(error)] = None
    _raise_any(list(problems))
    return jobs


def _checked(plan: Plan) -> Plan:
    """Return a plan; raise if a weight file is shorter than its header says, before any other run is computed."""
    for path in plan.checkpoint.weights():
        if path.suffix == ".safetensors":
            safetensors_header(path)
    return plan


def _once(say: Say) -> Say:
    """Return a function that says each message once: the runs of a checkpoint have the same."""
    said: set[str] = set()

    def once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    return once


def _raise_any(problems: Sequence[str], where: str = "") -> None:
    if problems:
        raise SeveralErrors(f"{where}{counted(len(problems), 'problem')}; nothing was computed", problems)


def _whose(runs: Sequence[StudyRun]) -> str:
    """Name what runs with the same problem have in common."""
    checkpoints = {run.checkpoint.label for run in runs}
    benchmarks = {run.benchmark.name for run in runs}
    if len(checkpoints) == 1:
        return f"checkpoint {checkpoints.pop()}"
    return f"benchmark {benchmarks.pop()}" if len(benchmarks) == 1 else runs[0].label


def _same(one: PlannedRun, other: PlannedRun) -> str:
    why = "their checkpoints have the same content; remove one"
    if one.run.checkpoint is other.run.checkpoint:
        why = "they differ in nothing that is computed: every rule reads the same scores; remove one"
    return f"{one.run.label} and {other.run.label} are the same run ({one.plan.manifest['id']}); {why}"
