"""Options that commands share, options of a benchmark's settings, and config files, which set options too.

A value has the same meaning in a config file as on the command line, and may be given once in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin

import click

from evalkit.cli.parameters import (
    FOLDER,
    TEXT,
    Command,
    Option,
    argument,
    comma_separated,
    is_typed,
    long_name,
    option,
    option_group,
    require,
    settings_of_option,
    typed_option,
)
from evalkit.errors import UnknownNameError, UsageError
from evalkit.paths import RUNS

if TYPE_CHECKING:
    from evalkit.inputs.settings import Setting
    from evalkit.runs.folder import Run
    from evalkit.studies.results import StudyResults


def read_config(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Make the values of a YAML file the defaults of a command's options."""
    if path is None:
        return
    from evalkit.inputs.reading import read_yaml_as_typed

    content = read_yaml_as_typed(path, UsageError, "config file") or {}
    if not isinstance(content, dict):
        raise UsageError(f"config file {path} must contain keys and values, such as 'model: demo'")
    # By the option's name on the command line, which may differ from the parameter's
    known = {long_name(p.opts)[2:]: p for p in ctx.command.params if isinstance(p, click.Option) and p.name != "config"}
    defaults: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("_", "-")
        if name not in known:
            raise UsageError(f"config file {path}: {UnknownNameError('key', name, known)}")
        if known[name].name in defaults:
            raise UsageError(f"config file {path}: key '{name}' occurs twice, with - and with _; remove one")
        if value is not None:
            where = f"config file {path}: key '{name}'"
            defaults[known[name].name or ""] = _config_value(ctx, known[name], value, where)
    ctx.default_map = defaults


def _config_value(ctx: click.Context, parameter: click.Option, value: Any, where: str) -> str | list[str]:
    """Return a value of the file as its text on the command line, where it would be valid."""
    is_list = parameter.multiple or parameter.callback is comma_separated
    listed = value if is_list and isinstance(value, list) else [value]
    if not listed or not all(isinstance(item, str) and item for item in listed):
        raise UsageError(f"{where} must be a text{', or a list of texts' if is_list else ''}; found {value!r:.60}")
    if parameter.multiple:
        return listed
    text = ",".join(listed)
    try:
        parameter.type.convert(text, parameter, ctx)
    except (click.BadParameter, UsageError) as error:
        raise UsageError(f"{where}: {str(error).rstrip('.')}") from error
    return text


def _runs_folder(_: click.Context, __: click.Parameter, path: Path) -> Path:
    """Reject a file name, which users expect to receive what is printed."""
    if path.suffix in (".tex", ".md", ".html", ".csv", ".json", ".txt", ".pdf", ".png", ".svg") and not path.is_dir():
        raise UsageError(f"--output {path}: is the folder of runs; to save what is printed, redirect it: > {path}")
    return path


def figure_path(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Validate a figure's path before hours of work."""
    from evalkit.reporting.figures import check_figure_path

    if path is not None:
        try:
            check_figure_path(path)
        except UsageError as error:
            raise UsageError(f"--plot {error}") from error
    return path


RUN = argument("run")
DETAIL = option("--detail", is_flag=True, help="Also print the subjects of MMLU.")
PLOT = option("--plot", type=FOLDER, callback=figure_path, help="Also draw it, into a .png, .pdf or .svg file.")
DATA_DIR = option("--data-dir", type=FOLDER, help="Folder of <task>.jsonl files, searched before other sources.")
OUTPUT = option("--output", "-o", type=FOLDER, default=RUNS, callback=_runs_folder, help="Folder of run folders.")
OUTCOME = option(
    "--outcome",
    metavar="NAME",
    help="accuracy, bits_per_byte, log_loss, brier or margin (evalkit ls outcomes).  [default: accuracy]",
)


@dataclass(frozen=True)
class Source:
    """The runs that a command reads: those named by arguments, groups of them, or those of a study."""

    study: Path | None
    benchmark: str | None
    """Benchmark of the study."""
    groups: tuple[str, ...]

    @cached_property
    def results(self) -> StudyResults | None:
        """The study's runs; None without a study.

        Raises:
            EvalkitError: the study cannot be read.
        """
        if self.study is None:
            return None
        from evalkit.studies.results import read_results

        return read_results(self.study)


def source(
    groups: bool = False, benchmark: str = "Benchmark of the study.  [default: the only one that fits]"
) -> Callable[[Command], Command]:
    """Declare --study and --benchmark, and --group where a command has it; the command gets them as a `Source`."""

    def add(command: Command) -> Command:
        @wraps(command)
        def called(
            *arguments: Any, study: Path | None, benchmark: str | None, groups: tuple[str, ...] = (), **options: Any
        ) -> Any:
            require("--study", study is not None, benchmark=benchmark)
            if groups and study is not None:
                raise UsageError("--group is for runs; with --study the seeds of a name are its group: omit --group")
            return command(*arguments, source=Source(study, benchmark, groups), **options)

        declare: Any = option_group(
            *([typed_option("--group", "groups", multiple=True, metavar="NAME=RUN,RUN,…",
                            help="Several seeds or checkpoints of one side; repeat for each side.")] if groups else []),
            typed_option("--study", metavar="FILE.yaml", type=FOLDER, help="Study file, whose finished runs are read."),
            typed_option("--benchmark", help=benchmark),
        )  # fmt: skip
        return cast(Command, declare(called))

    return add


def named_run(given: str, root: Path | None = None) -> Run:
    """Return the finished run that a command's RUN names, in a folder of runs; None: the default folder.

    Raises:
        EvalkitError: no run or several match, or the run is damaged or not finished.
    """
    from evalkit.runs.finding import find_run, root_of_runs

    return find_run(given, root or root_of_runs())


CONFIG = typed_option("--config", type=FOLDER, is_eager=True, expose_value=False, callback=read_config,
                      envvar="EVALKIT_CONFIG", help="YAML file with any of these options, by name.")  # fmt: skip
ORIGIN = ("revision", "tokenizer")
COMPUTING = ("device", "device_map", "dtype", "attention")
CONTEXT = ("context", "context_method", "context_original", "context_config")
SELECTION = ("sample", "seed", "limit")
TRUST = ("allow_pickle", "trust_remote_code")


class BenchmarkCommand(click.Command):
    """A command with an option for each setting of a benchmark and of its model; `settings` says where in the list.

    The benchmark is imported when the options are needed.
    """

    def __init__(self, *arguments: Any, kind: str, without: Sequence[str] = (), **more: Any) -> None:
        self.kind, self.without = kind, without
        self._params: list[click.Parameter] | None = None
        super().__init__(*arguments, **more)

    @property
    def params(self) -> list[click.Parameter]:
        """Arguments and options, in the order of `--help`."""
        if self._params is None:
            self._params = [*self._expanded()]
        return self._params

    @params.setter
    def params(self, declared: list[Any]) -> None:
        self._declared, self._params = declared, None

    def _expanded(self) -> Iterator[click.Parameter]:
        from evalkit.benchmarks.registry import benchmark
        from evalkit.inputs.settings import settings_of
        from evalkit.models.loading.spec import ModelSpec

        kind = benchmark(self.kind).request
        known = settings_of(ModelSpec, kind)
        placed = {name for parameter in self._declared if isinstance(parameter, _Places) for name in parameter.names}
        others = [name for name in known if name not in placed and name not in self.without]
        for parameter in self._declared:
            if not isinstance(parameter, _Places):
                yield parameter
                continue
            for place in parameter.names:
                for name in others if isinstance(place, EllipsisType) else [place]:
                    yield _option_of(known[name], kind.default_texts.get(name, known[name].default_text))


class _Places:
    """Places in a command's list of parameters, for settings by name; `...`: those without a place."""

    def __init__(self, names: Sequence[str | EllipsisType]) -> None:
        self.names = names


def settings(*names: str | EllipsisType) -> Callable[[Command], Command]:
    """Put options of settings here in the list of a `BenchmarkCommand`; `...`: those without another place."""

    def add(command: Command) -> Command:
        declared: Any = command
        declared.__click_params__ = [*getattr(command, "__click_params__", ()), _Places(names)]
        return command

    return add


def _option_of(setting: Setting, default_text: str) -> Option:
    hint, more = setting.types[0], dict[str, Any]()
    default = setting.default
    if hint is bool:
        more, default = {"is_flag": True}, None
    elif get_origin(hint) is Literal:
        more = {"type": click.Choice(get_args(hint))}
    elif get_origin(hint) is tuple and get_args(hint)[0] is Path:
        more, default = {"type": FOLDER, "multiple": True}, None
    elif get_origin(hint) is tuple:
        more, default = {"callback": comma_separated}, ",".join(f"{value:g}" for value in default) or None
    elif hint is int and not setting.word:
        more = {"type": click.IntRange(min=setting.least) if setting.shows_least else int}
    elif hint is Path:
        more = {"type": FOLDER}
    if setting.name == "output":
        more["callback"] = _runs_folder
    if default is not None:
        more |= {"default": default, "show_default": True}
    text = f"{setting.help}  [default: {default_text}]" if default_text else setting.help
    names = [setting.flag, *([setting.short] if setting.short else [])]
    return Option(names, **settings_of_option(names, setting.has_variable, help=text, metavar=setting.metavar, **more))


_CHECKPOINT = "Checkpoint folder, hub name, .gguf file, or demo."
CHECKPOINT = option_group(
    click.argument("checkpoint", metavar="[CKPT]", required=False, type=TEXT),
    option("--model", help=f"{_CHECKPOINT}  [required, here or as CKPT]"),
)
CHECKPOINTS = option_group(
    click.argument("checkpoints", metavar="[CKPT]...", nargs=-1, type=TEXT),
    option("--model", help=f"{_CHECKPOINT} Or a pattern in quotes, such as 'train/checkpoint-*'.  [required, here or "
           "as CKPT]"),
)  # fmt: skip


def checkpoint_of(ctx: click.Context, given: str | None, model: str | None) -> str:
    """Return the checkpoint, as an argument or by `--model`; the command line overrides the environment.

    Raises:
        UsageError: none is given, or two are.
    """
    if given is not None and model is not None and is_typed(ctx, "model"):
        raise UsageError(f"the checkpoint is given twice, as {given} and as --model {model}; give it once")
    if (checkpoint := given if given is not None else model) is None:
        raise UsageError(
            f"name a checkpoint: {ctx.command_path} CKPT, or --model CKPT (a folder, a hub name, a .gguf file, or "
            f"demo); see {ctx.command_path} --help"
        )
    return checkpoint


def checkpoints_of(ctx: click.Context, given: Sequence[str], model: str | None) -> tuple[str, ...]:
    """Return one checkpoint or several; patterns are expanded. Raises a `UsageError` also if nothing matches one."""
    from evalkit.models.loading.files import is_pattern, matching

    checkpoint_of(ctx, given[0] if given else None, model)
    checkpoints: list[str] = []
    for name in given or [model or ""]:
        if not is_pattern(name):
            checkpoints.append(name)
        elif matches := matching(name):
            checkpoints += matches
        else:
            raise UsageError(f"{name}: no folder and no .gguf file matches")
    return tuple(dict.fromkeys(checkpoints))
