"""Report of a finished multiple-choice run: accuracies under one rule, and for comparison under every rule.

In: a run, or results, scores and a manifest. Out: a `Report` or its tables, with accuracies in percent. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from evalkit.benchmarks.multiple_choice.outcomes import (
    ComparableChoices,
    outcome_averages,
    outcome_entries,
    outcome_metrics,
)
from evalkit.benchmarks.multiple_choice.suites import label_of
from evalkit.benchmarks.outcomes import LOWER_IS_BETTER, LOWER_NOTE, Metric
from evalkit.data.requests import MOST_TOKENS, is_macro, request_tasks
from evalkit.errors import UsageError
from evalkit.models.context.extension import Extension
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, literal, simple_table
from evalkit.runs.accuracies import (
    Average,
    Results,
    TaskResult,
    available_rules,
    average_of,
    better_forms,
    rule_beside,
    summarise_all,
    with_choices,
)
from evalkit.runs.continuous import available_outcomes, invalid_outcomes, outcome_of
from evalkit.runs.folder import Run
from evalkit.runs.rules import RULES, all_rules, distinct, find_rule, invalid_rules, why_unusable
from evalkit.runs.traits import caveats, is_imported, run_notes, unofficial

_LM_EVAL_RULE = "acc"
_UNKNOWN_ERROR = "–: no error can be given where all documents of a task scored alike"


def choices_report(run: Run, rule: str | None = None, detail: bool = False) -> Report:
    """Return the report of a finished run under one rule; arguments as of `Benchmark.report`.

    With `detail` it has the accuracies of subjects, and those under every other rule and the outcomes.
    """
    key, manifest = rule or str(run.manifest["rule"]), run.manifest
    seconds = None if is_imported(manifest) else run.seconds
    if outcome_of(key) is not None:
        return _outcome_report(run, key, seconds, detail)
    results = run.results(rule)
    details = []
    for task, parts in results.subtasks.items() if detail else ():
        rows = [
            [part.task.removeprefix(f"{task}_"), f"{part.n:,}", percent(part.value), plus_minus(part.stderr)]
            for part in parts
        ]
        details.append(simple_table(task, [label_of(task).full, "n", "acc. %", "± SE"], rows))
    sources = {kind: manifest[kind] for kind in ("documents", "examples") if kind in manifest}
    notes = list(_lm_eval_beside(run, results))
    if detail:
        by_rule = summarise_all(run.scores, manifest)
        by_rule = {name: by_rule[name] for name in distinct([*by_rule], results.rule)}
        details += [rules_table(by_rule, run.scores, manifest, results.rule), outcomes_table(run, results.rule)]
    else:
        notes.append("--detail prints the averages under every rule, and outcomes")
        unusable = (why_unusable(other, run.scores) for other in all_rules() if other.name not in RULES)
        notes += [*filter(None, unusable), *invalid_rules()]
    content = about_run(run, seconds) | sources | results.to_json()
    if forms := better_forms(results, manifest.get("forms", {})):
        average = average_of("Average", [result for _, result in forms], len(forms))
        details.insert(0, _forms_table(forms, average, results.rule, manifest))
        content["forms"] = {name: asdict(result) for name, result in forms} | {"Average": asdict(average)}
    if detail or any(task.task in request_tasks() for task in results.tasks):
        centred = f"{percent(results.average.centred)} {plus_minus(results.average.centred_stderr)}"
        notes.append(f"average centred on chance (0: guessing, 100: all right): {centred}")
    return Report(
        (accuracy_table(results, manifest, seconds), *details),
        notes=tuple(notes),
        content=content,
        records=list(_records(results, manifest, detail)),
    )


def _lm_eval_beside(run: Run, results: Results) -> Iterator[str]:
    """Yield the average by lm-eval's rule beside that of another rule, and when to report which."""
    rule = results.rule
    if rule != _LM_EVAL_RULE and _LM_EVAL_RULE in available_rules(with_choices(run.scores)):
        average = run.results(_LM_EVAL_RULE).average
        error = "" if average.stderr is None else f" {plus_minus(average.stderr)}"
        shown = f"{percent(average.value)}{error}"
        when = f"report {rule} beside numbers of this protocol, {_LM_EVAL_RULE} beside lm-eval's of the same prompts"
        yield f"average by {_LM_EVAL_RULE}, lm-eval's rule: {shown}; {when}"


def _forms_table(
    forms: Sequence[tuple[str, TaskResult]], average: Average, rule: str, manifest: Mapping[str, Any]
) -> Table:
    """Return each task's better form, which is chosen on the documents that it is measured on, as in OLMES."""
    rows = [[name, label_of(result.task, manifest).full, percent(result.value), plus_minus(result.stderr)]
            for name, result in forms]  # fmt: skip
    rows.append([average.name, "", percent(average.value), plus_minus(average.stderr)])
    title = "The better form of each task" + ", as OLMES reports it" * (rule == "olmes")
    return simple_table("forms", ["task", "form", "acc. %", "± SE"], rows, texts=2, ruled={len(forms)}, title=title)


def _outcome_report(run: Run, key: str, seconds: Mapping[str, float] | None, detail: bool) -> Report:
    """Return the report of a run whose own measure is an outcome, with the accuracies of its tasks with choices."""
    manifest, comparable = run.manifest, ComparableChoices(run)
    metrics, by_rule = outcome_metrics(comparable, key), summarise_all(run.scores, manifest)
    averages, measure = outcome_averages(manifest, metrics), comparable.measure(key)
    chosen = by_rule[beside] if (beside := rule_beside(by_rule)) else None
    accuracies = {result.task: percent(result.value) for result in chosen.tasks} if chosen else {}
    by_task, decimals = {metric.task: metric for metric in metrics}, partial(fixed, places=3)

    def cells(name: str, result: Any, is_last: bool) -> list[str]:
        if isinstance(result, Metric):
            spent = "" if seconds is None else fixed(seconds.get(result.task, 0.0), 1)
            value, error, number = result.value or 0.0, result.stderr, f"{result.n:,}"
            return [name, number, decimals(value), plus_minus(error, decimals), accuracies.get(result.task, ""), spent]
        spent = fixed(sum(seconds.values()), 1) if seconds is not None and is_last else ""
        return [name, "", decimals(result["value"]), plus_minus(result["stderr"], decimals), "", spent]

    rows, ruled = grouped_rows(manifest, by_task, averages, cells)
    headers = ["task", "n", measure.name, "± SE", "acc. %", "seconds"]
    keep = [i for i in range(len(headers)) if any(row[i] for row in rows)]
    table = simple_table("results", [headers[i] for i in keep], [[row[i] for i in keep] for row in rows], ruled=ruled)
    notes = [
        measure.words,
        *([f"acc.: rule {chosen.rule}"] if chosen else []),
        *_measurement_notes(manifest, metrics),
        *_document_notes(manifest),
    ]
    tables = [table._replace(notes=tuple(map(literal, notes)))]
    if detail:
        tables.append(outcomes_table(run, chosen.rule if chosen else key))
    records = [{"kind": "task", "outcome": key} | outcome_entries(metric) for metric in metrics]
    content = about_run(run, seconds) | {"documents": manifest["documents"], "outcome": key, "tasks": records}
    return Report(tuple(tables), content=content | {"averages": averages}, records=records)


def about_run(run: Run, seconds: Mapping[str, float] | None) -> dict[str, Any]:
    about = {"run": run.manifest["id"], "folder": str(run.folder), "seconds": seconds}
    more = {"caveats": run.manifest["caveats"]} if "caveats" in run.manifest else {}
    return about | {"specification": run.manifest["specification"]} | more


def accuracy_table(results: Results, manifest: Mapping[str, Any], seconds: Mapping[str, float] | None) -> Table:
    """Return the accuracies of all tasks and the averages under one rule; without `seconds`, no column for them."""

    def cells(name: str, result: TaskResult | Average, is_last: bool) -> list[str]:
        accuracy = [percent(result.value), plus_minus(result.stderr)]
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
    # Without the groups of which no task has a result, such as those of gold answers under a rule
    groups = {name: [task for task in tasks if task in by_task] for name, tasks in groups.items()}
    groups = {name: tasks for name, tasks in groups.items() if tasks}
    for members, average in zip(groups.values(), averages, strict=False):
        rows += [cells(marked_label(task, manifest), by_task[task], False) for task in members]
        if len(members) > 1:
            rows.append(cells(_name_of(average, members, manifest), average, False))
    if len(groups) <= 1:
        return rows, set()
    return [*rows, cells(_name_of(averages[-1], by_task, manifest), averages[-1], True)], {len(rows)}


def _name_of(average: Any, tasks: Iterable[str], manifest: Mapping[str, Any]) -> str:
    """Return the name of an average, with an asterisk if the run has caveats of one of its tasks."""
    name = str(average["name"] if isinstance(average, Mapping) else average.name)
    return name + "*" * any(task in caveats(manifest) for task in tasks)


def rules_table(by_rule: Mapping[str, Results], scores: pd.DataFrame, manifest: Mapping[str, Any], rule: str) -> Table:
    """Return the accuracy of every task under every rule, and each rule's change of the average from `rule`'s."""
    base = by_rule[rule].average.value
    rows = []
    for name, results in by_rule.items():
        moved = "" if name == rule else percent(results.average.value - base, signed=True)
        accuracies = [*(task.value for task in results.tasks), results.average.value]
        rows.append([f"{name} <" if name == rule else name, *map(percent, accuracies), moved])
    names = [label_of(result.task, manifest).short for result in by_rule[rule].tasks]
    title = "The same scores under every rule (accuracy in %; <: the rule above)"
    table = simple_table("rules", ["rule", *names, "Avg.", "moves by"], rows, title=title)
    unusable = [why_unusable(other, scores) for other in all_rules() if other.by_task is None]
    return table._replace(notes=tuple(map(literal, filter(None, (*unusable, *invalid_rules())))))


def outcomes_table(run: Run, rule: str) -> Table:
    """Return the mean of every continuous outcome on each task, and the unweighted means over the tasks."""
    comparable = ComparableChoices(run)
    rows: list[list[str]] = []
    notes: list[str] = []
    tasks = [task for members in run.manifest["groups"].values() for task in members]
    for outcome in available_outcomes(run.scores):
        try:
            metrics = outcome_metrics(comparable, outcome.key(rule))
        except UsageError as error:
            notes.append(str(error))
            rows.append([outcome.scale.name, *["–"] * (len(tasks) + 1)])
        else:
            values = [metric.value for metric in metrics if metric.value is not None]
            means = [*values, sum(values) / len(values)]
            rows.append(
                [
                    outcome.scale.name + LOWER_IS_BETTER * (outcome.scale.higher_is_better is False),
                    *(fixed(value, 3) for value in means),
                ]
            )
    names = [label_of(task, run.manifest).short for task in tasks]
    title = f"The same scores as continuous outcomes (means over documents; {LOWER_NOTE})"
    table = simple_table("outcomes", ["outcome", *names, "Avg."], rows, title=title)
    return table._replace(notes=tuple(map(literal, (*notes, *invalid_outcomes()))))


def plus_minus(stderr: float | None, shown: Callable[[float], str] = percent) -> str:
    return "–" if stderr is None else f"± {shown(stderr)}"


def marked_label(task: str, manifest: Mapping[str, Any]) -> str:
    """Return a task's label, with an asterisk if it has caveats."""
    return label_of(task, manifest).full + "*" * (task in caveats(manifest))


def _notes(results: Results, manifest: Mapping[str, Any]) -> Iterator[str]:
    yield f"rule {results.rule}: {find_rule(results.rule).description}"
    if macro := [marked_label(task.task, manifest) for task in results.tasks if is_macro(task.task)]:
        yield f"{', '.join(macro)}: mean over subjects, each of which counts the same, as OLMES defines it"
    yield from _measurement_notes(manifest, results.tasks)
    if any(task.ties for task in results.tasks):
        yield "ties: documents with several best choices; the first of them is the prediction, as in lm-eval"
    if cut := [task.task for task in results.tasks if task.truncated]:
        limit = f", or the {MOST_TOKENS:,} tokens of OLMES" if any(task in request_tasks() for task in cut) else ""
        yield f"cut: documents whose context was truncated on the left to fit the context window{limit}"
    yield from _document_notes(manifest)


def _measurement_notes(manifest: Mapping[str, Any], results: Iterable[Any]) -> Iterator[str]:
    if len(manifest["documents"]) > 1:
        yield "averages: unweighted means over tasks; ±: over documents, of which those of one source are one draw"
    yield from error_notes(results)
    if manifest["specification"].get("control"):
        yield "control: each document has another document's context, so these are not results of the tasks"
    yield from prompt_notes(manifest)


def _document_notes(manifest: Mapping[str, Any]) -> Iterator[str]:
    yield "documents: " + sources_text(manifest["documents"])
    if examples := manifest.get("examples"):
        yield "examples: " + sources_text(examples)
    yield from run_notes(manifest)


def error_notes(results: Iterable[Any]) -> list[str]:
    """Return a note if a task's result has no standard error."""
    return [_UNKNOWN_ERROR] if any(result.stderr is None for result in results) else []


def prompt_notes(manifest: Mapping[str, Any], examples: str = "") -> Iterator[str]:
    """Yield notes about solved examples, with a description of these, and about the context extension."""
    if shots := manifest["specification"].get("num_fewshot", 0):
        yield f"{shots}-shot: {shots} solved example{'s' * (shots > 1)} before each question{examples}"
    if extension := manifest["specification"].get("context_extension"):
        yield Extension(**extension).describe()


def _records(results: Results, manifest: Mapping[str, Any], detail: bool) -> Iterator[dict[str, Any]]:
    """Yield a record for each task, average and, with `detail`, subject."""
    marked = {task for tasks in unofficial(manifest).values() for task in tasks}
    for task in results.tasks:
        yield {"kind": "task", "rule": results.rule} | asdict(task) | {"official": task.task not in marked}
        if detail:
            for part in results.subtasks.get(task.task, ()):
                yield {"kind": "subtask", "rule": results.rule} | asdict(part)
    for average in results.averages:
        numbers = asdict(average)
        yield {"kind": "average", "rule": results.rule, "task": numbers.pop("name"), "n": None} | numbers


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
