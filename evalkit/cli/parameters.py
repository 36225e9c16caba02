"""Commands: functions whose parameters are their arguments and options, each declared once.

    @command()
    def rescore(*, run: str = argument(), rule: str | None = option(None, "How …", "the run's own"), printer: Printer)

A parameter of a dataclass of settings stands for an option of each field. `**settings` stands for the settings of a
benchmark's request and of its model. Every option that is not a `typed_option` can also be given as an environment
variable and in a YAML file (`--config`): a value has the same meaning in each, and may be given once in each.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass, replace
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
from click.shell_completion import CompletionItem

from evalkit.errors import EvalkitError, UnknownNameError, UsageError
from evalkit.inputs import values
from evalkit.inputs.settings import Setting, setting, setting_of, settings_of
from evalkit.paths import RUNS

option = setting
typed_option = partial(setting, has_variable=False)
"""Declare an option that only the command line sets."""
argument = partial(setting, None, argument=True, required=True)

SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 100,
}


_GROUPS = {
    "ORIGIN": ("revision", "tokenizer"),
    "SELECTION": ("sample", "seed", "limit"),
    "COMPUTING": ("device", "device_map", "dtype", "attention", "quantise"),
    "CONTEXT": ("context", "context_method", "context_original", "context_config"),
    "TRUST": ("allow_pickle", "trust_remote_code"),
}
"""Settings that are beside each other in `--help`."""
MODEL_ALONE = "model"
"""In place of a benchmark: the settings of a model alone."""


_RETIRED = {
    "--from": "compare each run with the one that it was changed from, and give the two intervals",
    "--given": "run both sides on the same documents; a larger --sample scores only those that a smaller one has not",
}
"""Former option of `evalkit compare` → what to do."""


class Commands(click.Group):
    """A group that suggests the nearest command for a mistyped one."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        unknown = args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-")
        if unknown and not ctx.resilient_parsing:  # shell completion shows no message
            raise UnknownNameError("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


class ResumableAbort(click.Abort):
    """The interruption of a command that goes on where it was when it is given again."""


class Command(click.Command):
    """A command made of a function; its parameters are made when they are needed, since benchmarks are imported.

    `kind` is the benchmark whose settings, but those in `without`, are the function's `**settings`. In `--help`, they
    stand in `order`, names and names of `_GROUPS`, after parameters that it does not name; `...` are the settings that
    it does not name. `as_lm_eval`: the arguments may be written as those of lm-eval. `resumes`: whether the command
    computes runs; None: if it has the setting of their folder.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        kind: str = "",
        order: str = "",
        without: Sequence[str] = (),
        as_lm_eval: bool = False,
        resumes: bool | None = None,
    ) -> None:
        self.function = function
        self.kind = kind
        self.without = without
        self.as_lm_eval = as_lm_eval
        self.resumes = bool(kind) and "output" not in without if resumes is None else resumes
        self.order = [name for word in order.split() for name in _GROUPS.get(word, (word,))]
        super().__init__(name, callback=self._call, help=inspect.cleandoc(function.__doc__ or ""))
        del self.params  # click's empty list

    @cached_property
    def params(self) -> list[click.Parameter]:  # type: ignore[override]
        declared = [_parameter(setting) for setting in self._declared()]
        return [_CONFIG, *declared] if self.kind else declared

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.as_lm_eval:
            from evalkit.cli.lm_eval import in_long_form

            args = in_long_form(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if self.name == "compare" and error.option_name in _RETIRED:
                raise UsageError(f"{error.option_name} is retired: {_RETIRED[error.option_name]}") from error
            raise UsageError(_unknown_option(error.option_name, self, ctx)) from error
        except click.BadParameter as error:
            name = (error.param and error.param.name) or ""
            if name not in _EXPECTED:
                raise
            raise UsageError(f"{flag(name)}: {error.message.rstrip('.')}; {_EXPECTED[name]}") from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort) as error:
            only_shows = any(ctx.params.get(name) for name in ("dry", "dry_run", "show_prompts"))
            if self.resumes and not only_shows:
                click.echo(err=True)  # as click does, after the terminal's ^C
                raise ResumableAbort from error
            raise

    def _declared(self) -> Iterator[Setting]:
        hints, own = get_type_hints(self.function), dict[str, list[Setting]]()
        for name, parameter in inspect.signature(self.function).parameters.items():
            if parameter.default is not parameter.empty:
                own[name] = [setting_of(name, hints[name], parameter.default)]
            elif is_dataclass(hints[name]):
                own[name] = [*settings_of(hints[name]).values()]
        known = _settings_of_benchmark(self.kind) if self.kind else {}
        order = [name for name in own if name not in self.order] + self.order
        others = [name for name in known if name not in order and name not in self.without]
        for entry in order:
            for name in others if entry == "..." else [entry]:
                yield from own.get(name) or [known[name]]

    def _call(self, **given: Any) -> Any:
        for name, hint in get_type_hints(self.function).items():
            if is_dataclass(hint) and isinstance(hint, type):
                given[name] = hint(**{field: given.pop(field) for field in settings_of(hint)})
        return self.function(**given)


_EXPECTED = {"limit": "it counts documents, a fraction is none", "seed": "it is one number, of the random sample"}
"""Option → what its number is; lm-eval's are others."""


def _unknown_option(name: str, command: Command, ctx: click.Context) -> str:
    """Describe an unknown option: what replaces lm-eval's, the one that is meant, or the commands that have it."""
    from evalkit.cli.lm_eval import OPTIONS, advice

    if (known := advice(name)) is not None:
        return known
    unknown = f"unknown option {name}"
    own = _long_options(command)
    meant = _meant(name, [*own, *(OPTIONS if command.as_lm_eval else ())])
    if meant in own:
        return f"{unknown}: did you mean {meant}? See {ctx.command_path} --help"
    if meant:
        return f"{unknown}: for lm-eval's {meant}, {OPTIONS[meant]}"
    commands: dict[str, list[str]] = {}
    for typed, other in _all_commands(ctx.find_root().command):
        for option in _long_options(other):
            commands.setdefault(option, []).append(typed)
    if meant := _meant(name, commands):
        return f"{unknown}: {meant} is one of evalkit {', '.join(commands[meant])}; see {ctx.command_path} --help"
    return f"{unknown}; see {ctx.command_path} --help"


def _meant(name: str, options: Collection[str]) -> str:
    """Return the shortest option with the words of a name, else the one that is spelled most like it, else nothing."""
    words = {*name.split("-")}
    having = sorted((option for option in options if words <= {*option.split("-")}), key=len)
    return next(iter(having or get_close_matches(name, options, n=1, cutoff=0.85)), "")


def _long_options(command: click.Command) -> list[str]:
    return [name for param in command.params for name in param.opts if name.startswith("--")]


def _all_commands(group: click.Command, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield the commands of a group and its groups, with what is typed for each."""
    for name, command in getattr(group, "commands", {}).items():
        typed = f"{path} {name}".strip()
        yield from _all_commands(command, typed) if isinstance(command, click.Group) else [(typed, command)]


def command(
    group: click.Group | None = None, name: str = "", **declared: Any
) -> Callable[[Callable[..., Any]], Command]:
    """Make a command of a function, in a group if one is given; arguments as of `Command`."""

    def made(function: Callable[..., Any]) -> Command:
        new = Command(function, name or function.__name__, **declared)
        if group is not None:
            group.add_command(new)
        return new

    return made


def _settings_of_benchmark(kind: str) -> Mapping[str, Setting]:
    from evalkit.benchmarks.registry import benchmark
    from evalkit.models.loading.spec import ModelSpec

    if kind == MODEL_ALONE:
        return settings_of(ModelSpec)
    request = benchmark(kind).request
    known = settings_of(ModelSpec, request)
    return {**known, **{name: replace(known[name], default_text=text) for name, text in request.default_texts.items()}}


def _parameter(declared: Setting) -> click.Parameter:
    hint, more = declared.types[0], dict[str, Any]()
    is_tuple, default = get_origin(hint) is tuple, declared.default
    each = get_args(hint)[0] if is_tuple else hint
    kind: Any = FOLDER if each is Path else TEXT
    if declared.argument:
        more = {"nargs": -1 if is_tuple else 1, "required": declared.required, "metavar": declared.metavar}
        return click.Argument([declared.name], type=kind, shell_complete=_completer(declared.name), **more)
    if hint is bool:
        more, default = {"is_flag": True}, None
    elif get_origin(hint) is Literal:
        kind = click.Choice(get_args(hint))
    elif is_tuple and (declared.repeated or each is Path):
        more, default = {"multiple": True}, None
    elif is_tuple:
        more, default = {"callback": comma_separated}, ",".join(f"{value:g}" for value in default or ()) or None
    elif hint is float:
        kind = click.FloatRange(min=0)
    elif hint is int and not declared.word:
        kind = click.IntRange(declared.least, declared.most) if declared.shows_least else click.INT
    if declared.name in _CHECKS:
        more["callback"] = _CHECKS[declared.name]
    if default is not None:
        more |= {"default": default, "show_default": True}
    if declared.has_variable:
        more["envvar"] = "EVALKIT_" + declared.flag[2:].replace("-", "_").upper()
    if hint is not bool:
        more |= {"type": kind, "shell_complete": _completer(declared.flag)}
    text = f"{declared.help}  [default: {declared.default_text}]" if declared.default_text else declared.help
    names = [declared.flag, *([declared.short] if declared.short else []), declared.name]
    return Option(names, help=text, metavar=declared.metavar, required=declared.required, **more)


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
                raise UsageError(f"{self.opts[0]} is given {len(given)} times ({shown}); give it once")
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
        return values.text(_display_name(param), value)


class _PathParam(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return values.path(_display_name(param), value)


def _display_name(param: click.Parameter | None) -> str:
    return (
        "argument" if param is None else param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
    )


TEXT, FOLDER = _TextParam(), _PathParam()


def comma_separated(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else values.names(parameter.opts[0], value)


def _check_output(_: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Reject a file name in place of the folder of runs: users expect it to receive what is printed."""
    endings = (".tex", ".md", ".html", ".csv", ".json", ".txt", ".pdf", ".png", ".svg")
    if path is not None and parameter.default == RUNS and path.suffix in endings and not path.is_dir():
        raise UsageError(f"--output {path}: is the folder of runs; to save what is printed, redirect it: > {path}")
    return path


def _check_plot(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Validate a figure's path before hours of work."""
    from evalkit.reporting.figures import check_figure_path

    if path is not None:
        check_figure_path(path)
    return path


_CHECKS: dict[str, Any] = {"output": _check_output, "plot": _check_plot}


_COMPLETED = {
    "--suite": "evalkit.benchmarks.registry:suite_names",
    "--rule": "evalkit.runs.rules:all_rules",
    "--outcome": "evalkit.runs.continuous:all_outcomes",
    "--template": "evalkit.suites.templates:template_names",
    "--task": "evalkit.data:TASKS",
    "--tasks": "evalkit.data:TASKS",
    "--to": "evalkit.exchange.exports:form_names",
    "--measure": "evalkit.attention.groups:MEASURES",
    "--benchmark": "",
    "name": "evalkit.tables.layout:layout_names",
    "figure": "evalkit.attention.groups:KINDS",
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


def _completer(parameter: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]] | None:
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


def _read_config(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Make the values of a YAML file the defaults of a command's options."""
    if path is None:
        return
    from evalkit.inputs.reading import read_yaml_as_typed

    content = read_yaml_as_typed(path, UsageError, "config file") or {}
    if not isinstance(content, dict):
        raise UsageError(f"config file {path} must contain keys and values, such as 'model: demo'")
    # By the option's name on the command line, which may differ from the parameter's
    known = {param.opts[0][2:]: param for param in ctx.command.params if isinstance(param, click.Option)}
    known.pop("config")
    defaults: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("_", "-")
        if name not in known:
            raise UsageError(f"config file {path}: {UnknownNameError('key', name, known)}")
        parameter, where = known[name], f"config file {path}: key '{name}'"
        if parameter.name in defaults:
            raise UsageError(f"{where} occurs twice, with - and with _; remove one")
        if value is None:
            continue
        is_list = parameter.multiple or parameter.callback is comma_separated
        listed = value if is_list and isinstance(value, list) else [value]
        if not listed or not all(isinstance(item, str) and item for item in listed):
            raise UsageError(f"{where} must be a text{', or a list of texts' if is_list else ''}; found {value!r:.60}")
        text = ",".join(listed)
        if not parameter.multiple:
            try:
                parameter.type.convert(text, parameter, ctx)
            except (click.BadParameter, UsageError) as error:
                raise UsageError(f"{where}: {str(error).rstrip('.')}") from error
        defaults[parameter.name or ""] = listed if parameter.multiple else text
    ctx.default_map = defaults


_CONFIG = Option(["--config"], type=FOLDER, is_eager=True, expose_value=False, callback=_read_config,
                 envvar="EVALKIT_CONFIG", help="YAML file with any of these options, by name.")  # fmt: skip


def is_typed(name: str) -> bool:
    """Whether an option is given on the command line, not in the environment or a config file."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _given_flags(options: Mapping[str, Any]) -> list[str]:
    return [flag(name) for name, value in options.items() if value is not None and value is not False and value != ()]


def exclude(**options: Any) -> None:
    """Raise a `UsageError` if more than one of these options is given."""
    if len(flags := _given_flags(options)) > 1:
        raise UsageError(f"{' and '.join(flags)} cannot be combined; give one of them")


def require(needed: str, is_given: bool, **options: Any) -> None:
    """Raise a `UsageError` if one of these options is given without the one that it needs."""
    if not is_given and (flags := _given_flags(options)):
        raise UsageError(f"{flags[0]} needs {needed}; give both, or neither")
