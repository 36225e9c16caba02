"""Report of a finished multiple-choice run: accuracies under one rule, and for comparison under every rule.

In: a run, or results, scores and a manifest. Out: a `Report` or its tables, with accuracies in percent. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from evalkit.benchmarks.multiple_choice.outcomes import ComparableChoices, outcome_metrics
from evalkit.benchmarks.multiple_choice.suites import label_of
from evalkit.errors import UsageError
from evalkit.escape import counted
from evalkit.models.context.extension import Extension
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, literal, simple_table
from evalkit.runs.accuracies import Average, Results, TaskResult, summarise_all
from evalkit.runs.folder import Run
from evalkit.runs.rules import RULES, all_rules, distinct, find_rule, invalid_rules, why_unusable
from evalkit.runs.score_table import MARGIN, OUTCOMES
from evalkit.runs.traits import is_imported, mixture, origin_notes, unofficial


def choices_report(run: Run, rule: str | None = None, detail: bool = False) -> Report:
    """Return the report of a finished run under one rule; arguments as of `Benchmark.report`.

    With `detail` it has the accuracies of subjects, and those under every other rule and the outcomes.
    """
    results, manifest = run.results(rule), run.manifest
    seconds = None if is_imported(manifest) else run.seconds
    details = []
    for task, parts in results.subtasks.items() if detail else ():
        rows = [
            [part.task.removeprefix(f"{task}_"), f"{part.n:,}", percent(part.accuracy), plus_minus(part.stderr)]
            for part in parts
        ]
        details.append(simple_table(task, [label_of(task).full, "n", "acc. %", "± SE"], rows))
    sources = {kind: manifest[kind] for kind in ("documents", "examples") if kind in manifest}
    by_rule = summarise_all(run.scores, manifest)
    by_rule = {name: by_rule[name] for name in distinct([*by_rule], results.rule)}
    others, notes = [other.average.accuracy for name, other in by_rule.items() if name != results.rule], list[str]()
    if detail:
        details += [rules_table(by_rule, run.scores, manifest, results.rule), outcomes_table(run, results.rule)]
    else:
        if others:
            spread = f"{percent(min(others))} to {percent(max(others))}" if len(others) > 1 else percent(others[0])
            about = f"average under {counted(len(others), 'other rule')}: {spread}"
            notes.append(f"{about}; --detail prints them, and outcomes")
        unusable = (why_unusable(other, run.scores) for other in all_rules() if other.name not in RULES)
        notes += [*filter(None, unusable), *invalid_rules()]
    return Report(
        (accuracy_table(results, manifest, seconds), *details),
        notes=tuple(notes),
        content=about_run(run, seconds) | sources | results.to_json(),
        records=list(_records(results, manifest, detail)),
    )


def about_run(run: Run, seconds: Mapping[str, float] | None) -> dict[str, Any]:
    about = {"run": run.manifest["id"], "folder": str(run.folder), "seconds": seconds}
    return about | {"specification": run.manifest["specification"]}


def accuracy_table(results: Results, manifest: Mapping[str, Any], seconds: Mapping[str, float] | None) -> Table:
    """Return the accuracies of all tasks and the averages under one rule; without `seconds`, no column for them."""

    def cells(name: str, result: TaskResult | Average, is_last: bool) -> list[str]:
        accuracy = [percent(result.accuracy), plus_minus(result.stderr)]
        if isinstance(result, Average):
            spent = "" if seconds is None or not is_last else fixed(sum(seconds.values()), 1)
            return [name, "", *accuracy, "", "", "", spent]
        spent = "" if seconds is None else fixed(seconds.get(result.task, 0.0), 1)
        counts = [f"{result.ties or ''}", f"{result.truncated or ''}"]
        return [name, f"{result.n:,}", *accuracy, percent(result.chance), *counts, spent]

    by_name = {task.task: task for task in results.tasks}
    rows, ruled = grouped_rows(manifest, by_name, results.averages, cells)
    headers = ["task", "n", "acc. %", "± SE", "chance", "ties", "cut", "seconds"]
    # Empty columns (no ties, no truncated documents) are dropped to save width
    keep = [i for i in range(len(headers)) if any(row[i] for row in rows)]
    table = simple_table("results", [headers[i] for i in keep], [[row[i] for i in keep] for row in rows], ruled=ruled)
    return table._replace(notes=tuple(map(literal, _notes(results, manifest))))


def grouped_rows(
    manifest: Mapping[str, Any],
    by_task: Mapping[str, Any],
    averages: Sequence[Any],
    cells: Callable[[str, Any, bool], list[str]],
) -> tuple[list[list[str]], set[int]]:
    """Return a row for each task and each average of several, by group, and which rows have a rule above them.

    `averages` are of the groups, then of all tasks if there are several groups; `cells` makes a row from a printed
    name, a result, and whether it is the average over several groups.
    """
    groups, rows = manifest["groups"], list[list[str]]()
    for members, average in zip(groups.values(), averages, strict=False):
        rows += [cells(marked_label(task, manifest), by_task[task], False) for task in members]
        if len(members) > 1:
            rows.append(cells(average.name, average, False))
    if len(groups) <= 1:
        return rows, set()
    return [*rows, cells(averages[-1].name, averages[-1], True)], {len(rows)}


def rules_table(by_rule: Mapping[str, Results], scores: pd.DataFrame, manifest: Mapping[str, Any], rule: str) -> Table:
    """Return the accuracy of every task under every rule, and each rule's change of the average from `rule`'s."""
    base = by_rule[rule].average.accuracy
    rows = []
    for name, results in by_rule.items():
        moved = "" if name == rule else percent(results.average.accuracy - base, signed=True)
        accuracies = [*(task.accuracy for task in results.tasks), results.average.accuracy]
        rows.append([f"{name} <" if name == rule else name, *map(percent, accuracies), moved])
    names = [label_of(result.task, manifest).short for result in by_rule[rule].tasks]
    title = "The same scores under every rule (accuracy in %; <: the rule above)"
    table = simple_table("rules", ["rule", *names, "Avg.", "moves by"], rows, title=title)
    unusable = [why_unusable(other, scores) for other in all_rules()]
    return table._replace(notes=tuple(map(literal, filter(None, (*unusable, *invalid_rules())))))


def outcomes_table(run: Run, rule: str) -> Table:
    """Return the mean of every continuous outcome on each task, and the unweighted means over the tasks."""
    comparable = ComparableChoices(run)
    rows: list[list[str]] = []
    notes: list[str] = []
    tasks = [task for members in run.manifest["groups"].values() for task in members]
    for outcome in OUTCOMES.values():
        try:
            metrics = outcome_metrics(comparable, f"{MARGIN}:{rule}" if outcome.name == MARGIN else outcome.name)
        except UsageError as error:
            notes.append(str(error))
            rows.append([outcome.title, *["–"] * (len(tasks) + 1)])
        else:
            values = [metric.value for metric in metrics if metric.value is not None]
            means = [*values, sum(values) / len(values)]
            rows.append([outcome.title, *(fixed(value, 3) for value in means)])
    names = [label_of(task, run.manifest).short for task in tasks]
    title = f"The same scores as continuous outcomes (means over documents; lower is better, of {rule}'s margin higher)"
    table = simple_table("outcomes", ["outcome", *names, "Avg."], rows, title=title)
    return table._replace(notes=tuple(map(literal, notes)))


def plus_minus(stderr: float | None) -> str:
    return "–" if stderr is None else f"± {percent(stderr)}"


def marked_label(task: str, manifest: Mapping[str, Any]) -> str:
    """Return a task's label, with an asterisk if its documents or examples are not the official ones."""
    return label_of(task, manifest).full + "*" * any(task in tasks for tasks in unofficial(manifest).values())


def _notes(results: Results, manifest: Mapping[str, Any]) -> Iterator[str]:
    yield f"rule {results.rule}: {find_rule(results.rule).description}"
    if len(results.tasks) > 1:
        yield "averages: unweighted means over tasks; ±: over documents, of which those of one source are one draw"
    yield from prompt_notes(manifest)
    yield from (*origin_notes(manifest), *mixture(manifest))
    if any(task.ties for task in results.tasks):
        yield "ties: documents with several best choices; the first of them is the prediction, as in lm-eval"
    if any(task.truncated for task in results.tasks):
        yield "cut: documents whose context was truncated on the left to fit the context window"
    yield "documents: " + sources_text(manifest["documents"])
    if examples := manifest.get("examples"):
        yield "examples: " + sources_text(examples)
    if unofficial(manifest):
        yield "*: not the official documents of the task"


def prompt_notes(manifest: Mapping[str, Any], examples: str = "") -> Iterator[str]:
    """Yield notes about solved examples, with a description of these, and about the context extension."""
    if shots := manifest["specification"].get("num_fewshot", 0):
        yield f"{shots}-shot: {shots} solved example{'s' * (shots > 1)} before each question{examples}"
    if extension := manifest["specification"].get("context_extension"):
        yield Extension(**extension).describe()


def _records(results: Results, manifest: Mapping[str, Any], detail: bool) -> Iterator[dict[str, Any]]:
    """Yield a record for each task, average and, with `detail`, subject; accuracies are fractions."""
    marked = {task for tasks in unofficial(manifest).values() for task in tasks}
    for task in results.tasks:
        yield {"kind": "task", "rule": results.rule} | asdict(task) | {"official": task.task not in marked}
        if detail:
            for part in results.subtasks.get(task.task, ()):
                yield {"kind": "subtask", "rule": results.rule} | asdict(part)
    for average in results.averages:
        about = {"kind": "average", "rule": results.rule, "task": average.name, "n": None}
        yield about | {"accuracy": average.accuracy, "stderr": average.stderr}


def sources_text(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the sources of the documents, with the tasks of each if there are several."""
    by_source: dict[str, list[str]] = {}
    for task, about in documents.items():
        kind, _, path = about["source"].partition(" ")
        source = f"{kind} {Path(path).parent}" if kind == "data-dir" else about["source"]
        by_source.setdefault(source, []).append(task)
    if len(by_source) == 1:
        return next(iter(by_source))
    return "; ".join(f"{', '.join(tasks)} from {source}" for source, tasks in by_source.items())
