"""Lists of runs: those of a folder, with settings and results; and those of one benchmark on several checkpoints.

In: a folder, or runs and why others have none. Out: a `Report`, whose JSON and CSV have all fields. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
from evalkit.runs.batch_devices import kinds, mixture
from evalkit.runs.finding import DamagedRun, scan
from evalkit.runs.folder import JOURNAL, Run
from evalkit.runs.traits import documents_read, is_imported, origin_notes, unofficial_notes, windows_of_text

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


def list_found(root: Path, sort: str = "date", text: str = "") -> list[ListedRun]:
    """Return the runs under a folder whose description contains each word of a text; case is ignored.

    They are sorted by date (newest last), name (of the folder), model (of the checkpoint, by step) or score.

    Raises:
        RunError: the folder cannot be read.
    """
    found = [_damaged(one.folder, one.why) if isinstance(one, DamagedRun) else _listed(one) for one in scan(root)]
    words = text.lower().split()
    chosen = [run for run in found if all(word in _described(run) for word in words)]
    orders: dict[str, Any] = {
        "date": lambda run: run.created,
        "name": lambda run: run.folder,
        "model": lambda run: by_number(run.checkpoint),
        "score": lambda run: float("inf") if run.score is None else -run.score,
    }
    return sorted(chosen, key=orders[sort])


def runs_report(runs: Sequence[ListedRun], root: Path, text: str = "") -> Report:
    """Return a report with one line for each run found in a folder by a filter; notes have errors and warnings."""
    headers = ["id", "date", "suite", "dtype", "settings", "result", "checkpoint"]
    rows = [
        [run.id[:_ID_SHOWN], run.created[:10], f"{run.suite} {run.template}".strip(), run.dtype, run.settings,
         run.result or run.state, run.checkpoint]
        for run in runs
    ]  # fmt: skip
    # Empty columns are dropped to save width
    keep = [column for column in range(len(headers)) if any(row[column] for row in rows)]
    kept_headers, kept_rows = [headers[c] for c in keep], [[row[c] for c in keep] for row in rows]
    none = f"none in {root}" + (f" with {text}" if text.strip() else "")
    notes = [f"{run.id[:_ID_SHOWN] or Path(run.folder).name}: {note}" for run in runs for note in run.notes]
    if kept := [run.id[:_ID_SHOWN] for run in runs if run.state == "finished" and not (run.journal or run.imported)]:
        notes.append(f"stored without a journal, so their tables cannot be recomputed: {', '.join(kept)}")
    content = [asdict(run) for run in runs]
    return Report(
        (simple_table("runs", kept_headers, kept_rows, texts=len(keep)),) if runs else (),
        verdict=() if runs else (none,),
        notes=tuple(notes),
        content=content,
        records=[{name: _one_value(value) for name, value in record.items()} for record in content],
    )


def _one_value(value: Any) -> Any:
    return "; ".join(value) if isinstance(value, (list, tuple)) else value


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


def _damaged(folder: Path, why: str) -> ListedRun:
    return ListedRun(str(folder), "damaged", notes=(why,))


def _described(run: ListedRun) -> str:
    """Return the text that a filter searches, in lower case."""
    about = ("state", "id", "created", "model", "revision", "path", "suite", "template", "dtype", "settings", "rule")
    return " ".join(map(str, (Path(run.folder).name, *(getattr(run, name) for name in about)))).lower()


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
