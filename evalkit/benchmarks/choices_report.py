"""Report of a finished multiple-choice run: accuracies under one rule, and for comparison under every rule.

In: a run, or results, scores and a manifest. Out: a `Report` or its tables, with accuracies in percent. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from evalkit.benchmarks.choices import (
    ComparableChoices,
    outcome_averages,
    outcome_entries,
    outcome_metrics,
)
from evalkit.benchmarks.outcomes import Metric, average_metric
from evalkit.data.requests import MOST_TOKENS, request_tasks
from evalkit.errors import UsageError
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.numbers import MEANS, SHARES, UNKNOWN
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, filled_table, simple_table
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
from evalkit.runs.notes import LOWER_NOTE, TRUNCATED, direction_mark, macro_note, notes_below, rule_note
from evalkit.runs.rules import RULES, all_rules, distinct, invalid_rules, why_unusable
from evalkit.runs.traits import caveat_mark, is_imported, unofficial
from evalkit.suites.suites import label_of

_LM_EVAL_RULE = "acc"


def choices_report(run: Run, rule: str | None = None, detail: bool = False) -> Report:
    """Return the report of a finished run under one rule; arguments as of `FinishedResults.report`.

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
            [part.task.removeprefix(f"{task}_"), f"{part.n:,}", *SHARES.columns(part.value, part.stderr)]
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
        centred = SHARES.with_error(results.average.centred, results.average.centred_stderr)
        notes.append(f"average centred on chance (0: guessing, 100: all right): {centred}")
    return Report(
        (accuracy_table(results, manifest, seconds), *details),
        notes=notes,
        content=content,
        records=list(_records(results, manifest, detail)),
    )


def _lm_eval_beside(run: Run, results: Results) -> Iterator[str]:
    """Yield the average by lm-eval's rule beside that of another rule, and when to report which."""
    rule = results.rule
    if rule != _LM_EVAL_RULE and _LM_EVAL_RULE in available_rules(with_choices(run.scores)):
        average = run.results(_LM_EVAL_RULE).average
        shown = SHARES.with_error(average.value, average.stderr)
        when = f"report {rule} beside numbers of this protocol, {_LM_EVAL_RULE} beside lm-eval's of the same prompts"
        yield f"average by {_LM_EVAL_RULE}, lm-eval's rule: {shown}; {when}"


def _forms_table(
    forms: Sequence[tuple[str, TaskResult]], average: Average, rule: str, manifest: Mapping[str, Any]
) -> Table:
    """Return each task's better form, which is chosen on the documents that it is measured on, as in OLMES."""
    rows = [[name, label_of(result.task, manifest).full, *SHARES.columns(result.value, result.stderr)]
            for name, result in forms]  # fmt: skip
    rows.append([average.name, "", *SHARES.columns(average.value, average.stderr)])
    title = "The better form of each task" + ", as OLMES reports it" * (rule == "olmes")
    return simple_table("forms", ["task", "form", "acc. %", "± SE"], rows, texts=2, ruled={len(forms)}, title=title)


def _outcome_report(run: Run, key: str, seconds: Mapping[str, float] | None, detail: bool) -> Report:
    """Return the report of a run whose own measure is an outcome, with the accuracies of its tasks with choices."""
    manifest, comparable = run.manifest, ComparableChoices(run)
    metrics, by_rule = outcome_metrics(comparable, key), summarise_all(run.scores, manifest)
    averages, measure = outcome_averages(manifest, metrics), comparable.measure(key)
    chosen = by_rule[beside] if (beside := rule_beside(by_rule)) else None
    accuracies = {result.task: percent(result.value) for result in chosen.tasks} if chosen else {}
    by_task = {metric.task: metric for metric in metrics}

    def cells(metric: Metric) -> list[str]:
        numbers = MEANS.columns(metric.value or 0.0, metric.stderr)
        if not metric.n:  # an average
            return ["", *numbers, ""]
        return [f"{metric.n:,}", *numbers, accuracies.get(metric.task, "")]

    of_groups = [(average["name"], average_metric(average)) for average in averages]
    headers = ["task", "n", measure.name, "± SE", "acc. %"]
    table = results_table(manifest, by_task, of_groups, headers, cells, seconds)
    lines = [measure.words, *([f"acc.: rule {chosen.rule}"] if chosen else []), *_averages_note(manifest)]
    tables = [table.with_notes(_notes(manifest, lines, metrics))]
    if detail:
        tables.append(outcomes_table(run, chosen.rule if chosen else key))
    records = [{"kind": "task", "outcome": key} | outcome_entries(metric) for metric in metrics]
    content = about_run(run, seconds) | {"documents": manifest["documents"], "outcome": key, "tasks": records}
    return Report(tables, content=content | {"averages": averages}, records=records)


def about_run(run: Run, seconds: Mapping[str, float] | None) -> dict[str, Any]:
    about = {"run": run.manifest["id"], "folder": str(run.folder), "seconds": seconds}
    more = {"caveats": run.manifest["caveats"]} if "caveats" in run.manifest else {}
    return about | {"specification": run.manifest["specification"]} | more


def accuracy_table(results: Results, manifest: Mapping[str, Any], seconds: Mapping[str, float] | None) -> Table:
    """Return the accuracies of all tasks and the averages under one rule; without `seconds`, no column for them."""

    def cells(result: TaskResult | Average) -> list[str]:
        accuracy = SHARES.columns(result.value, result.stderr)
        if isinstance(result, Average):
            return ["", *accuracy, "", "", ""]
        return [f"{result.n:,}", *accuracy, percent(result.chance), f"{result.ties or ''}", f"{result.truncated or ''}"]

    by_task = {task.task: task for task in results.tasks}
    averages = [(average.name, average) for average in results.averages]
    headers = ["task", "n", "acc. %", "± SE", "chance", "ties", "cut"]
    table = results_table(manifest, by_task, averages, headers, cells, seconds)
    return table.with_notes(_notes(manifest, _lines(results, manifest), results.tasks))


def results_table(
    manifest: Mapping[str, Any],
    by_task: Mapping[str, Any],
    averages: Sequence[tuple[str, Any]],
    headers: Sequence[str],
    cells: Callable[[Any], Sequence[str]],
    seconds: Mapping[str, float] | None = None,
    title: str = "",
) -> Table:
    """Return a table with a row for each task and each average of several, by group; its empty columns are left out.

    `averages`, with their names, are of the groups and then of all tasks if there are several groups; `cells` makes a
    row from a result.
    """
    # Without the groups of which no task has a result, such as those of gold answers under a rule
    groups = [[task for task in tasks if task in by_task] for tasks in manifest["groups"].values()]
    groups = [tasks for tasks in groups if tasks]
    rows: list[list[str]] = []
    ruled = set()
    known = seconds or {}

    def add(name: str, tasks: Collection[str], result: Any, spent: float | None = None) -> None:
        shown = "" if seconds is None or spent is None else fixed(spent, 1)
        rows.append([name + caveat_mark(manifest, tasks), *cells(result), shown])

    for tasks, (name, average) in zip(groups, averages, strict=False):
        for task in tasks:
            add(label_of(task, manifest).full, [task], by_task[task], known.get(task, 0.0))
        if len(tasks) > 1:
            add(name, tasks, average)
    if len(groups) > 1:
        ruled.add(len(rows))
        name, average = averages[-1]
        add(name, by_task, average, sum(known.values()))
    return filled_table("results", [*headers, "seconds"], rows, ruled=ruled, title=title)


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
    return table.with_notes(filter(None, (*unusable, *invalid_rules())))


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
            rows.append([outcome.scale.name, *[UNKNOWN] * (len(tasks) + 1)])
        else:
            values = [metric.value for metric in metrics if metric.value is not None]
            means = [*values, sum(values) / len(values)]
            rows.append(
                [
                    outcome.scale.name + direction_mark(outcome.scale.higher_is_better),
                    *map(MEANS.value, means),
                ]
            )
    names = [label_of(task, run.manifest).short for task in tasks]
    title = f"The same scores as continuous outcomes (means over documents; {LOWER_NOTE})"
    table = simple_table("outcomes", ["outcome", *names, "Avg."], rows, title=title)
    return table.with_notes([*notes, *invalid_outcomes()])


def marked_label(task: str, manifest: Mapping[str, Any]) -> str:
    """Return a task's label, with an asterisk if it has caveats."""
    return label_of(task, manifest).full + caveat_mark(manifest, [task])


def _notes(manifest: Mapping[str, Any], lines: Iterable[str], results: Iterable[Any]) -> tuple[str, ...]:
    lacks_error = any(result.stderr is None for result in results)
    return notes_below(manifest, lines, lacks_error=lacks_error, examples="", sources=True)


def _lines(results: Results, manifest: Mapping[str, Any]) -> Iterator[str]:
    yield rule_note(results.rule)
    yield from macro_note({task.task: marked_label(task.task, manifest) for task in results.tasks})
    yield from _averages_note(manifest)
    if any(task.ties for task in results.tasks):
        yield "ties: documents with several best choices; the first of them is the prediction, as in lm-eval"
    if cut := [task.task for task in results.tasks if task.truncated]:
        limit = f", or the {MOST_TOKENS:,} tokens of OLMES" if any(task in request_tasks() for task in cut) else ""
        yield f"cut: documents whose context was {TRUNCATED}{limit}"


def _averages_note(manifest: Mapping[str, Any]) -> list[str]:
    words = "averages: unweighted means over tasks; ±: over documents, of which those of one source are one draw"
    return [words] if len(manifest["documents"]) > 1 else []


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
