"""Lists of runs: those of a folder, with settings and results; and those of one benchmark on several checkpoints.

In: a folder, or runs and why others have none. Out: a `Report`, whose JSON and CSV have all fields. No torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from evalkit.benchmarks.outcomes import Metric, average_metric, headline_entries
from evalkit.benchmarks.registry import kinds as known_kinds
from evalkit.benchmarks.registry import results_of
from evalkit.errors import RunError, reading_as
from evalkit.inputs.values import by_number
from evalkit.reporting.numbers import PLUS_MINUS, UNKNOWN
from evalkit.reporting.report import Report
from evalkit.reporting.table import filled_table, simple_table
from evalkit.runs.finding import DamagedRun, scan
from evalkit.runs.folder import JOURNAL, RESULTS, Run
from evalkit.runs.notes import direction_mark, error_note, notes_of_runs, run_notes
from evalkit.runs.traits import (
    caveat_mark,
    documents_read,
    is_imported,
    kinds,
    selection_words,
    windows_of_text,
)
from evalkit.stats.estimates import known_error

_ID_SHOWN = 7


@dataclass(frozen=True)
class ListedRun:
    """A run in the list. A damaged run has only its folder, its state and a note with the reason."""

    folder: str
    state: str
    """finished, interrupted, begun, damaged or benchmark not installed."""
    id: str = ""
    created: str = ""
    name: str = ""
    """The name that was given to the checkpoint."""
    model: str = ""
    path: str | None = None
    """Path of the checkpoint; None if it is from the hub or in memory."""
    revision: str | None = None
    suite: str = ""
    template: str = ""
    num_fewshot: int | None = None
    dtype: str = ""
    context: str = ""
    """Tokens and method of a context extension."""
    windows: str = ""
    """Windows of a text."""
    control: str = ""
    """Control that the run is, whose scores are no results of its tasks."""
    documents: str = ""
    """Which documents of each task are read; empty: all."""
    rule: str = ""
    metric: str | None = None
    """Of a finished run's headline: its last average; for lm-eval's tasks the first metric."""
    unit: str | None = None
    higher_is_better: bool | None = None
    value: float | None = None
    stderr: float | None = None
    result: str = ""
    devices: tuple[str, ...] = ()
    imported: bool = False
    """Whether it was imported from another program's log, which has no journal."""
    journal: bool = True
    """Whether the journal exists, from which a missing table is rebuilt."""
    notes: tuple[str, ...] = ()

    @property
    def checkpoint(self) -> str:
        if not self.model:
            return Path(self.folder).name
        if self.name or self.path is None:
            return self.name or self.model
        path, here = Path(self.path), Path.cwd()
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    @property
    def settings(self) -> str:
        shots = f"{self.num_fewshot}-shot" if self.num_fewshot else ""
        origin = "imported" if self.imported else ""
        return ", ".join(filter(None, (self.control, shots, self.documents, self.context, self.windows, origin)))


def list_found(root: Path, sort: str = "date", text: str = "") -> list[ListedRun]:
    """Return the runs under a folder whose description contains each word of a text; case is ignored.

    They are sorted by date (newest last), name (of the folder), model (of the checkpoint, by step) or score. Raises a
    `RunError` if the folder cannot be read.
    """

    def has_words(run: ListedRun) -> bool:
        about = (Path(run.folder).name, run.state, run.id, run.created, run.model, run.revision, run.path, run.suite,
                 run.name, run.template, run.dtype, run.settings, run.rule)  # fmt: skip
        return all(word in " ".join(map(str, about)).lower() for word in text.lower().split())

    orders: dict[str, Any] = {
        "date": lambda run: run.created,
        "name": lambda run: run.folder,
        "model": lambda run: by_number(run.checkpoint),
        "score": _from_best,
    }
    return sorted(filter(has_words, map(_listed, scan(root))), key=orders[sort])


def _from_best(run: ListedRun) -> float:
    """Return the sort key of runs from the best: those without a value come last."""
    if run.value is None:
        return float("inf")
    return run.value if run.higher_is_better is False else -run.value


def _listed(run: Run | DamagedRun) -> ListedRun:
    if isinstance(run, DamagedRun):
        return ListedRun(str(run.folder), "damaged", notes=(run.why,))
    manifest, specification = run.manifest, run.manifest["specification"]
    extension = specification.get("context_extension")
    about: dict[str, Any] = {
        "folder": str(run.folder),
        "id": manifest["id"],
        "created": manifest["created"],
        "name": manifest.get("name") or "",
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
        "control": f"control {control}" if (control := specification.get("control")) else "",
        "rule": manifest["rule"],
        "journal": (run.folder / JOURNAL).is_file(),
        "imported": is_imported(manifest),
        "notes": tuple(run_notes(manifest)),
    }
    if not run.complete:
        return ListedRun(state="interrupted" if about["journal"] else "begun", **about)
    try:
        with reading_as(run.folder / RESULTS, f"results of {run.kind}", RunError):
            headline, result = results_of(run).headline()
    except RunError as error:
        state = "damaged" if run.kind in known_kinds() else "benchmark not installed"
        return ListedRun(state=state, **about | {"notes": (str(error), *about["notes"])})
    about["devices"] = tuple(kinds(manifest))
    return ListedRun(state="finished", result=result, **headline_entries(headline), **about)


def runs_report(runs: Sequence[ListedRun], root: Path, text: str = "") -> Report:
    """Return a report with one line for each run found in a folder by a filter; notes have errors and warnings."""
    headers = ["id", "date", "suite", "dtype", "settings", "result", "checkpoint"]
    rows = [
        [run.id[:_ID_SHOWN], run.created[:10], f"{run.suite} {run.template}".strip(), run.dtype, run.settings,
         run.result or run.state, run.checkpoint]
        for run in runs
    ]  # fmt: skip
    notes = [f"{run.id[:_ID_SHOWN] or Path(run.folder).name}: {note}" for run in runs for note in run.notes]
    if kept := [run.id[:_ID_SHOWN] for run in runs if run.state == "finished" and not (run.journal or run.imported)]:
        notes.append(f"copies without their journal: {', '.join(kept)}")
    content = [asdict(run) for run in runs]
    records = [
        {name: "; ".join(value) if isinstance(value, tuple) else value for name, value in record.items()}
        for record in content
    ]
    if not runs:
        none = f"none in {root}" + (f" with {text}" if text.strip() else "")
        return Report((), (none,), notes=notes, content=content, records=records)
    table = filled_table("runs", headers, rows, texts=len(headers))
    return Report((table,), notes=notes, content=content, records=records)


class Summarised(NamedTuple):
    """A checkpoint, or a model with its seeds, with the finished runs and the requested rule; None: the runs' own."""

    model: str
    runs: tuple[Run, ...]
    rule: str | None = None
    state: str = "finished"
    message: str = ""
    """Why it is not finished, or what was left out."""

    def metrics(self) -> dict[str, Metric]:
        """Return the first metric of each task; of several runs the mean, and as its error their standard deviation.

        What not all runs have has no value.
        """
        of_runs = []
        for run in self.runs:
            firsts = dict[str, Metric]()
            for metric in results_of(run).metrics(self.rule):
                firsts.setdefault(metric.task, metric)
            of_runs.append(firsts)
        return _means(of_runs)

    def averages(self) -> dict[str, Metric]:
        """Return the averages over tasks, as in results.json, by their names; of several runs likewise."""
        of_runs = []
        for run in self.runs:
            stored = results_of(run).averages(self.rule)
            of_runs.append({average["name"]: average_metric(average) for average in stored})
        return _means(of_runs)


def _means(of_runs: Sequence[dict[str, Metric]]) -> dict[str, Metric]:
    if len(of_runs) < 2:
        return of_runs[0] if of_runs else {}
    means = {}
    for name, metric in of_runs[0].items():
        values = [value for of in of_runs if name in of and (value := of[name].value) is not None]
        mean = statistics.fmean(values) if len(values) == len(of_runs) else None
        means[name] = replace(
            metric, value=mean, stderr=None if mean is None else known_error(statistics.stdev(values))
        )
    return means


def summary_report(summarised: Sequence[Summarised], name: str = "summary", errors: bool = False) -> Report:
    """Return a report with a line for each checkpoint or model, in order: its metrics, and the average with its error.

    With `errors`, and where there is no average, the metrics have theirs. It is the standard error over documents; in a
    table with several seeds the standard deviation of those models that have several.
    """
    metrics = [entry.metrics() for entry in summarised]
    averages = [next(reversed(entry.averages().values()), None) for entry in summarised]  # the last is that of all
    seeds = any(len(entry.runs) > 1 for entry in summarised)
    tasks = list(dict.fromkeys(task for firsts in metrics for task in firsts))
    headers = ["model", "seeds"] if seeds else ["checkpoint"]
    runs = [run for entry in summarised for run in entry.runs]
    for task in tasks:
        headers.append(column_heading(runs, [firsts[task] for firsts in metrics if task in firsts]))
    folder, labels = _labels([entry.model for entry in summarised])
    if with_average := len(tasks) > 1 and any(averages):
        headers.append(next(average.task for average in averages if average) + mark_of(runs, tasks))
    rows = []
    for entry, label, firsts, average in zip(summarised, labels, metrics, averages, strict=True):
        has_error = not seeds or len(entry.runs) > 1
        row = [label, *([f"{len(entry.runs) or ''}"] if seeds else [])]
        row += [_cell(firsts.get(task), has_error and (errors or not with_average)) for task in tasks]
        row += [_cell(average, has_error)] if with_average else []
        rows.append(row)
    is_error_shown = any(PLUS_MINUS in cell for row in rows for cell in row)
    notes = [f"checkpoints are in {folder}"] if folder else []
    notes += [f"{entry.model}: {entry.state}: {entry.message}" for entry in summarised if entry.message]
    every = [metric for firsts in metrics for metric in firsts.values()]
    manifests = [(entry.model, run.manifest) for entry in summarised for run in entry.runs]
    notes += notes_of_runs(manifests, [metric.higher_is_better for metric in every])
    content, records = list[dict[str, Any]](), list[dict[str, Any]]()
    for entry, firsts, average in zip(summarised, metrics, averages, strict=True):
        ids, folders = [run.manifest["id"] for run in entry.runs], [str(run.folder) for run in entry.runs]
        about = {"model": entry.model, "state": entry.state, "message": entry.message,
                 "run": ", ".join(ids) or None, "folder": ", ".join(folders) or None}  # fmt: skip
        of_tasks = [metric.record | _errors(entry, metric) for metric in firsts.values()]
        of_all = None
        if average is not None:
            of_all = {"name": average.task} | headline_entries(average) | _errors(entry, average)
        content.append(about | {"tasks": of_tasks, "average": of_all})
        values = {task: metric.value for task, metric in firsts.items()}
        errors_of_average = {f"average_{kind}": error for kind, error in _errors(entry, average).items()}
        records.append(about | values | {"average": average and average.value} | errors_of_average)
    count = sum(entry.state == "finished" for entry in summarised)
    words = [
        _shared(summarised, metrics),
        documents_words(runs, every) if every else "",
        f"{count} of {len(summarised)} {headers[0]}s are finished" if count < len(summarised) else "",
        "means over seeds" if seeds else "",
        error_note([seeds]) if is_error_shown else "",
    ]
    table = simple_table(name, headers, rows)
    caption = f"{'; '.join(filter(None, words))}."
    return Report((table,), (caption,), notes=notes, content=content, records=records)


def _errors(entry: Summarised, metric: Metric | None) -> dict[str, float | None]:
    """Return the entries of a number's error: a deviation over seeds is no standard error."""
    error = None if metric is None else metric.stderr
    several = len(entry.runs) > 1
    return {"stderr": None if several else error, "deviation": error if several else None}


def documents_words(runs: Iterable[Run], metrics: Iterable[Metric]) -> str:
    """Return which documents numbers are of, and n of each task: "all documents; n: BoolQ 3,270, PIQA 1,838".

    `metrics` are the first of each task, of all runs, whose n may differ.
    """
    runs = list(runs)
    sizes: dict[str, set[int]] = {}
    for metric in metrics:
        sizes.setdefault(metric.task, set()).add(metric.n)
    selections = dict.fromkeys(selection_words(run) or "all documents" for run in runs)
    shown = {task: "–".join(f"{n:,}" for n in sorted({min(of), max(of)})) for task, of in sizes.items()}
    numbers = set(shown.values())
    if len(numbers) == 1:
        listed = f"n = {numbers.pop()}" + " of each task" * (len(shown) > 1)
    else:
        names = {task: results_of(runs[0]).label(task).short for task in shown}
        listed = f"n: {', '.join(f'{names[task]} {n}' for task, n in shown.items())}"
    return f"{' or '.join(selections)}; {listed}"


def column_heading(runs: Sequence[Run], metrics: Sequence[Metric]) -> str:
    """Return the heading of the column that has a task's metrics of runs of one benchmark."""
    task = metrics[0].task
    lower = direction_mark(all(metric.higher_is_better is not False for metric in metrics))
    return f"{results_of(runs[0]).label(task).short}{mark_of(runs, [task])}{lower}"


def mark_of(runs: Iterable[Run], tasks: Collection[str]) -> str:
    """Return an asterisk if a run has caveats of one of the tasks."""
    return "*" * any(caveat_mark(run.manifest, tasks) for run in runs)


def _cell(metric: Metric | None, has_error: bool) -> str:
    if metric is None:
        return UNKNOWN
    return metric.format.with_error(metric.value, metric.stderr if has_error else None)


def _labels(models: Sequence[str]) -> tuple[str, list[str]]:
    """Return the folder that all checkpoints are in, empty if there is none, and their names without it."""
    parents = [PurePath(model).parts[:-1] for model in models]
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))]
    if not common:
        return "", list(models)
    return str(PurePath(*common)), [str(PurePath(*PurePath(model).parts[len(common) :])) for model in models]


def _shared(summarised: Sequence[Summarised], metrics: Sequence[Mapping[str, Metric]]) -> str:
    """Describe what all runs share: the suite and, where rules apply, template and rule; else the metrics."""
    for entry, firsts in zip(summarised, metrics, strict=True):
        for run in entry.runs[:1]:
            several = "prompts" in run.manifest["specification"]
            prompts = f"mean over {run.template} and other prompts" if several else f"{run.template} prompts"
            if "rules" in run.stored:
                return f"{run.suite}, {prompts}, rule {entry.rule or run.rule}"
            measured = dict.fromkeys(metric.name for metric in firsts.values())
            return f"{run.suite}: {', '.join(measured)}"
    return ""
