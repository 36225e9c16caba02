"""`--dry-run`: what runs will take, before anything is computed.

In: a `Study`, or the plans of a command. Out: a `Report` with documents, tokens, time, memory and disk: of a study by
benchmark and model size, of several checkpoints by checkpoint, of one run by task.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from evalkit.benchmarks.base import Plan
from evalkit.benchmarks.remembered import remembering
from evalkit.benchmarks.request import TaskTokens
from evalkit.display import Say, clock, doing, imports
from evalkit.errors import EvalkitError, UsageError
from evalkit.escape import counted
from evalkit.models.shapes import parameter_count
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.batch_devices import hardware_of, places
from evalkit.runs.folder import Run, load_run
from evalkit.studies.costs import EFFICIENCY, SAMPLE, RunCost, Speed, cost_of, measured_speed
from evalkit.studies.planning import plan_runs
from evalkit.studies.status import RunProgress, progress_of, run_seconds
from evalkit.studies.study import Study

_HEADERS = (
    "benchmark",
    "parameters",
    "runs",
    "to do",
    "documents",
    "tokens",
    "distinct",
    "generated",
    "time",
    "memory",
    "disk",
)


@dataclass(frozen=True)
class _Estimate:
    """A run with its estimates."""

    name: str
    """Its benchmark in a study, else its checkpoint."""
    plan: Plan
    progress: RunProgress
    device: str
    """Where it is computed; empty: not on this machine, so that neither time nor memory is known."""
    cost: RunCost | None
    """None if the benchmark cannot estimate it."""
    seconds: float | None = None
    """Of the part that is left."""


def dry_run_report(study: Study, say: Say) -> Report:
    """Return the report.

    Raises:
        EvalkitError: the study cannot be planned.
    """
    planned = plan_runs(study, study.runs, say).runs
    found, factors, problems = _estimates([(one.run.benchmark.name, one.plan) for one in planned], say)
    groups: dict[tuple[str, int | None], list[_Estimate]] = {}
    for one in found:
        parameters = one.cost.parameters if one.cost else parameter_count(one.plan.checkpoint)
        groups.setdefault((one.name, parameters), []).append(one)
    records = [{"benchmark": name} | _record(members, parameters) for (name, parameters), members in groups.items()]
    about = {"study": str(study.path), "output": str(study.output)}
    notes = [*problems, *_notes(found, factors, "this study")]
    return _report("benchmark", records, _record(found), notes, about)


def plans_report(plans: Sequence[tuple[str, Plan]], say: Say) -> Report:
    """Return the report of a command's runs: of one run by task, of several by checkpoint.

    Args:
        plans: (name of the checkpoint, plan) of each run.
        say: called with messages for the user.
    """
    found, factors, problems = _estimates(plans, say)
    total, notes = _record(found), [*problems, *_notes(found, factors, "this command")]
    if len(found) > 1:
        return _report("checkpoint", [{"checkpoint": one.name} | _record([one]) for one in found], total, notes, {})
    [one] = found
    records = [_task_record(task) for task in (one.cost.tasks if one.cost else ())]
    about = {"run": str(one.plan.folder), "finished": one.progress.finished}
    total = {name: value for name, value in total.items() if name not in ("runs", "to_do")}
    return _report("task", records, total, notes, about)


def _report(
    what: str, records: list[dict[str, Any]], total: dict[str, Any], notes: list[str], about: dict[str, Any]
) -> Report:
    rows = [[record[what], *_row(record)] for record in (*records, {what: "total"} | total)]
    headers = [what, *_HEADERS[1:]]
    kept = [place for place in range(len(headers)) if any(row[place] for row in rows)]
    table = simple_table(
        "dry_run", [headers[p] for p in kept], [[row[p] for p in kept] for row in rows], ruled=(len(rows) - 1,)
    )
    content = about | {"notes": notes, "groups": records, "total": total}
    return Report((table,), (_summary(total | about),), notes=tuple(notes), records=records, content=content)


def _estimates(
    plans: Sequence[tuple[str, Plan]], say: Say
) -> tuple[list[_Estimate], dict[str, tuple[float, int]], list[str]]:
    """Return the estimates, the factors of measured times, and a message for each benchmark without estimates."""
    with remembering(), doing("tokenising samples", slow=imports("transformers")):
        found, problems = _costs(plans, say)
    with doing("timing a matrix product"):
        speeds = {
            key: measured_speed(*key)
            for key in {(one.device, one.cost.dtype) for one in found if one.cost and one.device}
        }
    factors = _factors(found, speeds)
    return [_with_seconds(one, speeds, factors) for one in found], factors, problems


def _costs(plans: Sequence[tuple[str, Plan]], say: Say) -> tuple[list[_Estimate], list[str]]:
    """Return the estimates without times, and a message for each benchmark that has none."""
    from evalkit.models.parts import resolve_device

    found, problems = [], dict[str, None]()
    for name, plan in plans:
        device, cost = "", None
        try:
            device = resolve_device(plan.request.model.device)
        except UsageError as error:
            problems[f"time and memory are not estimated: {error}"] = None
        try:
            cost = cost_of(plan, device, say)
        except EvalkitError as error:
            problems[f"{name}: {error}; not in the totals"] = None
        found.append(_Estimate(name, plan, progress_of(plan), device, cost))
    return found, list(problems)


def _factors(found: Sequence[_Estimate], speeds: Mapping[tuple[str, str], Speed]) -> dict[str, tuple[float, int]]:
    """Return benchmark → (measured time over estimated time, finished runs on the same hardware), "" for all."""
    ratios: dict[str, list[float]] = {}
    for one in found:
        if not one.progress.finished or one.cost is None or not one.device:
            continue
        run = load_run(one.plan.folder)
        expected, taken = one.cost.seconds(speeds[one.device, one.cost.dtype]), run_seconds(run)
        if expected and taken and _same_hardware(run, one.device):
            for name in (one.name, ""):
                ratios.setdefault(name, []).append(taken / expected)
    return {name: (median(values), len(values)) for name, values in ratios.items()}


def _same_hardware(run: Run, device: str) -> bool:
    """Return whether all batches of a run were computed on hardware like this device."""
    import torch

    known = places(run.manifest)
    kind = device.partition(":")[0]
    if kind == "cuda":
        return bool(known) and all(place.kind == (kind, hardware_of(device)) for place in known)
    here = (kind, platform.node(), torch.get_num_threads())
    return bool(known) and all((place.kind[0], place.host, place.threads) == here for place in known)


def _with_seconds(
    one: _Estimate, speeds: Mapping[tuple[str, str], Speed], factors: Mapping[str, tuple[float, int]]
) -> _Estimate:
    if one.progress.finished:
        return replace(one, seconds=0.0)
    if one.cost is None or not one.device or (expected := one.cost.seconds(speeds[one.device, one.cost.dtype])) is None:
        return one
    factor, _ = factors.get(one.name) or factors.get("") or (1.0, 0)
    left = expected * factor * (1 - one.progress.share)
    return replace(one, seconds=left)


def _record(members: Sequence[_Estimate], parameters: int | None = None) -> dict[str, Any]:
    costs = [one.cost for one in members if one.cost]
    memory = [one.cost.memory for one in members if one.cost and one.device and one.cost.memory is not None]
    seconds = [one.seconds for one in members if one.seconds is not None]
    return {
        "parameters": parameters,
        "runs": len(members),
        "to_do": sum(not one.progress.finished for one in members),
        "documents": sum(cost.documents for cost in costs),
        "tokens": round(sum(cost.alone for cost in costs)),
        "distinct_tokens": round(sum(cost.distinct for cost in costs)),
        "generated_tokens": round(sum(cost.generated for cost in costs)),
        "seconds": sum(seconds) if seconds else None,
        "memory_bytes": max(memory, default=None),
        "disk_bytes": round(sum(cost.disk for cost in costs)),
    }


def _task_record(task: TaskTokens) -> dict[str, Any]:
    return {
        "task": task.task,
        "documents": task.documents,
        "tokens": round(task.alone),
        "distinct_tokens": round(task.distinct),
        "generated_tokens": round(task.generated),
    }


def _row(record: Mapping[str, Any]) -> list[str]:
    known = record["documents"] > 0

    def shown(key: str, form: Callable[[Any], str] = _short, unknown: str = "–") -> str:
        """Format a value; nothing where the record has none of this kind."""
        return "" if key not in record else unknown if record[key] is None else form(record[key])

    def of_documents(key: str, form: Callable[[Any], str] = _short) -> str:
        return shown(key, form) if known else "–"

    return [
        shown("parameters", unknown=""),
        shown("runs", "{:,}".format),
        shown("to_do", "{:,}".format),
        of_documents("documents", "{:,}".format),
        of_documents("tokens"),
        of_documents("distinct_tokens"),
        f"≤ {_short(record['generated_tokens'])}" if record["generated_tokens"] else "",
        shown("seconds", clock),
        shown("memory_bytes", lambda size: f"{_short(size)}B"),
        of_documents("disk_bytes", lambda size: f"{_short(size)}B"),
    ]


def _summary(total: Mapping[str, Any]) -> str:
    """Return the totals in a line; `total` also says which run it is of, if it is of one."""
    if total.get("finished"):
        return f"finished: {total['run']}"
    if "runs" not in total:
        left = "" if total["seconds"] is None else f", about {clock(total['seconds'])} of computing left"
        return f"{counted(total['documents'], 'document')}{left}"
    time = "" if total["seconds"] is None else f", about {clock(total['seconds'])} of computing, one after the other"
    return f"{counted(total['runs'], 'run')}, {total['to_do']:,} of them not finished{time}"


def _notes(found: Sequence[_Estimate], factors: Mapping[str, tuple[float, int]], where: str) -> list[str]:
    devices = ", ".join(dict.fromkeys(one.device for one in found if one.device))
    basis = f"a matrix product timed now on {devices}, of whose speed scoring is assumed to reach {EFFICIENCY:.0%}"
    if "" in factors:
        basis = (
            f"{counted(factors[''][1], 'finished run')} of {where} on the same hardware, scaled by operations; for "
            "benchmarks without one, all of them"
        )
    tokens = f"tokens: of at most {SAMPLE} documents of each task, scaled up; distinct: shared prefixes counted once"
    if not devices:
        return [tokens, "disk: journals and tables"]
    return [
        tokens,
        f"time: from {basis}; without loading and preparing models; answers may end before their longest length",
        "memory: weights and one batch of one run; disk: journals and tables",
    ]


def _short(value: float) -> str:
    """Format a number with three digits and a unit."""
    for unit in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g}{unit and ' ' + unit}" if value >= 1 or not value else "1"
        value /= 1000
    return f"{value:,.0f} P"
