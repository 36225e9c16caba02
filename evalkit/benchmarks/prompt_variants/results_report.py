"""Report of a finished run under several prompts.

In: a run. Out: a `Report` with the mean and spread of each task, the accuracies under each prompt, and both under every
rule, in percent. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.multiple_choice.results_report import marked_label, plus_minus, sources_text
from evalkit.benchmarks.multiple_choice.suites import label_of
from evalkit.benchmarks.prompt_variants.results import (
    PromptTables,
    VariedAccuracy,
    VariedResults,
    prompt_tables,
    subject_accuracies,
    varied_results,
)
from evalkit.errors import UnknownNameError
from evalkit.models.context.extension import Extension
from evalkit.reporting.decimals import percent
from evalkit.reporting.figures import RunFigure
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.runs.batch_devices import mixture
from evalkit.runs.folder import Run
from evalkit.runs.rules import find_rule
from evalkit.runs.traits import unofficial

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_NONE = "–"


def varied_report(run: Run, rule: str | None = None, detail: bool = False) -> Report:
    """Return the report of a finished run under one rule.

    Args:
        run: a run under several prompts.
        rule: the scoring rule; None: the run's own.
        detail: whether to include the subjects of tasks that have them.

    Raises:
        UsageError: there is no such rule, or a prompt lacks the scores that it needs.
    """
    tables, manifest = prompt_tables(run), run.manifest
    if (name := rule or str(manifest["rule"])) not in tables.rules:
        raise UnknownNameError(f"rule of run {run.folder}", name, tables.rules)
    results = varied_results(tables, manifest, name)
    subjects = [_subjects(run, tables, one.name, results.rule) for one in results.tasks] if detail else []
    about = {"run": manifest["id"], "folder": str(run.folder), "seconds": run.seconds}
    content = about | {"specification": manifest["specification"], "prompts": manifest["prompts"]} | results.to_json()
    return Report(
        (
            _spread_table(run, results),
            _prompts_table(run, tables, results),
            *(table for table in subjects if table is not None),
            _rules_table(run, tables, results),
        ),
        notes=tuple(_notes(run, tables, results)),
        content=content,
        records=list(_records(results)),
    )


def _spread_table(run: Run, results: VariedResults) -> Table:
    """Return mean, standard error, spread and extremes of each task and average."""
    groups: dict[str, list[str]] = run.manifest["groups"]
    by_name = {one.name: one for one in results.tasks}
    rows: list[list[str]] = []
    for members, average in zip(groups.values(), results.averages, strict=False):
        rows += [_spread_row(marked_label(name, run.manifest), by_name[name]) for name in members]
        if len(members) > 1:
            rows.append(_spread_row(average.name, average))
    ruled = {len(rows)} if len(groups) > 1 else set()
    if ruled:
        rows.append(_spread_row(results.average.name, results.average))
    headers = ["task", "n", "prompts", "mean %", "± SE", "SD", "by chance", "lowest", "highest"]
    return simple_table("results", headers, rows, ruled=ruled, title=f"Accuracy over prompts, rule {results.rule}")


def _spread_row(name: str, one: VariedAccuracy) -> list[str]:
    extremes = [f"{percent(end.accuracy)} ({end.prompt})" for end in one.extremes]
    extremes = extremes if len(one.prompts) > 1 else [_NONE, _NONE]
    n = "" if one.n is None else f"{one.n:,}"
    errors = plus_minus(one.stderr), _percent(one.spread), _percent(one.by_chance)
    return [name, n, str(len(one.prompts)), percent(one.accuracy), *errors, *extremes]


def _percent(value: float | None) -> str:
    return _NONE if value is None else percent(value)


def _prompts_table(run: Run, tables: PromptTables, results: VariedResults) -> Table:
    """Return the accuracies of each task under each prompt."""
    columns = [*results.tasks, results.average] if len(results.tasks) > 1 else results.tasks
    accuracies = [{one.prompt: one.accuracy for one in column.prompts} for column in columns]
    rows = [
        [prompt, *(percent(found[prompt]) if prompt in found else _NONE for found in accuracies)]
        for prompt in tables.prompts
    ]
    names = [label_of(one.name, run.manifest).short for one in results.tasks] + ["Avg."] * (len(results.tasks) > 1)
    title = f"Accuracy in % under each prompt, rule {results.rule}"
    return simple_table("prompts", ["prompt", *names], rows, title=title)


def _subjects(run: Run, tables: PromptTables, task: str, rule: str) -> Table | None:
    if not (found := subject_accuracies(tables, task, rule)):
        return None
    rows = [
        [
            one.name.removeprefix(f"{task}_"),
            f"{one.n:,}",
            percent(one.accuracy),
            plus_minus(one.stderr),
            _percent(one.spread),
            _percent(one.by_chance),
        ]
        for one in found
    ]
    return simple_table(task, [marked_label(task, run.manifest), "n", "mean %", "± SE", "SD", "by chance"], rows)


def _rules_table(run: Run, tables: PromptTables, results: VariedResults) -> Table:
    """Return the mean over prompts of every task under every rule, with the spread of the average."""
    rows = []
    for rule in tables.rules:
        found = results if rule == results.rule else varied_results(tables, run.manifest, rule)
        means = [percent(one.accuracy) for one in found.tasks]
        average = [percent(found.average.accuracy)] if len(found.tasks) > 1 else []
        spread = _percent(found.average.spread), _percent(found.average.by_chance)
        rows.append([f"{rule} <" if rule == results.rule else rule, *means, *average, *spread])
    names = [label_of(one.name, run.manifest).short for one in results.tasks]
    headers = ["rule", *names, *(["Avg."] if len(names) > 1 else []), "SD", "by chance"]
    title = "The same scores under every rule that all prompts support (mean over prompts in %; <: the rule above)"
    return simple_table("rules", headers, rows, title=title)


def _notes(run: Run, tables: PromptTables, results: VariedResults) -> Iterator[str]:
    manifest, tasks = run.manifest, [one.name for one in results.tasks]
    base, *others = tables.prompts
    orders = [name for name in others if name not in manifest["prompts"]]
    reordered = [task for task in tasks if orders and orders[0] in tables.prompts_of(task)]
    unordered = [task for task in tasks if task not in reordered]
    yield f"rule {results.rule}: {find_rule(results.rule).description}"
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
    if shots := manifest["specification"].get("num_fewshot", 0):
        yield f"{shots}-shot: {shots} solved example{'s' * (shots > 1)} before each question, in the original order"
    if extension := manifest["specification"].get("context_extension"):
        yield Extension(**extension).describe()
    yield from mixture(manifest)
    if cut := [f"{marked_label(one.name, run.manifest)} {one.truncated:,}" for one in results.tasks if one.truncated]:
        yield f"documents whose context was truncated on the left to fit the context window: {', '.join(cut)}"
    if examples := manifest.get("examples"):
        yield "examples: " + sources_text(examples)
    yield "documents: " + sources_text(manifest["documents"])
    if unofficial(manifest):
        yield "*: not the official documents of the task"


def _records(results: VariedResults) -> Iterator[dict[str, Any]]:
    """Yield a record for each task and average, over all prompts and under each; accuracies are fractions."""
    for kind, members in (("task", results.tasks), ("average", results.averages)):
        for one in members:
            about = {"kind": kind, "rule": results.rule, "task": one.name, "n": one.n}
            yield about | {"prompt": "mean", "accuracy": one.accuracy, "stderr": one.stderr, "spread": one.spread}
            for under in one.prompts:
                values = {"prompt": under.prompt, "accuracy": under.accuracy, "stderr": under.stderr, "spread": None}
                yield about | values


_NORMAL = 1.96
_HEIGHT = 0.13
"""Inches of a prompt."""


def prompt_figures(runs: Sequence[Run], names: Sequence[str]) -> list[RunFigure]:
    """Return the figure of each run, under its own rule.

    Raises:
        EvalkitError: a run is damaged.
    """
    found = []
    for run, name in zip(runs, names, strict=True):
        results = varied_results(prompt_tables(run), run.manifest, run.manifest["rule"])
        words = f"Accuracy of {name} under each prompt, with 95 % intervals over documents; the line is the mean."
        labels = [label_of(one.name, run.manifest).full for one in results.tasks]
        found.append(RunFigure(f"prompts-{run.manifest['id']}", words, partial(draw_prompts, results, labels)))
    return found


def draw_prompts(results: VariedResults, labels: Sequence[str], path: Path) -> None:
    """Draw the accuracies of each task by prompt."""
    from evalkit.reporting.figures import new_figure, save_figure, style_axes

    prompts = list(dict.fromkeys(one.prompt for task in results.tasks for one in task.prompts))
    rows = [*zip(labels, results.tasks, strict=True)]
    if len(rows) > 1:
        rows.append((results.average.name, results.average))
    figure = new_figure(7.2, 0.9 + len(rows) * (0.2 + _HEIGHT * len(prompts)))
    axes = figure.subplots()
    for place, (_, one) in enumerate(rows):
        _draw_row(axes, place, one, prompts)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlabel(f"accuracy in %, rule {results.rule}", fontsize=8)
    style_axes(axes)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, path)


def _draw_row(axes: Axes, place: int, one: VariedAccuracy, prompts: Sequence[str]) -> None:
    from evalkit.reporting.figures import GREY, line_look

    axes.vlines(100 * one.accuracy, place - 0.42, place + 0.42, color=GREY, lw=1, zorder=1)
    for found in one.prompts:
        number = prompts.index(found.prompt)
        height = place + 0.8 * ((number + 0.5) / len(prompts) - 0.5)
        reach = None if found.stderr is None else 100 * _NORMAL * found.stderr
        shown = None if found.prompt in axes.get_legend_handles_labels()[1] else found.prompt
        axes.errorbar(100 * found.accuracy, height, xerr=reach, ms=4, lw=1, label=shown, **line_look(number))
