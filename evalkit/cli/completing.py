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


def _runs() -> Iterable[str]:
    from evalkit.runs.finding import root_of_runs

    return (path.name for path in sorted(root_of_runs().glob("*/")))


_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "--suite": _suites,
    "--rule": _rules,
    "--template": _templates,
    "--tasks": _tasks,
    "--to": _exports,
    "name": _tables,
    "run": _runs,
    "runs": _runs,
}
"""Option or argument → its known names. A file is accepted in place of any of them."""
_LISTS = ("--tasks",)
"""Options with several comma-separated names."""


def completer(parameter: str) -> Completer | None:
    """Return the completer of an option or an argument; None where its type completes it."""
    if parameter not in _NAMES:
        return None

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, prefix = incomplete.rpartition(",") if parameter in _LISTS else ("", "", incomplete)
        found = [CompletionItem(before + comma + name) for name in _NAMES[parameter]() if name.startswith(prefix)]
        return found or [CompletionItem(incomplete, type="file")]

    return complete
