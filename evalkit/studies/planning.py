"""Planning of a study: all of its runs before anything is computed. No torch.

In: a `Study`, or checkpoints and options. Out: the plan of each run, recorded; or one error with all problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.benchmarks.base import Plan
from evalkit.benchmarks.remembered import remembering
from evalkit.benchmarks.run import planned
from evalkit.display import Say, doing
from evalkit.errors import EvalkitError, SeveralErrors
from evalkit.escape import counted
from evalkit.models.files import safetensors_header
from evalkit.models.shapes import parameter_count
from evalkit.runs.folder import Run
from evalkit.studies.jobs import Job
from evalkit.studies.records import finished_run_of, record_of, save_record
from evalkit.studies.study import Study, StudyRun

GONE = "its checkpoint was deleted before this run was finished"


@dataclass(frozen=True)
class PlannedRun:
    """A run of a study with its plan."""

    run: StudyRun
    plan: Plan

    @property
    def job(self) -> Job:
        """Return it as a job."""
        return Job(self.run.label, self.plan)


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
    found = plan_runs(study, study.runs, say)
    for one in found.runs:
        record_plan(study, one)
    return found


def plan_runs(study: Study, runs: Sequence[StudyRun], say: Say) -> StudyPlan:
    """Plan some runs of a study, without recording them. Raises as `plan_study`.

    Where a checkpoint is gone, its finished runs are kept; the others are left out if a pattern names it, and are
    problems if the user does.
    """
    problems, say = _Problems(), _once(say)
    found, kept = list[PlannedRun](), list[KeptRun]()
    with remembering(), doing(f"planning {counted(len(runs), 'run')}"):
        for run in runs:
            try:
                found.append(PlannedRun(run, plan_of(study, run, say)))
            except EvalkitError as error:
                if (finished := _kept(study, run)) is not None:
                    kept.append(KeptRun(run, finished))
                    say(f"{run.label}: finished, and not checked again, since it cannot be planned ({error})")
                elif run.checkpoint.is_gone:
                    say(f"{run.label}: left out, since {GONE}")
                else:
                    problems.add(run, str(error))
    problems.raise_any(f"study {study.path}", _same_runs(found))
    return StudyPlan(tuple(found), tuple(kept))


def _kept(study: Study, run: StudyRun) -> Run | None:
    """Return the finished run of a checkpoint that is gone; None if it is there, and damaged."""
    with suppress(EvalkitError, OSError):
        return None if Path(run.checkpoint.model).expanduser().exists() else finished_run_of(study, run)
    return None


def plan_of(study: Study, run: StudyRun, say: Say) -> Plan:
    """Plan a run of a study; its weight files are complete. Raises as `benchmarks.run.planned`."""
    return _checked(planned(run.checkpoint.model, {**run.options, "output": study.output}, say))


def record_plan(study: Study, one: PlannedRun) -> None:
    """Record where a planned run is, unless it is recorded: another process may write why it failed meanwhile."""
    known, identity = record_of(study.output, one.run), one.plan.manifest["id"]
    if known is None or known.id != identity:
        parameters = parameter_count(one.plan.checkpoint)
        save_record(study.output, one.run, one.plan.folder, identity, parameters=parameters)


def plan_checkpoints(models: Sequence[str], options: Mapping[str, Any], say: Say) -> list[Job]:
    """Plan the same benchmark for several checkpoints.

    Raises:
        SeveralErrors: checkpoints or options are invalid; all problems.
    """
    jobs, problems, say = [], list[str](), _once(say)
    with remembering(), doing(f"planning {counted(len(models), 'run')}"):
        for model in models:
            try:
                jobs.append(Job(model, _checked(planned(model, options, say))))
            except EvalkitError as error:
                problems.append(str(error))
    if problems:
        raise SeveralErrors(f"{_counted(problems)}; nothing was computed", list(dict.fromkeys(problems)))
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


class _Problems:
    """Messages with the runs that have each."""

    def __init__(self) -> None:
        self._runs: dict[str, list[StudyRun]] = {}

    def add(self, run: StudyRun, message: str) -> None:
        self._runs.setdefault(message, []).append(run)

    def raise_any(self, where: str, others: Sequence[str]) -> None:
        """Raise an error with all problems, each once; `others` are further ones."""
        lines = [f"{_whose(runs)}: {message}" for message, runs in self._runs.items()] + list(others)
        if lines:
            raise SeveralErrors(f"{where} has {_counted(lines)}; nothing was computed", lines)


def _whose(runs: Sequence[StudyRun]) -> str:
    """Name what runs with the same problem have in common."""
    checkpoints = dict.fromkeys(run.checkpoint.label for run in runs)
    benchmarks = dict.fromkeys(run.benchmark.name for run in runs)
    if len(checkpoints) == 1:
        return f"checkpoint {next(iter(checkpoints))}"
    return f"benchmark {next(iter(benchmarks))}" if len(benchmarks) == 1 else runs[0].label


def _same_runs(found: Iterable[PlannedRun]) -> list[str]:
    """Return a problem for each run that is planned twice."""
    problems, first = [], dict[str, PlannedRun]()
    for one in found:
        identity = one.plan.manifest["id"]
        if (other := first.setdefault(identity, one)) is not one:
            problems.append(_described(other, one))
    return problems


def _described(one: PlannedRun, other: PlannedRun) -> str:
    identity = one.plan.manifest["id"]
    if one.run.checkpoint is other.run.checkpoint:
        why = "they differ in nothing that is computed: every rule reads the same scores; remove one"
    else:
        why = "their checkpoints have the same content; remove one"
    return f"{one.run.label} and {other.run.label} are the same run ({identity}); {why}"


def _counted(problems: Sequence[str]) -> str:
    return f"{len(problems)} problem{'s' * (len(problems) > 1)}"
