"""Parameters of commands: their types, completion, environment variables, and how they are declared.

An environment variable sets an option as the command line does; a value may be given once in each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from evalkit.errors import EvalkitError, UnknownNameError, UsageError
from evalkit.inputs import values

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


_COMPLETED = {
    "--suite": "evalkit.benchmarks.registry:suite_names",
    "--rule": "evalkit.runs.rules:all_rules",
    "--outcome": "evalkit.runs.score_table:OUTCOMES",
    "--template": "evalkit.benchmarks.multiple_choice.templates:template_names",
    "--task": "evalkit.data:TASKS",
    "--tasks": "evalkit.data:TASKS",
    "--to": "evalkit.exchange.exports:form_names",
    "--measure": "evalkit.benchmarks.attention.groups:MEASURES",
    "--benchmark": "",
    "name": "evalkit.tables.layout:layout_names",
    "figure": "evalkit.benchmarks.attention.groups:KINDS",
    "run": "evalkit.runs.finding:root_of_runs",
    "runs": "evalkit.runs.finding:root_of_runs",
}
"""Option or argument → its known names: an object or a function of other rooms. A file is accepted in place of any."""


def _names_of(parameter: str, study: Path | None) -> Iterable[str]:
    if study is not None:
        from evalkit.studies.study_file import read_study

        content = read_study(study)
        return content.names if parameter == "runs" else [benchmark.name for benchmark in content.benchmarks]
    if not (source := _COMPLETED[parameter]):
        return ()
    known = resolve_name(source)
    known = known() if callable(known) else known
    if isinstance(known, Path):
        return [path.name for path in sorted(known.glob("*/"))]
    return [getattr(item, "name", item) for item in known]


def completer(parameter: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]] | None:
    """Return the completer of an option or an argument; None where its type completes it."""
    if parameter not in _COMPLETED:
        return None

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, prefix = incomplete.rpartition(",") if parameter == "--tasks" else ("", "", incomplete)
        try:
            names = _names_of(parameter, ctx.params.get("study") if parameter in ("runs", "--benchmark") else None)
        except EvalkitError:
            names = ()
        items = [CompletionItem(before + comma + name) for name in names if name.startswith(prefix)]
        return items or [CompletionItem(incomplete, type="file")]

    return complete


class Option(click.Option):
    """An option with one value; a second value or an empty variable is rejected."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        if self.is_flag or self.multiple:
            super().add_to_parser(parser, ctx)
        else:  # all values are collected, so that a second one is detected
            parser.add_option(obj=self, opts=self.opts, dest=self.name, action="append", nargs=1)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> Any:
        if not self.multiple and isinstance(given := opts.get(self.name or ""), list):
            if len(given) > 1:
                shown = ", ".join(map(str, given))
                raise UsageError(f"{long_name(self.opts)} is given {len(given)} times ({shown}); give it once")
            opts = {**opts, self.name or "": given[0]}
        return super().consume_value(ctx, opts)

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        if isinstance(self.envvar, str) and os.environ.get(self.envvar, "set").strip() == "":
            raise UsageError(f"{self.envvar} is set and empty; unset it, or give a value")
        value = super().resolve_envvar_value(ctx)
        # EVALKIT_SUITE is for several commands: another benchmark's suite is ignored
        if value and self.name == "suite" and isinstance(self.type, click.Choice) and value not in self.type.choices:
            from evalkit.benchmarks.registry import kind_of_suite

            with suppress(UnknownNameError):
                return None if kind_of_suite(value) else value
        return value


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
        margin: float = super().convert(value, param, ctx)
        if not math.isfinite(margin):
            self.fail(f"{value} is not a finite number", param, ctx)
        return margin


def _display_name(param: click.Parameter | None) -> str:
    if isinstance(param, click.Option):
        return long_name(param.opts)
    return "argument" if param is None else param.human_readable_name


TEXT, FOLDER, MARGIN = _TextParam(), _PathParam(), _MarginParam(min=0)


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
        for declare in reversed(options):
            command = declare(command)
        return command

    return add


def is_typed(ctx: click.Context, name: str) -> bool:
    """Whether an option is given on the command line, not in the environment or a config file."""
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def given_flags(options: Mapping[str, Any]) -> list[str]:
    """Return the flags of the options that have a value."""
    return [flag(name) for name, value in options.items() if value is not None and value is not False and value != ()]


def exclude(**options: Any) -> None:
    """Raise a `UsageError` if more than one of these options is given."""
    if len(flags := given_flags(options)) > 1:
        raise UsageError(f"{' and '.join(flags)} cannot be combined; give one of them")


def require(needed: str, is_given: bool, **options: Any) -> None:
    """Raise a `UsageError` if one of these options is given without the one that it needs."""
    if not is_given and (flags := given_flags(options)):
        raise UsageError(f"{flags[0]} needs {needed}; give both, or neither")
