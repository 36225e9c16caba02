"""`--dry-run`: what runs will take, before anything is computed. Only the tokenizer is loaded, not the model.

In: a `Study`, or the plans of a command, and a sample of their documents. Out: a `Report` with documents, tokens, time
and memory: of a study by benchmark and model size, of several checkpoints by checkpoint, of one run by task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from evalkit.benchmarks.base import Plan
from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.request import TaskTokens, remembered, remembering
from evalkit.display import Say, clock, doing, imports
from evalkit.errors import EvalkitError, UsageError
from evalkit.escape import counted
from evalkit.models.locate import silent
from evalkit.models.shapes import (
    BYTES,
    ModelShape,
    cache_bytes_per_token,
    flops_per_token,
    parameter_count,
    parameters,
    read_shape,
)
from evalkit.models.spec import config_of, tokenizer_alone, window_of
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.batch_devices import place_of, places
from evalkit.runs.folder import load_run
from evalkit.studies.planning import plan_runs
from evalkit.studies.status import RunProgress, progress_of, run_seconds
from evalkit.studies.study import Study

_EFFICIENCY = 0.5
"""Share of the matrix product's speed that scoring is assumed to reach."""
_LONGEST = 0.3
"""Seconds of timing for each of the two products."""
_SAMPLE = 80
"""Documents of each task that are tokenised; a quarter of them where answers are generated."""


@dataclass(frozen=True)
class Speed:
    """Speed of a device in a dtype."""

    operations: float
    """Floating-point operations per second of a matrix product."""
    bytes: float
    """Bytes of weights read per second, by a matrix-vector product."""


def _measured_speed(device: str, dtype: str) -> Speed:
    import torch

    # As large as a batch's, and timed in milliseconds
    size = 8192 if device.startswith("cuda") else 1024
    matrix = torch.ones(size, size, device=device, dtype=getattr(torch, dtype))
    large = torch.ones(4 * size, 4 * size, device=device, dtype=matrix.dtype)

    def mean_time(product: Callable[[], Any]) -> float:
        """Return the mean time of a product, which includes what other processes take of the device."""
        times = list[float]()
        while len(times) < 2 or sum(times[1:]) < _LONGEST:  # the first one prepares the device
            started = time.perf_counter()
            product()
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started)
        return max(fmean(times[1:]), 1e-9)

    seconds, reading = mean_time(lambda: matrix @ matrix), mean_time(lambda: large @ large[0])
    return Speed(2 * size**3 / seconds, large.numel() * large.element_size() / reading)


@dataclass(frozen=True)
class RunCost:
    """Estimated costs of a run."""

    tasks: tuple[TaskTokens, ...]
    parameters: int | None
    operations: float | None
    """Floating-point operations of all distinct input tokens; None without parameters."""
    weight_bytes: int | None
    memory: int | None
    """Bytes of the weights and of a batch; None if the architecture or the device is unknown."""

    def seconds(self, speed: Speed) -> float | None:
        """Return the computing time at a device's speed; each generated token reads all weights."""
        if self.operations is None or self.weight_bytes is None:
            return None
        products = self.operations / (speed.operations * _EFFICIENCY)
        generated = sum(task.generated for task in self.tasks)
        return products + generated * self.weight_bytes / speed.bytes + sum(task.seconds for task in self.tasks)


def cost_of(plan: Plan, device: str | None, say: Say, tokenizer: Any = None) -> RunCost:
    """Estimate the costs of a run.

    Args:
        plan: its plan.
        device: torch's name of the device that will compute it; None: memory is not estimated, without torch.
        say: called with messages for the user.
        tokenizer: the run's tokenizer; None: it is loaded.

    Raises:
        EvalkitError: the benchmark cannot estimate its tokens, or the tokenizer cannot be loaded.
    """
    specification, checkpoint = plan.manifest["specification"], plan.checkpoint
    digest = specification["checkpoint"]["tokenizer"]
    if tokenizer is None:
        tokenizer = remembered("tokenizer", digest, lambda: tokenizer_alone(checkpoint, say))
    kind = benchmark(plan.manifest["kind"])
    # What the prompts of two checkpoints with one tokenizer may differ in
    about = {name: value for name, value in specification.items() if name not in ("checkpoint", "dtype", "attention")}
    limit, window = getattr(plan.request, "limit", None), window_of(plan.request.model, checkpoint, tokenizer, silent)
    config, dtype = config_of(checkpoint, silent), str(specification["dtype"])
    heads = (config.get("num_hidden_layers"), config.get("num_attention_heads"))
    key = (digest, kind.kind, repr(about), repr((limit, window, heads)))
    tasks = remembered("tokens", key, lambda: kind.token_counts(plan, tokenizer, _SAMPLE, silent), most=64)
    try:
        shape = read_shape(config)
    except ValueError:
        shape = None
    count = parameter_count(checkpoint) if shape is None else parameters(shape).total
    weights = None if count is None else count * BYTES[dtype]
    batch = None if device is None else _batch_bytes(plan, config, shape, dtype, device, tasks)
    memory = None if weights is None or batch is None else weights + batch
    return RunCost(tuple(tasks), count, _operations(tasks, shape, count), weights, memory)


def _operations(tasks: list[TaskTokens], shape: ModelShape | None, count: int | None) -> float | None:
    """Return the operations of all distinct tokens, at the mean length of the task's sequences."""
    if shape is None:
        return None if count is None else 2.0 * count * sum(task.distinct for task in tasks)
    return float(sum(task.distinct * flops_per_token(shape, int(task.alone / max(task.rows, 1.0))) for task in tasks))


def _batch_bytes(
    plan: Plan, config: dict[str, Any], shape: ModelShape | None, dtype: str, device: str, tasks: list[TaskTokens]
) -> int | None:
    from evalkit.scoring.architecture import CPU_TOKENS, GPU_TOKENS, activation_bytes

    hidden, inner = config.get("hidden_size"), config.get("intermediate_size")
    if not isinstance(hidden, int):
        return None
    budget = plan.request.token_budget or (GPU_TOKENS if device.startswith("cuda") else CPU_TOKENS)
    size = budget * activation_bytes(hidden, inner if isinstance(inner, int) else 4 * hidden, BYTES[dtype])
    if shape is not None and (generating := [task for task in tasks if task.generated]):
        longest = max((task.alone + task.generated) / max(task.rows, 1.0) for task in generating)
        size = max(size, int(longest * cache_bytes_per_token(shape, dtype)))
    return size


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
    expected: float | None = None
    """Seconds of the whole run by the device's speed."""
    seconds: float | None = None
    """Of the part that is left."""


def dry_run_report(study: Study, say: Say) -> Report:
    """Return the report.

    Raises:
        EvalkitError: the study cannot be planned.
    """
    plans = [(planned.run.benchmark.name, planned.plan) for planned in plan_runs(study, say).runs]
    estimates, notes = _estimates(plans, "this study", say)
    groups: dict[tuple[str, int | None], list[_Estimate]] = {}
    for one in estimates:
        count = one.cost.parameters if one.cost else parameter_count(one.plan.checkpoint)
        groups.setdefault((one.name, count), []).append(one)
    records = [{"benchmark": name} | _record(members, count) for (name, count), members in groups.items()]
    where = {"study": str(study.path), "output": str(study.output)}
    return _report("benchmark", records, _record(estimates), notes, where)


def plans_report(plans: Sequence[tuple[str, Plan]], say: Say) -> Report:
    """Return the report of a command's runs: of one run by task, of several by checkpoint.

    Args:
        plans: (name of the checkpoint, plan) of each run.
        say: called with messages for the user.
    """
    estimates, notes = _estimates(plans, "this command", say)
    total = _record(estimates)
    if len(estimates) > 1:
        records = [{"checkpoint": one.name} | _record([one]) for one in estimates]
        return _report("checkpoint", records, total, notes, {})
    [one] = estimates
    records = [{"task": task.task} | _tokens([task]) for task in (one.cost.tasks if one.cost else ())]
    about = {"run": str(one.plan.folder), "finished": one.progress.finished}
    total = {name: value for name, value in total.items() if name not in ("runs", "to_do")}
    return _report("task", records, total, notes, about)


def _estimates(plans: Sequence[tuple[str, Plan]], where: str, say: Say) -> tuple[list[_Estimate], list[str]]:
    """Return the estimates, and notes: a message for each benchmark without estimates, and what the others rest on."""
    from evalkit.models.parts import resolve_device

    estimates, problems, speeds = list[_Estimate](), dict[str, None](), dict[tuple[str, str], Speed]()
    with remembering(), doing("tokenising samples", slow=imports("transformers")):
        for name, plan in plans:
            device, cost = "", None
            try:
                device = resolve_device(plan.request.model.device)
            except UsageError as error:
                problems[f"time and memory are not estimated: {error}"] = None
            try:
                cost = cost_of(plan, device or None, say)
            except EvalkitError as error:
                problems[f"{name}: {error}; not in the totals"] = None
            estimates.append(_Estimate(name, plan, progress_of(plan), device, cost))
    with doing("timing a matrix product"):
        for place, one in enumerate(estimates):
            if one.cost is not None and one.device:
                key = one.device, str(one.plan.manifest["specification"]["dtype"])
                speed = speeds[key] = speeds.get(key) or _measured_speed(*key)
                estimates[place] = replace(one, expected=one.cost.seconds(speed))
    factors = _factors(estimates)
    names = ", ".join(dict.fromkeys(one.device for one in estimates if one.device))
    basis = f"a matrix product timed now on {names}, of whose speed scoring is assumed to reach {_EFFICIENCY:.0%}"
    if everywhere := factors.get(""):
        basis = (
            f"{counted(len(everywhere), 'finished run')} of {where} on the same hardware, scaled by operations; for "
            "benchmarks without one, all of them"
        )
    notes = [f"tokens: of at most {_SAMPLE} documents of each task, scaled up; distinct: shared prefixes counted once"]
    if names:
        notes += [
            f"time: from {basis}; without loading and preparing models; answers may end before their longest length",
            "memory: weights and one batch of one run",
        ]
    return [_with_seconds(one, factors) for one in estimates], [*problems, *notes]


def _factors(estimates: Sequence[_Estimate]) -> dict[str, list[float]]:
    """Return benchmark → measured over estimated times of runs finished on this hardware, "" for all."""
    ratios: dict[str, list[float]] = {}
    for one in estimates:
        if not one.progress.finished or not one.expected:
            continue
        run, here = load_run(one.plan.folder), place_of(one.device, "")
        devices = {(place.kind, place.host, place.threads) for place in places(run.manifest)}
        if (taken := run_seconds(run)) and devices == {(here.kind, here.host, here.threads)}:
            for name in (one.name, ""):
                ratios.setdefault(name, []).append(taken / one.expected)
    return ratios


def _with_seconds(one: _Estimate, factors: Mapping[str, list[float]]) -> _Estimate:
    if one.progress.finished or one.expected is None:
        return replace(one, seconds=0.0 if one.progress.finished else None)
    factor = median(factors.get(one.name) or factors.get("") or [1.0])
    return replace(one, seconds=one.expected * factor * (1 - one.progress.share))


def _record(members: Sequence[_Estimate], parameters: int | None = None) -> dict[str, Any]:
    costs = [one.cost for one in members if one.cost]
    seconds = [one.seconds for one in members if one.seconds is not None]
    return {
        "parameters": parameters,
        "runs": len(members),
        "to_do": sum(not one.progress.finished for one in members),
        **_tokens([task for cost in costs for task in cost.tasks]),
        "seconds": sum(seconds) if seconds else None,
        "memory_bytes": max((cost.memory for cost in costs if cost.memory is not None), default=None),
    }


def _tokens(tasks: Sequence[TaskTokens]) -> dict[str, int]:
    return {
        "documents": sum(task.documents for task in tasks),
        "tokens": round(sum(task.alone for task in tasks)),
        "distinct_tokens": round(sum(task.distinct for task in tasks)),
        "generated_tokens": round(sum(task.generated for task in tasks)),
    }


_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "parameters": ("parameters", lambda count: _short(count)),
    "runs": ("runs", "{:,}".format),
    "to_do": ("to do", "{:,}".format),
    "documents": ("documents", "{:,}".format),
    "tokens": ("tokens", lambda count: _short(count)),
    "distinct_tokens": ("distinct", lambda count: _short(count)),
    "generated_tokens": ("generated", lambda count: f"≤ {_short(count)}" if count else ""),
    "seconds": ("time", clock),
    "memory_bytes": ("memory", lambda size: f"{_short(size)}B"),
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
    headers = [what, *(_COLUMNS[key][0] for key in columns)]
    table = simple_table("dry_run", headers, rows, ruled=(len(rows) - 1,))
    content = about | {"notes": notes, "groups": records, "total": total}
    return Report((table,), (_summary(total | about),), notes=tuple(notes), records=records, content=content)


def _summary(total: Mapping[str, Any]) -> str:
    """Return the totals in a line; `total` also says which run it is of, if it is of one."""
    if total.get("finished"):
        return f"finished: {total['run']}"
    if "runs" not in total:
        left = "" if total["seconds"] is None else f", about {clock(total['seconds'])} of computing left"
        return f"{counted(total['documents'], 'document')}{left}"
    left = "" if total["seconds"] is None else f", about {clock(total['seconds'])} of computing, one after the other"
    return f"{counted(total['runs'], 'run')}, {total['to_do']:,} of them not finished{left}"


def _short(value: float) -> str:
    """Format a number with three digits and a unit."""
    for unit in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g}{unit and ' ' + unit}" if value >= 1 or not value else "1"
        value /= 1000
    return f"{value:,.0f} P"
