"""Kinds of parameters of a command, command groups, and the functions that declare parameters.

An environment variable sets an option as the command line does; a value may be given once in each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from evalkit.errors import EvalkitError, UnknownNameError, UsageError
from evalkit.inputs import values

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


_COMPLETED = ("--suite", "--rule", "--outcome", "--template", "--task", "--tasks", "--to", "--measure", "--benchmark",
              "name", "figure", "run", "runs")  # fmt: skip
"""Options and arguments whose names are completed. A file is accepted in place of any of them."""
_LISTS = ("--tasks",)
"""Options with several comma-separated names."""


def _names_of(parameter: str) -> Iterable[str]:
    """Return the known names for an option or an argument."""
    match parameter:
        case "--suite":
            from evalkit.benchmarks.registry import benchmark, kinds

            found: list[str] = []
            for kind in kinds():
                with suppress(EvalkitError):  # of a package that cannot be loaded
                    found += benchmark(kind).suites()
            return found
        case "--rule":
            from evalkit.runs.rules import all_rules

            return [rule.name for rule in all_rules()]
        case "--outcome":
            from evalkit.runs.continuous import ACCURACY, OUTCOMES

            return ACCURACY, *OUTCOMES
        case "--template":
            from evalkit.benchmarks.multiple_choice.templates import template_names

            return template_names()
        case "--task" | "--tasks":
            from evalkit.data import TASKS

            return TASKS
        case "--to":
            from evalkit.exchange.exports import form_names

            return form_names()
        case "name":
            from evalkit.tables.layout import layout_names

            return layout_names()
        case "figure":
            from evalkit.benchmarks.attention.groups import KINDS

            return KINDS
        case "--measure":
            from evalkit.benchmarks.attention.groups import MEASURES

            return MEASURES
        case "run" | "runs":
            from evalkit.runs.finding import root_of_runs

            return [path.name for path in sorted(root_of_runs().glob("*/"))]
        case _:
            return ()


def _names_of_study(path: Path, parameter: str) -> Iterable[str]:
    from evalkit.studies.study_file import read_study

    try:
        study = read_study(path)
    except EvalkitError:
        return ()
    return study.names if parameter == "runs" else [one.name for one in study.benchmarks]


def completer(parameter: str) -> Completer | None:
    """Return the completer of an option or an argument; None where its type completes it."""
    if parameter not in _COMPLETED:
        return None

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, prefix = incomplete.rpartition(",") if parameter in _LISTS else ("", "", incomplete)
        study = ctx.params.get("study") if parameter in ("runs", "--benchmark") else None
        names = _names_of(parameter) if study is None else _names_of_study(study, parameter)
        found = [CompletionItem(before + comma + name) for name in names if name.startswith(prefix)]
        return found or [CompletionItem(incomplete, type="file")]

    return complete


Command = TypeVar("Command", bound=Callable[..., Any])

SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 100,
}


class Commands(click.Group):
    """A group that suggests the nearest command for a mistyped one."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        unknown = args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-")
        if unknown and not ctx.resilient_parsing:  # shell completion shows no message
            raise UnknownNameError("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


class Option(click.Option):
    """An option with one value; a second value or an empty one is rejected."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Make the parser collect all values, so that a second one is detected."""
        if self.is_flag or self.multiple:
            super().add_to_parser(parser, ctx)
        else:
            parser.add_option(obj=self, opts=self.opts, dest=self.name, action="append", nargs=1)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> Any:
        """Return the single value and its source."""
        if not self.multiple and isinstance(given := opts.get(self.name or ""), list):
            if len(given) > 1:
                shown = ", ".join(map(str, given))
                raise UsageError(f"{long_name(self.opts)} is given {len(given)} times ({shown}); give it once")
            opts = {**opts, self.name or "": given[0]}
        return super().consume_value(ctx, opts)

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the environment variable's value; an empty one, which click ignores, is rejected."""
        if isinstance(self.envvar, str) and os.environ.get(self.envvar, "set").strip() == "":
            raise UsageError(f"{self.envvar} is set and empty; unset it, or give a value")
        value = super().resolve_envvar_value(ctx)
        # Several commands read one variable: a value that is valid for another command only is ignored
        if (
            value is not None
            and not _accepts(self, value)
            and any(_accepts(one, value) for one in _same_variable(self, ctx))
        ):
            return None
        return value


def _accepts(option: click.Option, value: str) -> bool:
    if isinstance(option.type, _SuiteParam):
        return option.type.knows(value)
    if isinstance(option.type, click.Choice):
        return value in option.type.choices or value.replace("_", "-") in option.type.choices
    return True


def _same_variable(option: click.Option, ctx: click.Context) -> Iterator[click.Option]:
    """Yield the options of all commands that the same variable sets."""
    commands = [ctx.find_root().command]
    while commands:
        command = commands.pop()
        yield from (one for one in command.params if isinstance(one, click.Option) and one.envvar == option.envvar)
        commands += command.commands.values() if isinstance(command, click.Group) else ()


class _TextParam(click.ParamType):  # type: ignore[type-arg]
    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "" and isinstance(param, click.Argument) and param.required:
            raise UsageError(f"{_display_name(param)} is empty; give a value")
        return values.text(_display_name(param), value)


class _PathParam(click.ParamType):  # type: ignore[type-arg]
    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return values.path(_display_name(param), value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class _MarginParam(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        return found


def _display_name(param: click.Parameter | None) -> str:
    """Return the name of an option or an argument in messages."""
    if isinstance(param, click.Option):
        return long_name(param.opts)
    return "argument" if param is None else param.human_readable_name


class _SuiteParam(_TextParam):
    """Parameter type: a suite of any benchmark."""

    def knows(self, value: str) -> bool:
        """Return whether a suite exists."""
        from evalkit.benchmarks.registry import kind_of_suite

        try:
            return bool(kind_of_suite(value))
        except UnknownNameError:
            return False


TEXT, FOLDER, MARGIN, SUITE = _TextParam(), _PathParam(), _MarginParam(min=0), _SuiteParam()


def argument(name: str, **settings: Any) -> Callable[[Command], Command]:
    """Declare a positional argument."""
    return click.argument(name, **{"type": TEXT, "shell_complete": completer(name)} | settings)


def typed_option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    """Declare an option that only the command line sets."""
    return click.option(*names, cls=Option, **settings_of_option(names, has_variable=False, **settings))


def option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    """Declare an option that `EVALKIT_<NAME>` sets too."""
    shown = settings.get("default") is not None
    return click.option(*names, cls=Option, **settings_of_option(names, show_default=shown, **settings))


def settings_of_option(names: Sequence[str], has_variable: bool = True, **settings: Any) -> dict[str, Any]:
    """Return the arguments of an `Option`: its variable, and without another type that of text, with completion."""
    if has_variable:
        settings["envvar"] = "EVALKIT_" + long_name(names)[2:].replace("-", "_").upper()
    if settings.get("is_flag"):
        return settings
    return {"type": TEXT, "shell_complete": completer(long_name(names))} | settings


def long_name(names: Sequence[str]) -> str:
    return next(name for name in names if name.startswith("--"))


def comma_separated(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else values.names(long_name(parameter.opts), value)


def option_group(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Combine options into one decorator, in this order."""

    def add(command: Command) -> Command:
        for one in reversed(options):
            command = one(command)
        return command

    return add


def is_typed(ctx: click.Context, name: str) -> bool:
    """Return whether an option is given on the command line, not in the environment or a config file."""
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
