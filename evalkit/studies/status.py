"""State of a study's runs, from their folders and records. Neither torch nor transformers is imported.

In: a `Study`. Out: a `RunState` for each run, with the time left where it can be estimated: from the finished runs of
the same benchmark, in proportion to the models' parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from evalkit.benchmarks.base import Plan
from evalkit.benchmarks.outcomes import Metric, headline_entries
from evalkit.benchmarks.registry import results_of
from evalkit.cache import NotStored, only_stored, remembering
from evalkit.display import Say, clock
from evalkit.errors import EvalkitError, RunError
from evalkit.escape import counted
from evalkit.models.zoo.shapes import parameter_count
from evalkit.reporting.decimals import percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.folder import JOURNAL
from evalkit.runs.journal import seconds_in
from evalkit.runs.writing import is_locked, read_owner
from evalkit.studies.running import GONE, plan_of
from evalkit.studies.study import Study, StudyRun, finished_in, record_of

State = Literal["finished", "running", "interrupted", "missing", "failed", "not planned"]
_ALMOST = 0.999
"""Finished share of a run that has all batches, but no results."""


@dataclass(frozen=True)
class RunState:
    """State of a study's run."""

    run: StudyRun
    id: str = ""
    folder: Path | None = None
    state: State = "missing"
    share: float | None = None
    host: str = ""
    process: int | None = None
    seconds: float | None = None
    seconds_left: float | None = None
    headline: Metric | None = None
    result: str = ""
    reason: str = ""
    """Why it failed, or cannot be planned."""
    parameters: int | None = None


def share_of(plan: Plan) -> float:
    """Return the finished share of a planned run; 1 only with its results, and a damaged folder counts as not begun."""
    with suppress(EvalkitError):
        if finished_in(plan.folder, plan.manifest["id"]) is not None:
            return 1.0
        owner = read_owner(plan.folder) if (plan.folder / JOURNAL).is_file() else None
        return min(owner.done, _ALMOST) if owner else 0.0
    return 0.0


def states_of(study: Study, say: Say) -> list[RunState]:
    """Return the state of each run, in order."""
    with remembering():
        states = [_state(study, run, say) for run in study.runs]
    rates: dict[str, list[float]] = {}
    """Benchmark → seconds for a parameter, of each finished run."""
    for state in states:
        if state.seconds and state.parameters:
            rates.setdefault(state.run.benchmark.name, []).append(state.seconds / state.parameters)
    return [_estimated(state, rates.get(state.run.benchmark.name, ())) for state in states]


def _estimated(state: RunState, rates: Sequence[float]) -> RunState:
    """Estimate the time left of a run that does not estimate it itself."""
    is_known = state.state in ("finished", "not planned") or state.seconds_left is not None
    if is_known or not rates or not state.parameters:
        return state
    return replace(state, seconds_left=median(rates) * state.parameters * (1 - (state.share or 0.0)))


def _state(study: Study, run: StudyRun, say: Say) -> RunState:
    if (record := record_of(study.output, run)) is None:
        try:
            with only_stored():
                plan = plan_of(study, run, say)
        except NotStored:  # the texts of its documents, which take long to make
            return RunState(run)
        except EvalkitError as error:
            return RunState(run, state="not planned", reason=GONE if run.checkpoint.is_gone else str(error))
        count = parameter_count(plan.checkpoint)
        return _in_folder(plan.folder, RunState(run, plan.manifest["id"], plan.folder, parameters=count))
    folder = study.output / record.folder
    known = RunState(run, record.id, folder, reason=record.error, parameters=record.parameters)
    state = _in_folder(folder, known)
    is_lost = run.checkpoint.is_gone and state.state in ("interrupted", "missing")
    return replace(state, state="not planned", reason=GONE) if is_lost else state


def _in_folder(folder: Path, known: RunState) -> RunState:
    try:
        owner = read_owner(folder)
        if owner and is_locked(folder):
            return replace(known, state="running", share=owner.done, seconds_left=owner.seconds_left, host=owner.host,
                           process=owner.process, reason="")  # fmt: skip
        if (run := finished_in(folder, known.id)) is not None:
            headline, result = results_of(run).headline(run.other_rule(known.run.benchmark.rule))
            try:
                seconds: float | None = sum(run.seconds.values())
            except RunError:
                seconds = seconds_in(run.folder / JOURNAL) or None
            # The record's first: counted in the same way for runs that are not finished
            count = known.parameters or (run.manifest.get("loaded") or {}).get("parameters")
            return replace(known, state="finished", share=1.0, seconds=seconds, parameters=count,
                           headline=headline, result=result, reason="")  # fmt: skip
    except EvalkitError as error:
        return replace(known, state="failed", reason=str(error))
    begun = (folder / JOURNAL).is_file()
    share = (owner.done if owner else None) if begun else 0.0
    return replace(known, state="failed" if known.reason else "interrupted" if begun else "missing", share=share)


_ESTIMATE = (
    "time left: a running run's own estimate; of others, the time of the finished runs of the same benchmark (the "
    "median), in proportion to the models' parameters, as if computed one after the other on the same hardware"
)


def status_report(study: Study, states: Sequence[RunState]) -> Report:
    """Return a report with a line for each of the states."""
    records = []
    for about in states:
        folder = None if about.folder is None else str(about.folder)
        fields = vars(about) | {"run": about.run.label, "folder": folder}
        headline = headline_entries(fields.pop("headline"))
        records.append(about.run.columns | fields | headline)
    table = simple_table("status", ("run", "state", "share", "left", "result"), list(map(_row, states)), texts=5)
    count = {state: sum(about.state == state for about in states) for state in get_args(State)}
    left = [about.seconds_left for about in states if about.state != "finished"]
    known = [seconds for seconds in left if seconds is not None]
    unknown = len(left) - len(known)
    totals = ", ".join(f"{number} {state}" for state, number in count.items() if number)
    verdict = f"{counted(len(states), 'run')}: {totals}"
    if known:
        without = f", without {counted(unknown, 'run')} of unknown time" if unknown else ""
        verdict += f"; about {clock(sum(known))} left{without}"
    content = {
        "study": str(study.path),
        "output": str(study.output),
        "totals": count,
        "seconds_left": sum(known) if known else None,
        "runs_of_unknown_time": unknown,
        "estimate": _ESTIMATE,
        "runs": records,
    }
    notes = (_ESTIMATE,) if known else ()
    return Report((table,), (verdict,), notes=notes, content=content, records=records)


def _row(state: RunState) -> list[str]:
    share = "" if state.share is None or state.state in ("finished", "missing") else f"{percent(state.share, 0)} %"
    left = "" if state.seconds_left is None else clock(state.seconds_left)
    where = f"process {state.process} on {state.host}" if state.state == "running" else ""
    return [state.run.label, state.state, share, left, state.result or state.reason or where]
