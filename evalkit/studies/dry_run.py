"""`--dry-run`: what runs will take, before anything is computed. Only the tokenizer is loaded, not the model.

In: a `Study`, or the plans of a command, and a sample of their documents. Out: a `Report` with documents, tokens and
time: of a study by benchmark and model size, of several checkpoints by checkpoint, of one run by task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from evalkit.benchmarks.base import Plan
from evalkit.benchmarks.registry import benchmark
from evalkit.cache import remembered, remembering
from evalkit.display import Say, clock, doing, imports
from evalkit.errors import EvalkitError, SeveralErrors, UsageError
from evalkit.escape import counted
from evalkit.models.loading.configuration import remarks_of
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import tokenizer_alone
from evalkit.models.zoo.shapes import BYTES, parameter_count
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.requests.batches import TaskTokens
from evalkit.runs.folder import Run
from evalkit.studies.running import plan_runs
from evalkit.studies.status import share_of
from evalkit.studies.study import Study

_EFFICIENCY = 0.5
"""Share of the matrix product's speed that scoring is assumed to reach."""
_LONGEST = 0.3
"""Seconds of timing for each of the two products."""
_SAMPLE = 80
"""Documents of each task that are tokenised; a quarter of them where answers are generated."""


@dataclass(frozen=True)
class _Estimate:
    name: str
    """Its benchmark in a study, else its checkpoint."""
    plan: Plan
    parameters: int | None
    tasks: Sequence[TaskTokens]
    """Empty if the benchmark cannot estimate them."""
    share: float
    seconds: float | None
    """Of the part that is left; None: unknown."""


def dry_run_report(study: Study, say: Say) -> Report:
    """Return the report; raises as `plan_runs`, also for what only a run's documents or tokenizer show."""
    plans = [(run.benchmark.name, plan) for run, plan in plan_runs(study, say) if not isinstance(plan, Run)]
    estimates, notes = _estimates(plans, say)
    groups: dict[tuple[str, int | None], list[_Estimate]] = {}
    for estimate in estimates:
        groups.setdefault((estimate.name, estimate.parameters), []).append(estimate)
    records = [{"benchmark": name} | _record(members, count) for (name, count), members in groups.items()]
    where = {"study": str(study.path), "output": str(study.output)}
    return _report("benchmark", records, _record(estimates), notes, where)


def plans_report(plans: Sequence[tuple[str, Plan]], say: Say) -> Report:
    """Return the report of (name of the checkpoint, plan): of one run by task, of several by checkpoint.

    Raises an `EvalkitError` if a run would fail.
    """
    estimates, notes = _estimates(plans, say)
    total = _record(estimates)
    if len(estimates) > 1:
        records = [{"checkpoint": estimate.name} | _record([estimate]) for estimate in estimates]
        return _report("checkpoint", records, total, notes, {})
    [estimate] = estimates
    records = [{"task": task.task} | _tokens([task]) for task in estimate.tasks]
    total = {name: value for name, value in total.items() if name not in ("runs", "to_do")}
    about = {"run": str(estimate.plan.folder), "finished": estimate.share == 1}
    return _report("task", records, total, notes, about)


def _estimates(plans: Sequence[tuple[str, Plan]], say: Say) -> tuple[list[_Estimate], list[str]]:
    """Return the estimates, and notes: a message for each benchmark without estimates, and what the others rest on."""
    from evalkit.models.parts import resolve_device

    estimates, unknown, speeds = list[_Estimate](), dict[str, None](), dict[tuple[str, str], tuple[float, float]]()
    problems: dict[str, EvalkitError] = {}
    with remembering(), doing("tokenising samples", slow=imports("transformers")):
        for name, plan in plans:
            device, tasks = "", list[TaskTokens]()
            try:
                device = resolve_device(plan.request.model.device)
            except UsageError as error:
                unknown[f"time is not estimated: {error}"] = None
            try:
                remarks = remarks_of(plan.checkpoint)
                unknown.update(dict.fromkeys(f"{plan.checkpoint.given}: {remark}" for remark in remarks))
                tasks = _sampled_tokens(plan, say)
            except EvalkitError as error:
                problems[f"{plan.checkpoint.given}, {plan.manifest['kind']}: {error}"] = error
                continue
            if not tasks:
                unknown[f"{name}: its benchmark cannot estimate tokens; not in the totals"] = None
            share, parameters = share_of(plan), parameter_count(plan.checkpoint)
            seconds = 0.0 if share == 1 else None
            if tasks and device and parameters and share < 1:
                key = device, str(plan.manifest["specification"]["dtype"])
                operations, read = speeds[key] = speeds.get(key) or measured_speed(*key)
                # An addition and a multiplication for each distinct token and parameter
                products = 2 * parameters * sum(task.distinct for task in tasks) / (operations * _EFFICIENCY)
                # Each generated token reads all weights
                reading = parameters * BYTES[key[1]] * sum(task.generated for task in tasks) / read
                seconds = (1 - share) * (products + reading + sum(task.seconds for task in tasks))
            estimates.append(_Estimate(name, plan, parameters, tasks, share, seconds))
    if len(problems) == 1 == len(plans):
        raise next(iter(problems.values()))
    if problems:
        raise SeveralErrors(f"{counted(len(problems), 'run')} would fail", list(problems))
    notes = [f"tokens: of at most {_SAMPLE} documents of each task, scaled up; distinct: shared prefixes counted once"]
    if speeds:
        names = ", ".join(dict.fromkeys(device for device, _ in speeds))
        notes.append(
            f"time: from a matrix product timed now on {names}, of whose speed scoring is assumed to reach "
            f"{_EFFICIENCY:.0%}; without loading and preparing models; answers may end before their longest length"
        )
    return estimates, [*unknown, *notes]


def _sampled_tokens(plan: Plan, say: Say) -> list[TaskTokens]:
    checkpoint, digest = plan.checkpoint, plan.manifest["specification"]["checkpoint"]["tokenizer"]
    tokenizer = remembered("tokenizer", digest, lambda: tokenizer_alone(checkpoint, say))
    computation = benchmark(plan.manifest["kind"]).computation
    counts: list[TaskTokens] = computation.token_counts(plan, tokenizer, _SAMPLE, silent)
    return counts


def now(device: Any) -> float:
    """Return the time in seconds at which all work of a device is done, whichever device is the current one."""
    import torch

    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def measured_speed(device: str, dtype: str) -> tuple[float, float]:
    """Return the operations a second of a matrix product, and the bytes a second of a matrix-vector product."""
    import torch
    from torch.utils.benchmark import Timer

    # As large as a batch's, and timed in milliseconds, with what other processes take of the device
    size = 8192 if device.startswith("cuda") else 1024
    matrix = torch.ones(size, size, device=device, dtype=getattr(torch, dtype))
    # Larger than any cache, and at most 1 GiB beside the models
    large = torch.ones(8192 if device.startswith("cuda") else 32768, 4 * size, device=device, dtype=matrix.dtype)
    options: dict[str, Any] = {"timer": partial(now, device), "num_threads": torch.get_num_threads()}
    seconds, reading = (
        Timer("left @ right", globals={"left": left, "right": right}, **options)
        .blocked_autorange(min_run_time=_LONGEST)
        .mean
        for left, right in ((matrix, matrix), (large, large[0]))
    )
    return 2 * size**3 / seconds, large.numel() * large.element_size() / reading


def _record(members: Sequence[_Estimate], parameters: int | None = None) -> dict[str, Any]:
    seconds = [estimate.seconds for estimate in members if estimate.seconds is not None]
    return {
        "parameters": parameters,
        "runs": len(members),
        "to_do": sum(estimate.share < 1 for estimate in members),
        **_tokens([task for estimate in members for task in estimate.tasks]),
        "seconds": sum(seconds) if seconds else None,
    }


def _tokens(tasks: Sequence[TaskTokens]) -> dict[str, int]:
    return {
        "documents": sum(task.documents for task in tasks),
        "tokens": round(sum(task.alone for task in tasks)),
        "distinct_tokens": round(sum(task.distinct for task in tasks)),
        "generated_tokens": round(sum(task.generated for task in tasks)),
    }


def _short(value: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g}{unit and ' ' + unit}" if value >= 1 or not value else "1"
        value /= 1000
    return f"{value:,.0f} P"


_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "parameters": ("parameters", _short),
    "runs": ("runs", "{:,}".format),
    "to_do": ("to do", "{:,}".format),
    "documents": ("documents", "{:,}".format),
    "tokens": ("tokens", _short),
    "distinct_tokens": ("distinct", _short),
    "generated_tokens": ("generated", lambda count: f"≤ {_short(count)}" if count else ""),
    "seconds": ("time", clock),
}
"""Key of the records → heading and form of the values."""


def _shown(record: Mapping[str, Any], key: str) -> str:
    """Format a value of a record; nothing where the record has none of this kind, a dash where it is unknown."""
    if key not in record or (key == "parameters" and record[key] is None):
        return ""
    without_documents = key in ("documents", "tokens", "distinct_tokens") and not record["documents"]
    return "–" if record[key] is None or without_documents else _COLUMNS[key][1](record[key])


def _report(
    what: str, records: list[dict[str, Any]], total: dict[str, Any], notes: list[str], about: dict[str, Any]
) -> Report:
    lines = [*records, {what: "total"} | total]
    columns = [key for key in _COLUMNS if any(_shown(record, key) for record in lines)]
    rows = [[record[what], *(_shown(record, key) for key in columns)] for record in lines]
    table = simple_table("dry_run", [what, *(_COLUMNS[key][0] for key in columns)], rows, ruled=(len(rows) - 1,))
    left = "" if total["seconds"] is None else f", about {clock(total['seconds'])} of computing"
    if about.get("finished"):
        verdict = f"finished: {about['run']}"
    elif "runs" in total:
        left = f"{left}, one after the other" if left else ""
        verdict = f"{counted(total['runs'], 'run')}, {total['to_do']:,} of them not finished{left}"
    else:
        verdict = f"{counted(total['documents'], 'document')}{f'{left} left' if left else ''}"
    content = about | {"notes": notes, "groups": records, "total": total}
    return Report((table,), (verdict,), notes=tuple(notes), records=records, content=content)
