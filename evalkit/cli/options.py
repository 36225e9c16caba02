"""What the commands share: options that an environment variable and a file can set too, and groups that help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from evalkit.errors import UnknownNameError, UsageError
from evalkit.finding import DEFAULT_ROOT, find_run, root_of_runs

if TYPE_CHECKING:
    from evalkit.runs import Run

Command = TypeVar("Command", bound=Callable[..., Any])

SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 100,
}


class Commands(click.Group):
    """A group that offers the nearest command for a mistyped one."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise UnknownNameError("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


def option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    """An option that `EVALKIT_<NAME>` sets too."""
    variable = "EVALKIT_" + _long(names)[2:].replace("-", "_").upper()
    return click.option(*names, envvar=variable, show_default=settings.get("default") is not None, **settings)


def _long(names: Sequence[str]) -> str:
    return next(name for name in names if name.startswith("--"))


def read_config(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UsageError(f"config file {path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"config file {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"config file {path} must hold keys and values, such as 'model: demo'")
    # By the option's name as it is typed, which is not always the parameter's
    known = {_long(p.opts)[2:]: p.name for p in ctx.command.params if p.name != "config"}
    defaults: dict[str, Any] = {}
    for key, value in content.items():
        option = str(key).replace("_", "-")
        name = known.get(option)
        if name is None:
            raise UsageError(f"config file {path}: {UnknownNameError('key', option, known)}")
        if isinstance(value, dict):
            raise UsageError(f"config file {path}: key '{option}' holds keys and values of its own; give one value")
        if value is not None:
            defaults[name] = ",".join(map(str, value)) if isinstance(value, list) else value
    ctx.default_map = defaults


def comma_separated(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in value.split(",") if part.strip()) if value else ()
    if value and not parts:
        raise UsageError(f"{_long(parameter.opts)} {value}: names nothing; leave it out, or name some")
    return parts


def picture(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """A picture's file, known to have a possible name before hours of work."""
    if path is None:
        return None
    if path.suffix.lower() not in (".png", ".pdf"):
        raise UsageError(f"--plot {path}: name a file that ends in .pdf or .png")
    try:
        # Raises where a part of the name is too long; it is written under this one first
        path.with_name(f".{path.name}.tmp").is_file()
    except OSError as error:
        raise UsageError(f"--plot {path}: cannot be written ({error.strerror or error}); name another file") from error
    return path


FOLDER = click.Path(path_type=Path)
RUN = click.argument("run")
FORMAT = option("--format", "form", type=click.Choice(["table", "json"]), default="table", help="Of the result.")
DETAIL = option("--detail", is_flag=True, help="Also print the subjects of MMLU.")
DATA_DIR = option("--data-dir", type=FOLDER, help="Folder of <task>.jsonl files, looked into before anything else.")
OUTPUT = option("--output", "-o", type=FOLDER, default=DEFAULT_ROOT, help="Folder of run folders.")


def named_run(given: str) -> Run:
    """The finished run that a command's RUN names, where the command's own --output is something else.

    Raises:
        EvalkitError: there is none, or several, or it is damaged or not finished.
    """
    return find_run(given, root_of_runs())


def several(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Options that stand together, in this order."""

    def add(command: Command) -> Command:
        for one in reversed(options):
            command = one(command)
        return command

    return add


CONFIG = click.option("--config", type=FOLDER, is_eager=True, expose_value=False, callback=read_config,
                      envvar="EVALKIT_CONFIG", help="YAML file with any of these options, by name.")  # fmt: skip
ORIGIN = several(
    option("--revision", help="Branch, tag or commit of a hub model."),
    option("--tokenizer", help="Another folder or hub name to take the tokenizer from."),
)
COMPUTING = several(
    option("--device", default="auto", help="auto, cpu, cuda, cuda:1, …"),
    option("--dtype", default="auto", help="auto (the checkpoint's own), float32, bfloat16 or float16."),
    option("--attention", default="auto", help="auto, sdpa or eager."),
)


def context_options(default: str) -> Callable[[Command], Command]:
    """How the context is stretched; `default` says for the help what is done where `--context` is not given."""
    stretching = "Tokens the model is to take, by stretching its rotary positions, or none: as it is."
    return several(
        option("--context", metavar="TOKENS", help=f"{stretching}  [default: {default}]"),
        option("--context-method", help="yarn, dynamic-yarn, linear, ntk, or none.  [default: yarn]"),
        option("--context-original", type=int, help="Window it was trained on.  [default: what the checkpoint says]"),
        option("--context-config", help="A name in configs/context, or a YAML file, with these and YaRN's parameters."),
    )


CONTEXT = context_options("those it was trained on")
CHAT = option("--chat", is_flag=True, help="Put prompts into the tokenizer's chat template, for models tuned to chat.")
KEPT_TOKENS = option("--token-budget", default="auto", help="Most tokens of keys and values at a time.")
TRUST = several(
    option("--allow-pickle", is_flag=True, help="Read pickled weights; they can run code."),
    option("--trust-remote-code", is_flag=True, help="Let the checkpoint's own Python files run."),
)
