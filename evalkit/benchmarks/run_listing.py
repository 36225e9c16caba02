"""Lists of runs: those of a folder, with settings and results; and those of one benchmark on several checkpoints.

In: a folder, or runs and why others have none. Out: a `Report`, whose JSON and CSV have all fields. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Any

from evalkit.benchmarks.outcomes import LOWER_IS_BETTER, LOWER_NOTE, Metric
from evalkit.benchmarks.registry import benchmark_of
from evalkit.benchmarks.registry import kinds as known_kinds
from evalkit.errors import RunError
from evalkit.inputs.values import by_number
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.finding import DamagedRun, scan
from evalkit.runs.folder import JOURNAL, Run
from evalkit.runs.traits import (
    documents_read,
    is_imported,
    kinds,
    mixture,
    origin_notes,
    unofficial_notes,
    windows_of_text,
)

_ID_SHOWN = 7


@dataclass(frozen=True)
class ListedRun:
    """A run in the list. A damaged run has only its folder, its state and a note with the reason."""

    folder: str
    state: str
    """finished, interrupted, begun, damaged or benchmark not installed."""
    id: str = ""
    created: str = ""
    """Start time; ISO 8601."""
    model: str = ""
    """Checkpoint as named by the user."""
    path: str | None = None
    """Path of the checkpoint; None if it is from the hub or in memory."""
    revision: str | None = None
    suite: str = ""
    template: str = ""
    num_fewshot: int | None = None
    dtype: str = ""
    context: str = ""
    """Tokens and method of a context extension; empty without one."""
    windows: str = ""
    """Windows of a text; empty without one."""
    documents: str = ""
    """Which documents of each task are read; empty: all."""
    rule: str = ""
    score: float | None = None
    """Sort key of a finished run: its last average, a fraction; for lm-eval's tasks the first metric."""
    result: str = ""
    """Printed form of the score, with its standard error."""
    devices: tuple[str, ...] = ()
    """Kinds of devices that computed a finished run."""
    imported: bool = False
    """Whether it was imported from another program's log, which has no journal."""
    journal: bool = True
    """Whether the journal exists; no table can be recomputed without it."""
    notes: tuple[str, ...] = ()
    """Errors and warnings."""

    @property
    def checkpoint(self) -> str:
        """Printed checkpoint: a path, relative to the current folder if it lies below it, or a name."""
        if not self.model:
            return Path(self.folder).name
        if self.path is None:
            return self.model
        path, here = Path(self.path), Path.cwd()
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    @property
    def settings(self) -> str:
        """Settings that are not the default: examples, documents, context, origin."""
        shots = f"{self.num_fewshot}-shot" if self.num_fewshot else ""
        origin = "imported" if self.imported else ""
        return ", ".join(filter(None, (shots, self.documents, self.context, self.windows, origin)))

    @property
    def searched(self) -> str:
        """Text that a filter searches, in lower case."""
        about = (Path(self.folder).name, self.state, self.id, self.created, self.model, self.revision, self.path,
                 self.suite, self.template, self.dtype, self.settings, self.rule)  # fmt: skip
        return " ".join(map(str, about)).lower()


def list_found(root: Path, sort: str = "date", text: str = "") -> list[ListedRun]:
    """Return the runs under a folder whose description contains each word of a text; case is ignored.

    They are sorted by date (newest last), name (of the folder), model (of the checkpoint, by step) or score.

    Raises:
        RunError: the folder cannot be read.
    """
    runs = [
        ListedRun(str(run.folder), "damaged", notes=(run.why,)) if isinstance(run, DamagedRun) else _listed(run)
        for run in scan(root)
    ]
    words = text.lower().split()
    orders: dict[str, Any] = {
        "date": lambda run: run.created,
        "name": lambda run: run.folder,
        "model": lambda run: by_number(run.checkpoint),
        "score": lambda run: float("inf") if run.score is None else -run.score,
    }
    return sorted((run for run in runs if all(word in run.searched for word in words)), key=orders[sort])


def runs_report(runs: Sequence[ListedRun], root: Path, text: str = "") -> Report:
    """Return a report with one line for each run found in a folder by a filter; notes have errors and warnings."""
    headers = ["id", "date", "suite", "dtype", "settings", "result", "checkpoint"]
    rows = [
        [run.id[:_ID_SHOWN], run.created[:10], f"{run.suite} {run.template}".strip(), run.dtype, run.settings,
         run.result or run.state, run.checkpoint]
        for run in runs
    ]  # fmt: skip
    # Empty columns are dropped to save width
    shown = [column for column in range(len(headers)) if any(row[column] for row in rows)]
    rows = [[row[column] for column in shown] for row in rows]
    headers = [headers[column] for column in shown]
    notes = [f"{run.id[:_ID_SHOWN] or Path(run.folder).name}: {note}" for run in runs for note in run.notes]
    if kept := [run.id[:_ID_SHOWN] for run in runs if run.state == "finished" and not (run.journal or run.imported)]:
        notes.append(f"stored without a journal, so their tables cannot be recomputed: {', '.join(kept)}")
    content = [asdict(run) for run in runs]
    records = [
        {name: "; ".join(value) if isinstance(value, tuple) else value for name, value in record.items()}
        for record in content
    ]
    none = f"none in {root}" + (f" with {text}" if text.strip() else "")
    return Report(
        (simple_table("runs", headers, rows, texts=len(shown)),) if runs else (),
        () if runs else (none,),
        notes=tuple(notes),
        content=content,
        records=records,
    )


def _listed(run: Run) -> ListedRun:
    manifest, specification = run.manifest, run.manifest["specification"]
    extension = specification.get("context_extension")
    about: dict[str, Any] = {
        "folder": str(run.folder),
        "id": manifest["id"],
        "created": manifest["created"],
        "model": manifest["model"],
        "path": manifest.get("path"),
        "revision": manifest["revision"],
        "suite": specification["suite"],
        "template": run.template,
        "num_fewshot": specification.get("num_fewshot"),
        "dtype": specification["dtype"],
        "context": f"{extension['target']:,} by {extension['method']}" if extension else "",
        "documents": documents_read(specification),
        "windows": windows_of_text(specification),
        "rule": manifest["rule"],
        "journal": (run.folder / JOURNAL).is_file(),
        "imported": is_imported(manifest),
        "notes": (*origin_notes(manifest), *unofficial_notes(manifest)),
    }
    if not run.complete:
        return ListedRun(state="interrupted" if about["journal"] else "begun", **about)
    try:
        score, result = benchmark_of(run).headline(run)
    except RunError as error:
        state = "damaged" if run.kind in known_kinds() else "benchmark not installed"
        return ListedRun(state=state, **about | {"notes": (str(error), *about["notes"])})
    about |= {"devices": tuple(kinds(manifest)), "notes": (*about["notes"], *mixture(manifest))}
    return ListedRun(state="finished", score=score, result=result, **about)


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

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """Task → its first metric."""
        metrics: dict[str, Metric] = {}
        for metric in benchmark_of(self.run).metrics(self.run, self.rule) if self.run else ():
            metrics.setdefault(metric.task, metric)
        return metrics

    @cached_property
    def average(self) -> dict[str, Any] | None:
        """The stored average over all tasks, None if there is none."""
        averages = benchmark_of(self.run).stored_averages(self.run, self.rule) if self.run else []
        return dict(averages[-1]) if averages else None

    @property
    def about(self) -> dict[str, Any]:
        """Keys of its record in JSON and CSV."""
        identity = (self.run.manifest["id"], str(self.run.folder)) if self.run else (None, None)
        return {"model": self.model, "state": self.state, "message": self.message, "run": identity[0],
                "folder": identity[1]}  # fmt: skip


def summary_report(runs: Sequence[SummarisedRun]) -> Report:
    """Return a report with a line for each checkpoint, in order."""
    tasks = list(dict.fromkeys(task for run in runs for task in run.metrics))
    averages = [run.average if len(tasks) > 1 else None for run in runs]
    name = next((average["name"] for average in averages if average), None)
    folder, labels = _labels([run.model for run in runs])
    rows = []
    for label, run, average in zip(labels, runs, averages, strict=True):
        cells = [_cell(run.metrics.get(task)) for task in tasks]
        rows.append([label, *cells, *([percent(average["accuracy"]) if average else _NONE] if name else [])])
    headers = ["checkpoint", *(_heading(task, runs) for task in tasks), *([name] if name else [])]
    metrics = [metric for run in runs for metric in run.metrics.values()]
    notes = [f"checkpoints are in {folder}"] if folder else []
    notes += [f"{run.model}: {run.state}: {run.message}" for run in runs if run.message]
    notes += [f"{run.model}: {note}" for run in runs if run.run for note in mixture(run.run.manifest)]
    if any(metric.official is False for metric in metrics):
        notes.append("*: not the official documents of the task")
    if any(metric.higher_is_better is False for metric in metrics):
        notes.append(LOWER_NOTE)
    return Report(
        (simple_table("summary", headers, rows),),
        (f"{sum(run.run is not None for run in runs)} of {len(runs)} checkpoints are finished{_shared(runs)}",),
        notes=tuple(notes),
        content=[
            run.about | {"tasks": [asdict(metric) for metric in run.metrics.values()], "average": run.average}
            for run in runs
        ],
        records=[
            run.about
            | {task: metric.value for task, metric in run.metrics.items()}
            | {"average": run.average["accuracy"] if run.average else None}
            for run in runs
        ],
    )


def _labels(models: Sequence[str]) -> tuple[str, list[str]]:
    """Return the folder that all checkpoints are in, empty if there is none, and their names without it."""
    parents = [PurePath(model).parts[:-1] for model in models]
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))]
    if not common:
        return "", list(models)
    return str(PurePath(*common)), [str(PurePath(*PurePath(model).parts[len(common) :])) for model in models]


def _shared(runs: Sequence[SummarisedRun]) -> str:
    """Describe what all runs share: the suite and, where rules apply, template and rule."""
    for summarised in runs:
        if (run := summarised.run) is not None:
            several = "prompts" in run.manifest["specification"]
            prompts = f"mean over {run.template} and other prompts" if several else f"{run.template} prompts"
            by_rule = f", {prompts}, rule {summarised.rule or run.rule}" if "rules" in run.stored else ""
            return f" on {run.suite}{by_rule}"
    return ""


def _heading(task: str, runs: Sequence[SummarisedRun]) -> str:
    """Return the label of a task, with marks for unofficial documents and for a metric of which lower is better."""
    measured = [(run.run, run.metrics[task]) for run in runs if run.run and task in run.metrics]
    (run, metric), mark = measured[0], "*" if any(metric.official is False for _, metric in measured) else ""
    lower = LOWER_IS_BETTER if metric.higher_is_better is False else ""
    return f"{benchmark_of(run).label(run, task).short}{mark}{lower}"


def _cell(metric: Metric | None) -> str:
    if metric is None or metric.value is None:
        return _NONE
    return percent(metric.value / metric.whole) if metric.whole else fixed(metric.value, 4)
