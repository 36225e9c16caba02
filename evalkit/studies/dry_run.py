"""`evalkit study run --dry-run`: what a study will take, before anything is computed.

In: a `Study`. Out: a `Report` with runs, documents, tokens, time, memory and disk, by benchmark and model size.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from evalkit.activity import doing, imports
from evalkit.benchmarks.base import Say
from evalkit.benchmarks.remembered import remembering
from evalkit.brief import counted
from evalkit.errors import EvalkitError, UsageError
from evalkit.progress import clock
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.batch_devices import hardware_of, places
from evalkit.runs.folder import Run, load_run
from evalkit.studies.costs import SAMPLE, RunCost, cost_of
from evalkit.studies.planning import PlannedRun, plan_runs
from evalkit.studies.speed import EFFICIENCY, Speed, measured_speed
from evalkit.studies.status import RunState, run_seconds, state_of_plan
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

    one: PlannedRun
    state: RunState
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
    with remembering(), doing("tokenising samples", slow=imports("transformers")):
        found, problems = _costs(planned, say)
    with doing("timing a matrix product"):
        speeds = {
            key: measured_speed(*key)
            for key in {(one.device, one.cost.dtype) for one in found if one.cost and one.device}
        }
    factors = _factors(found, speeds)
    found = [_with_seconds(one, speeds, factors) for one in found]
    groups: dict[tuple[str, int | None], list[_Estimate]] = {}
    for one in found:
        parameters = one.cost.parameters if one.cost else one.state.parameters
        groups.setdefault((one.one.run.benchmark.name, parameters), []).append(one)
    records = [_record(name, parameters, members) for (name, parameters), members in groups.items()]
    total = _record("total", None, found)
    rows = [_row(record) for record in (*records, total)]
    kept = [place for place in range(len(_HEADERS)) if any(row[place] for row in rows)]
    table = simple_table(
        "dry_run", [_HEADERS[p] for p in kept], [[row[p] for p in kept] for row in rows], ruled=(len(rows) - 1,)
    )
    notes = [*problems, *_notes(found, factors)]
    about = {"study": str(study.path), "output": str(study.output), "notes": notes}
    return Report((table,), (_summary(total),), notes=tuple(notes), records=records,
                  content=about | {"groups": records, "total": total})  # fmt: skip


def _costs(planned: Sequence[PlannedRun], say: Say) -> tuple[list[_Estimate], list[str]]:
    """Return the estimates without times, and a message for each benchmark that has none."""
    from evalkit.models.dispatch import resolve_device

    found, problems = [], dict[str, None]()
    for one in planned:
        device, cost = "", None
        try:
            device = resolve_device(one.plan.request.model.device)
        except UsageError as error:
            problems[f"time and memory are not estimated: {error}"] = None
        try:
            cost = cost_of(one.plan, device, say)
        except EvalkitError as error:
            problems[f"{one.run.benchmark.name}: {error}; not in the totals"] = None
        found.append(_Estimate(one, state_of_plan(one.run, one.plan), device, cost))
    return found, list(problems)


def _factors(found: Sequence[_Estimate], speeds: Mapping[tuple[str, str], Speed]) -> dict[str, tuple[float, int]]:
    """Return benchmark → (measured time over estimated time, finished runs on the same hardware), "" for all."""
    ratios: dict[str, list[float]] = {}
    for one in found:
        if one.state.state != "finished" or one.cost is None or not one.device:
            continue
        run = load_run(one.one.plan.folder)
        expected, taken = one.cost.seconds(speeds[one.device, one.cost.dtype]), run_seconds(run)
        if expected and taken and _same_hardware(run, one.device):
            for name in (one.one.run.benchmark.name, ""):
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
    if one.state.state == "finished":
        return _Estimate(one.one, one.state, one.device, one.cost, 0.0)
    if one.cost is None or not one.device or (expected := one.cost.seconds(speeds[one.device, one.cost.dtype])) is None:
        return one
    factor, _ = factors.get(one.one.run.benchmark.name) or factors.get("") or (1.0, 0)
    left = expected * factor * (1 - (one.state.share or 0.0))
    return _Estimate(one.one, one.state, one.device, one.cost, left)


def _record(name: str, parameters: int | None, members: Sequence[_Estimate]) -> dict[str, Any]:
    costs = [one.cost for one in members if one.cost]
    memory = [one.cost.memory for one in members if one.cost and one.device and one.cost.memory is not None]
    seconds = [one.seconds for one in members if one.seconds is not None]
    return {
        "benchmark": name,
        "parameters": parameters,
        "runs": len(members),
        "to_do": sum(one.state.state != "finished" for one in members),
        "documents": sum(cost.documents for cost in costs),
        "tokens": round(sum(cost.alone for cost in costs)),
        "distinct_tokens": round(sum(cost.distinct for cost in costs)),
        "generated_tokens": round(sum(cost.generated for cost in costs)),
        "seconds": sum(seconds) if seconds else None,
        "memory_bytes": max(memory, default=None),
        "disk_bytes": round(sum(cost.disk for cost in costs)),
    }


def _row(record: Mapping[str, Any]) -> list[str]:
    parameters, seconds, memory = record["parameters"], record["seconds"], record["memory_bytes"]
    generated = record["generated_tokens"]
    known = record["documents"] > 0
    return [
        record["benchmark"],
        "" if parameters is None else _short(parameters),
        f"{record['runs']:,}",
        f"{record['to_do']:,}",
        f"{record['documents']:,}" if known else "–",
        _short(record["tokens"]) if known else "–",
        _short(record["distinct_tokens"]) if known else "–",
        f"≤ {_short(generated)}" if generated else "",
        "–" if seconds is None else clock(seconds),
        "–" if memory is None else f"{_short(memory)}B",
        f"{_short(record['disk_bytes'])}B" if known else "–",
    ]


def _summary(total: Mapping[str, Any]) -> str:
    time = "" if total["seconds"] is None else f", about {clock(total['seconds'])} of computing, one after the other"
    return f"{counted(total['runs'], 'run')}, {total['to_do']:,} of them not finished{time}"


def _notes(found: Sequence[_Estimate], factors: Mapping[str, tuple[float, int]]) -> list[str]:
    devices = ", ".join(dict.fromkeys(one.device for one in found if one.device))
    basis = f"a matrix product timed now on {devices}, of whose speed scoring is assumed to reach {EFFICIENCY:.0%}"
    if "" in factors:
        basis = (
            f"{counted(factors[''][1], 'finished run')} of this study on the same hardware, scaled by operations; for "
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
