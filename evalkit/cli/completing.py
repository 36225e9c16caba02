"""Shell completion of the names that options and arguments accept, looked up on completion."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import click
from click.shell_completion import CompletionItem

from evalkit.errors import EvalkitError

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _suites() -> Iterable[str]:
    from evalkit.benchmarks.registry import benchmark, kinds

    for kind in kinds():
        with suppress(EvalkitError):  # of a package that cannot be loaded
            yield from benchmark(kind).suites()


def _outcomes() -> Iterable[str]:
    from evalkit.scores.outcomes import ACCURACY, OUTCOMES

    return ACCURACY, *OUTCOMES


def _rules() -> Iterable[str]:
    from evalkit.scores.rules import all_rules

    return (rule.name for rule in all_rules())


def _templates() -> Iterable[str]:
    from evalkit.benchmarks.multiple_choice.templates import template_names

    return template_names()


def _tasks() -> Iterable[str]:
    from evalkit.data import TASKS

    return TASKS


def _exports() -> Iterable[str]:
    from evalkit.export import form_names

    return form_names()


def _tables() -> Iterable[str]:
    from evalkit.tables.layout import layout_names

    return layout_names()


def _figures() -> Iterable[str]:
    from evalkit.benchmarks.attention.figures.kinds import KINDS

    return KINDS


def _measures() -> Iterable[str]:
    from evalkit.analysis.groups import MEASURES

    return MEASURES


def _runs() -> Iterable[str]:
    from evalkit.runs.finding import root_of_runs

    return (path.name for path in sorted(root_of_runs().glob("*/")))


def _of_study(ctx: click.Context, parameter: str) -> Iterable[str] | None:
    """Return the names that the study of the command has for a parameter; None where they are not a study's."""
    if ctx.params.get("study") is None or parameter not in ("runs", "--benchmark"):
        return () if parameter == "--benchmark" else None
    from evalkit.studies.records import recorded_checkpoints
    from evalkit.studies.study_file import read_study

    try:
        study = read_study(ctx.params["study"], recorded_checkpoints)
    except EvalkitError:
        return ()
    return study.names if parameter == "runs" else (one.name for one in study.benchmarks)


_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "--suite": _suites,
    "--rule": _rules,
    "--outcome": _outcomes,
    "--template": _templates,
    "--task": _tasks,
    "--tasks": _tasks,
    "--to": _exports,
    "--measure": _measures,
    "name": _tables,
    "figure": _figures,
    "run": _runs,
    "runs": _runs,
    "--benchmark": tuple,
}
"""Option or argument → its known names. A file is accepted in place of any of them."""
_LISTS = ("--tasks",)
"""Options with several comma-separated names."""


def completer(parameter: str) -> Completer | None:
    """Return the completer of an option or an argument; None where its type completes it."""
    if parameter not in _NAMES:
        return None

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, prefix = incomplete.rpartition(",") if parameter in _LISTS else ("", "", incomplete)
        if (names := _of_study(ctx, parameter)) is None:
            names = _NAMES[parameter]()
        found = [CompletionItem(before + comma + name) for name in names if name.startswith(prefix)]
        return found or [CompletionItem(incomplete, type="file")]

    return complete
