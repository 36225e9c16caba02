"""Report of a finished run under several prompts.

In: a run. Out: a `Report` with the mean and spread of each task, the accuracies under each prompt, and both under every
rule, in percent; and a figure. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from evalkit.benchmarks.choices_report import (
    about_run,
    marked_label,
    results_table,
)
from evalkit.benchmarks.multiple_choice.varied_results import (
    PromptTables,
    VariedAccuracy,
    VariedResults,
    prompt_tables,
    subject_accuracies,
    varied_results,
)
from evalkit.errors import check_known
from evalkit.reporting.decimals import percent
from evalkit.reporting.figures import RunFigure
from evalkit.reporting.numbers import SHARES, UNKNOWN
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.runs.folder import Run
from evalkit.runs.notes import TRUNCATED, notes_below, rule_note
from evalkit.suites.suites import label_of


def varied_report(run: Run, rule: str | None = None, detail: bool = False) -> Report:
    """Return the report of a finished run under one rule; arguments as of `FinishedResults.report`."""
    tables, manifest = prompt_tables(run), run.manifest
    name = rule or str(manifest["rule"])
    check_known(f"rule of run {run.folder}", [name], tables.rules)
    by_rule = {other: varied_results(tables, manifest, other) for other in tables.rules}
    results = by_rule[name]
    notes = notes_below(
        manifest,
        _lines(run, tables, results),
        lacks_error=any(task.stderr is None for task in results.tasks),
        examples=", in the original order",
        sources=True,
    )
    return Report(
        (
            _spread_table(run, results),
            _prompts_table(run, tables, results),
            *(_subject_tables(run, tables, results) if detail else ()),
            _rules_table(run, by_rule, name),
        ),
        notes=notes,
        content=about_run(run, run.seconds) | {"prompts": manifest["prompts"]} | results.to_json(),
        records=list(_records(results)),
    )


def _spread_table(run: Run, results: VariedResults) -> Table:
    def cells(result: VariedAccuracy) -> list[str]:
        extremes = [UNKNOWN, UNKNOWN]
        if len(result.prompts) > 1:
            # The first prompt of several with the same accuracy
            ends = (extreme(result.prompts, key=attrgetter("value")) for extreme in (min, max))
            extremes = [f"{percent(end.value)} ({end.prompt})" for end in ends]
        n = "" if result.n is None else f"{result.n:,}"
        return [n, str(len(result.prompts)), *_numbers(result), *extremes]

    by_task = {task.name: task for task in results.tasks}
    averages = [(average.name, average) for average in results.averages]
    headers = ["task", "n", "prompts", "mean %", "± SE", "SD", "by chance", "lowest", "highest"]
    title = f"Accuracy over prompts, rule {results.rule}"
    return results_table(run.manifest, by_task, averages, headers, cells, title=title)


def _numbers(result: VariedAccuracy) -> list[str]:
    """Return the mean, its error, and both deviations."""
    return [*SHARES.columns(result.value, result.stderr), *map(SHARES.value, (result.spread, result.by_chance))]


def _columns(run: Run, results: VariedResults) -> tuple[list[str], list[VariedAccuracy]]:
    """Return the headers and the results of the tasks and, if there are several, of their average."""
    names = [label_of(task.name, run.manifest).short for task in results.tasks]
    if len(names) == 1:
        return names, results.tasks
    return [*names, "Avg."], [*results.tasks, results.average]


def _prompts_table(run: Run, tables: PromptTables, results: VariedResults) -> Table:
    names, columns = _columns(run, results)
    accuracies = [{under.prompt: percent(under.value) for under in column.prompts} for column in columns]
    rows = [[prompt, *(of_task.get(prompt, UNKNOWN) for of_task in accuracies)] for prompt in tables.prompts]
    title = f"Accuracy in % under each prompt, rule {results.rule}"
    return simple_table("prompts", ["prompt", *names], rows, title=title)


def _subject_tables(run: Run, tables: PromptTables, results: VariedResults) -> Iterator[Table]:
    for task in (task.name for task in results.tasks):
        rows = [
            [subject.name.removeprefix(f"{task}_"), f"{subject.n:,}", *_numbers(subject)]
            for subject in subject_accuracies(tables, task, results.rule)
        ]
        if rows:
            headers = [marked_label(task, run.manifest), "n", "mean %", "± SE", "SD", "by chance"]
            yield simple_table(task, headers, rows)


def _rules_table(run: Run, by_rule: dict[str, VariedResults], chosen: str) -> Table:
    rows = []
    for rule, results in by_rule.items():
        names, columns = _columns(run, results)
        means = [percent(column.value) for column in columns]
        rows.append([f"{rule} <" if rule == chosen else rule, *means, *_numbers(results.average)[2:]])
    title = "The same scores under every rule that all prompts support (mean over prompts in %; <: the rule above)"
    return simple_table("rules", ["rule", *names, "SD", "by chance"], rows, title=title)


def _lines(run: Run, tables: PromptTables, results: VariedResults) -> Iterator[str]:
    manifest, tasks = run.manifest, [task.name for task in results.tasks]
    base, *others = tables.prompts
    orders = [name for name in others if name not in manifest["prompts"]]
    unordered = [task for task in tasks if not orders or orders[0] not in tables.prompts_of(task)]
    yield rule_note(results.rule)
    yield f"prompt {base}: the run's own; each of the others differs from it in one factor"
    yield from (f"prompt {name}: {words}" for name, words in manifest["prompts"].items())
    if orders:
        yield f"prompts {', '.join(orders)}: the original options, in the order in which they are listed as A, B, …"
    if manifest["specification"]["prompts"]["choice_orders"] > 1 and unordered:
        alone = f"; in averages under an order the task counts with prompt {base}" if orders else ""
        names = ", ".join(label_of(task, manifest).full for task in unordered)
        yield f"no order of the options, since prompts do not list them: {names}{alone}"
    yield "mean, ± SE: mean over prompts and documents, and its standard error if other documents are drawn"
    yield (
        "SD: standard deviation of the accuracies over these prompts, which are a fixed set and no sample: it "
        "describes them, and is no error of the mean"
    )
    yield (
        "by chance: the SD to expect with these documents if no prompt were easier than another; only an SD well "
        "above it shows that the prompt matters"
    )
    if cut := [f"{marked_label(task.name, manifest)} {task.truncated:,}" for task in results.tasks if task.truncated]:
        yield f"documents whose context was {TRUNCATED}: {', '.join(cut)}"


def _records(results: VariedResults) -> Iterator[dict[str, Any]]:
    for kind, members in (("task", results.tasks), ("average", results.averages)):
        for result in members:
            about = {"kind": kind, "rule": results.rule, "task": result.name, "n": result.n}
            about |= {"metric": result.metric, "unit": result.unit, "higher_is_better": result.higher_is_better}
            mean = {"prompt": "mean", "value": result.value, "stderr": result.stderr, "spread": result.spread}
            for values in (mean, *(under.model_dump() | {"spread": None} for under in result.prompts)):
                yield about | values


def prompt_figures(runs: Sequence[Run], names: Sequence[str], models: Sequence[str]) -> list[RunFigure]:
    """Return the figure of each run, under its own rule."""
    figures = []
    for run, name in zip(runs, names, strict=True):
        results = varied_results(prompt_tables(run), run.manifest, run.manifest["rule"])
        words = f"Accuracy of {name} under each prompt, with 95 % intervals over documents; the line is the mean."
        labels = [label_of(task.name, run.manifest).full for task in results.tasks]
        figures.append(RunFigure(f"prompts-{run.manifest['id']}", words, partial(draw_prompts, results, labels)))
    return figures


def draw_prompts(results: VariedResults, labels: Sequence[str], path: Path) -> None:
    """Draw the accuracies of each task by prompt."""
    from evalkit.reporting.figures import GREY, line_look, new_figure, save_figure, style_axes

    prompts = list(dict.fromkeys(under.prompt for task in results.tasks for under in task.prompts))
    rows = [*zip(labels, results.tasks, strict=True)]
    if len(rows) > 1:
        rows.append((results.average.name, results.average))
    figure = new_figure(7.2, 0.9 + len(rows) * (0.2 + 0.13 * len(prompts)))
    axes = figure.subplots()
    named: set[str] = set()
    for row, (_, result) in enumerate(rows):
        axes.vlines(100 * result.value, row - 0.42, row + 0.42, color=GREY, lw=1, zorder=1)
        for under in result.prompts:
            number = prompts.index(under.prompt)
            height = row + 0.8 * ((number + 0.5) / len(prompts) - 0.5)
            reach = None if under.stderr is None else 100 * 1.96 * under.stderr
            name = None if under.prompt in named else under.prompt
            named.add(under.prompt)
            axes.errorbar(100 * under.value, height, xerr=reach, ms=4, lw=1, label=name, **line_look(number))
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlabel(f"accuracy in %, rule {results.rule}", fontsize=8)
    style_axes(axes)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, path)
