"""Summary of runs of one benchmark on several checkpoints: a line for each, a column for each task.

In: finished runs, and why others have none. Out: a `Report`. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.outcomes import LOWER_IS_BETTER, LOWER_NOTE, Metric
from evalkit.benchmarks.registry import benchmark_of
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.batch_devices import mixture
from evalkit.runs.folder import Run

if TYPE_CHECKING:
    from evalkit.benchmarks.outcomes import Metric
    from evalkit.runs.folder import Run


_NONE = "–"


@dataclass(frozen=True)
class SummarisedRun:
    """A checkpoint with its run."""

    model: str
    """As given by the user."""
    run: Run | None
    """None if it is not finished."""
    rule: str | None = None
    """The requested rule; None: the run's own."""
    state: str = "finished"
    message: str = ""
    """Why it is not finished, or what was left out."""

    @property
    def metrics(self) -> dict[str, Metric]:
        """Return task → its first metric."""
        if self.run is None:
            return {}
        found: dict[str, Metric] = {}
        for metric in benchmark_of(self.run).metrics(self.run, self.rule):
            found.setdefault(metric.task, metric)
        return found

    @property
    def average(self) -> Mapping[str, Any] | None:
        """Return the stored average over all tasks, None if there is none."""
        if self.run is None:
            return None
        averages = benchmark_of(self.run).stored_averages(self.run, self.rule)
        return averages[-1] if averages else None


def summary_report(runs: Sequence[SummarisedRun]) -> Report:
    """Return a report with a line for each checkpoint, in order."""
    metrics = [one.metrics for one in runs]
    tasks = list(dict.fromkeys(task for one in metrics for task in one))
    averages = [one.average for one in runs] if len(tasks) > 1 else [None] * len(runs)
    name = next((one["name"] for one in averages if one), None)
    headers = ["checkpoint", *(_heading(task, runs, metrics) for task in tasks), *([name] if name else [])]
    folder, labels = _labels([one.model for one in runs])
    rows = []
    for label, one, found, average in zip(labels, runs, metrics, averages, strict=True):
        cells = [_cell(found.get(task)) if one.run else _NONE for task in tasks]
        rows.append([label, *cells, *([percent(average["accuracy"]) if average else _NONE] if name else [])])
    lower = any(metric.higher_is_better is False for one in metrics for metric in one.values())
    notes = [f"checkpoints are in {folder}"] if folder else []
    notes += [f"{one.model}: {one.state}: {one.message}" for one in runs if one.message]
    notes += [f"{one.model}: {note}" for one in runs if one.run for note in mixture(one.run.manifest)]
    if any(metric.official is False for one in metrics for metric in one.values()):
        notes.append("*: not the official documents of the task")
    return Report(
        (simple_table("summary", headers, rows),),
        (f"{sum(one.run is not None for one in runs)} of {len(runs)} checkpoints are finished{_what(runs)}",),
        notes=(*notes, *([LOWER_NOTE] if lower else [])),
        content=[_content(one, found) for one, found in zip(runs, metrics, strict=True)],
        records=[_record(one, found) for one, found in zip(runs, metrics, strict=True)],
    )


def _labels(models: Sequence[str]) -> tuple[str, list[str]]:
    """Return the folder that all checkpoints are in, empty if there is none, and their names without it."""
    parents = [PurePath(model).parts[:-1] for model in models]
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))]
    if not common:
        return "", list(models)
    return str(PurePath(*common)), [str(PurePath(*PurePath(model).parts[len(common) :])) for model in models]


def _what(runs: Sequence[SummarisedRun]) -> str:
    """Describe what all runs share: the suite and, where rules apply, template and rule."""
    one = next((one for one in runs if one.run), None)
    if one is None or one.run is None:
        return ""
    by_rule = "rules" in one.run.stored
    several = "prompts" in one.run.manifest["specification"]
    prompts = f"mean over {one.run.template} and other prompts" if several else f"{one.run.template} prompts"
    return f" on {one.run.suite}" + (f", {prompts}, rule {one.rule or one.run.rule}" * by_rule)


def _heading(task: str, runs: Sequence[SummarisedRun], metrics: Sequence[Mapping[str, Metric]]) -> str:
    """Return the label of a task, with marks for unofficial documents and for a metric of which lower is better."""
    run = next(one.run for one, found in zip(runs, metrics, strict=True) if one.run and task in found)
    found = [one[task] for one in metrics if task in one]
    mark = "*" if any(metric.official is False for metric in found) else ""
    lower = LOWER_IS_BETTER if found[0].higher_is_better is False else ""
    return f"{benchmark_of(run).label(run, task).short}{mark}{lower}"


def _cell(metric: Metric | None) -> str:
    if metric is None or metric.value is None:
        return _NONE
    return percent(metric.value / metric.whole) if metric.whole else fixed(metric.value, 4)


def _content(one: SummarisedRun, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    return {
        "model": one.model,
        "state": one.state,
        "message": one.message,
        "run": one.run.manifest["id"] if one.run else None,
        "folder": str(one.run.folder) if one.run else None,
        "tasks": [asdict(metric) for metric in metrics.values()],
        "average": dict(one.average) if one.average else None,
    }


def _record(one: SummarisedRun, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    content = _content(one, metrics)
    values = {task: metric.value for task, metric in metrics.items()}
    average = {"average": one.average["accuracy"] if one.average else None}
    return {name: content[name] for name in ("model", "state", "message", "run", "folder")} | values | average
