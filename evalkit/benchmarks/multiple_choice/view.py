"""What a person reads on a terminal: the result table, rules side by side, and rendered prompts.

In: results, scores, encoded questions. Out: strings. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pandas as pd

from evalkit.benchmarks.multiple_choice.prompts import EncodedQuestion
from evalkit.benchmarks.multiple_choice.suites import label, short_label
from evalkit.models.context import Extension
from evalkit.reporting.decimals import percent
from evalkit.reporting.escape import printable
from evalkit.reporting.page import aligned
from evalkit.runs.batch_devices import mixture
from evalkit.runs.folder import Run
from evalkit.runs.traits import unofficial
from evalkit.scores.results import Results, summarise_all
from evalkit.scores.rules import all_rules, find_rule

COLOURS = {
    "special": "magenta",
    "instruction": "blue",
    "context": "cyan",
    "continuation": "green",
    "end": "yellow",
}
"""Of segments, in `--show-prompts`."""


def show_choices(run: Run, form: str, rule: str | None, detail: bool) -> str:
    """A finished run under one rule, its own if none is named; as JSON, or as text with what every rule makes of its
    scores, and with `detail` MMLU's subjects.
    """
    results = run.results(rule)
    if form == "json":
        about = {"run": run.manifest["id"], "folder": str(run.folder), "seconds": run.seconds}
        sources = {kind: run.manifest[kind] for kind in ("documents", "examples") if kind in run.manifest}
        return json.dumps(about | sources | results.to_json(), indent=2)
    details = [subtask_table(results, task) for task in results.subtasks] if detail else []
    rules = rules_table(run.scores, run.manifest, results.rule)
    return "\n\n".join([result_table(results, run.manifest, run.seconds), *details, rules])


def result_table(results: Results, manifest: Mapping[str, Any], seconds: Mapping[str, float]) -> str:
    """Accuracy of every task and the averages, under one rule, in percent."""
    sources, examples = manifest["documents"], manifest.get("examples", {})
    marked = {task for tasks in unofficial(manifest).values() for task in tasks}
    rows: list[list[Any]] = []
    groups: dict[str, list[str]] = manifest["groups"]
    by_name = {task.task: task for task in results.tasks}
    for members, average in zip(groups.values(), results.averages, strict=False):
        for name in members:
            task = by_name[name]
            mark = "*" if name in marked else ""
            rows.append(
                [
                    label(name, manifest.get("labels")) + mark,
                    task.n,
                    percent(task.accuracy),
                    _plus_minus(task.stderr),
                    percent(task.chance),
                    task.ties or "",
                    task.truncated or "",
                    f"{seconds.get(name, 0.0):.1f}",
                ]
            )
        if len(members) > 1:
            rows.append([average.name, "", *_average_cells(average), "", "", "", ""])
    if len(groups) > 1:
        overall = results.average
        rows.append([overall.name, "", *_average_cells(overall), "", "", "", f"{sum(seconds.values()):.1f}"])
    headers = ["task", "n", "acc. %", "± SE", "chance", "ties", "cut", "seconds"]
    # A column that is empty throughout (no ties, no cut documents) only takes room
    keep = [i for i in range(len(headers)) if any(row[i] != "" for row in rows)]
    table = aligned(
        [[row[i] for i in keep] for row in rows],
        [headers[i] for i in keep],
        tablefmt="simple",
        colalign=["left"] + ["right"] * (len(keep) - 1),
    )
    notes = [f"rule {results.rule}: {find_rule(results.rule).description}"]
    if shots := manifest["specification"].get("num_fewshot", 0):
        notes.append(f"{shots}-shot: {shots} solved example{'s' * (shots > 1)} before each question")
    if extension := manifest["specification"].get("context_extension"):
        notes.append(Extension(**extension).describe())
    notes += mixture(manifest)
    if any(task.ties for task in results.tasks):
        notes.append("ties: documents whose best score is shared; the first such choice counts, as in lm-eval")
    if any(task.truncated for task in results.tasks):
        notes.append("cut: documents whose context lost tokens on its left to fit the model's window")
    notes.append("documents: " + _sources(sources))
    if examples:
        notes.append("examples: " + _sources(examples))
    if marked:
        notes.append("*: not the official documents of the task")
    return "\n".join([table, "", *map(printable, notes)])


def rules_table(scores: pd.DataFrame, manifest: Mapping[str, Any], rule: str) -> str:
    """Every task's accuracy under every rule, and how far each rule moves the average from `rule`'s."""
    by_rule = summarise_all(scores, manifest)
    base = by_rule[rule].average
    tasks = [task.task for task in by_rule[rule].tasks]
    rows = []
    for name, results in by_rule.items():
        moved = results.average.accuracy - base.accuracy
        rows.append(
            [
                f"{name} <" if name == rule else name,
                *(percent(task.accuracy) for task in results.tasks),
                percent(results.average.accuracy),
                "" if name == rule else percent(moved, signed=True),
            ]
        )
    headers = [
        "rule",
        *(short_label(task, manifest.get("short"), manifest.get("labels")) for task in tasks),
        "Avg.",
        "moves by",
    ]
    table = aligned(
        rows,
        headers,
        tablefmt="simple",
        colalign=["left"] + ["right"] * (len(headers) - 1),
    )
    absent = [one.name for one in all_rules() if one.name not in by_rule]
    note = f"\nnot scored by this run: {', '.join(absent)}" if absent else ""
    return f"The same scores under every rule (accuracy in %):\n\n{table}{note}"


def subtask_table(results: Results, task: str) -> str:
    """The subjects of one task."""
    rows = [
        [part.task.removeprefix(f"{task}_"), part.n, percent(part.accuracy), _plus_minus(part.stderr)]
        for part in results.subtasks[task]
    ]
    return aligned(rows, [label(task), "n", "acc. %", "± SE"])


def prompt_text(encoded: EncodedQuestion, tokenizer: Any) -> str:
    """A question's sequences with their segments in colour and their token counts."""
    question = encoded.question
    lines = [click.style(printable(f"{question.label}, gold answer {question.gold}"), bold=True)]
    for choice, sequence in enumerate(encoded.sequences):
        spans = sequence.spans()
        text = "".join(
            click.style(printable(tokenizer.decode(sequence.tokens[start:end].tolist()), "\n\t"), fg=COLOURS[segment])
            for segment, start, end in spans
        )
        counts = ", ".join(
            click.style(f"{segment} {end - start}", fg=COLOURS[segment]) for segment, start, end in spans
        )
        cut = f", {sequence.truncated} context tokens cut" if sequence.truncated else ""
        mark = "*" if choice == question.gold else " "
        lines += [f"[{choice}]{mark} {len(sequence.tokens)} tokens: {counts}{cut}", text, ""]
    return "\n".join(lines)


def _sources(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Where the documents came from, tasks named where they differ."""
    by_source: dict[str, list[str]] = {}
    for task, found in documents.items():
        kind, _, place = found["source"].partition(" ")
        source = f"{kind} {Path(place).parent}" if kind == "data-dir" else found["source"]
        by_source.setdefault(source, []).append(task)
    if len(by_source) == 1:
        return next(iter(by_source))
    return "; ".join(f"{', '.join(tasks)} from {source}" for source, tasks in by_source.items())


def _average_cells(average: Any) -> list[str]:
    return [percent(average.accuracy), _plus_minus(average.stderr)]


def _plus_minus(stderr: float | None) -> str:
    return "–" if stderr is None else f"± {percent(stderr)}"
