"""Options that commands share, and config files, which set them too.

A value has the same meaning in a config file as on the command line, and may be given once in each. A config file's
values are parsed as if they were on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.parameters import (
    FOLDER,
    TEXT,
    Command,
    argument,
    comma_separated,
    is_typed,
    long_name,
    option,
    option_group,
    typed_option,
)
from evalkit.errors import UnknownNameError, UsageError
from evalkit.paths import RUNS

if TYPE_CHECKING:
    from evalkit.runs.folder import Run


def read_config(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    from evalkit.inputs.yaml_reading import read_yaml_as_typed

    content = read_yaml_as_typed(path, UsageError, "config file")
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise UsageError(f"config file {path} must contain keys and values, such as 'model: demo'")
    # By the option's name on the command line, which may differ from the parameter's
    known = {long_name(p.opts)[2:]: p for p in ctx.command.params if isinstance(p, click.Option) and p.name != "config"}
    defaults: dict[str, Any] = {}
    for key, value in content.items():
        named = key.replace("_", "-")
        if named not in known:
            raise UsageError(f"config file {path}: {UnknownNameError('key', named, known)}")
        parameter = known[named]
        if parameter.name in defaults:
            raise UsageError(f"config file {path}: key '{named}' occurs twice, with - and with _; remove one")
        if value is not None:
            defaults[parameter.name or ""] = _config_value(ctx, parameter, value, f"config file {path}: key '{named}'")
    ctx.default_map = defaults


def _config_value(ctx: click.Context, parameter: click.Option, value: Any, where: str) -> str | list[str]:
    """Convert a value of the file to its text on the command line."""
    if parameter.multiple:
        listed = value if isinstance(value, list) else [value]
        if not listed or not all(isinstance(one, str) and one for one in listed):
            raise UsageError(f"{where} must be a string, or a list of strings")
        return listed
    if isinstance(value, list) and parameter.callback is comma_separated:
        if not value or not all(isinstance(part, str) for part in value):
            raise UsageError(f"{where} must be a list of names or numbers, with at least one")
        value = ",".join(value)
    if not isinstance(value, str):
        kind = "a list" if isinstance(value, list) else "a mapping"
        raise UsageError(f"{where} is {kind}; give one value")
    if not value:
        raise UsageError(f"{where} is empty; leave it out, or give a value")
    try:
        parameter.type.convert(value, parameter, ctx)
    except (click.BadParameter, UsageError) as error:
        raise UsageError(f"{where}: {str(error).rstrip('.')}") from error
    return value


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


STUDY = typed_option("--study", metavar="FILE.yaml", type=FOLDER, help="Study file, whose finished runs are read.")
OUTCOME = option(
    "--outcome",
    metavar="NAME",
    help="accuracy, bits_per_byte, log_loss, brier or margin (evalkit ls outcomes).  [default: accuracy]",
)
BENCHMARK = typed_option("--benchmark", help="Benchmark of the study.  [default: the only one that fits]")


GROUP = typed_option("--group", "groups", multiple=True, metavar="NAME=RUN,RUN,…",
                     help="Several seeds or checkpoints of one side; repeat for each side.")  # fmt: skip


def check_groups(groups: tuple[str, ...], study: Path | None) -> None:
    """Raise a `UsageError` if `--group` is given with `--study`."""
    if groups and study is not None:
        raise UsageError("--group is for runs; with --study the seeds of a name are its group: omit --group")


def check_benchmark(benchmark: str | None, study: Path | None) -> None:
    """Raise a `UsageError` if `--benchmark` is given without `--study`."""
    if benchmark is not None and study is None:
        raise UsageError("--benchmark names a benchmark of a study; give --study FILE.yaml too")


def named_run(given: str, root: Path | None = None) -> Run:
    """Return the finished run that a command's RUN names.

    Args:
        given: see `find_run`.
        root: folder of run folders; None: the default, for commands whose --output has another meaning.

    Raises:
        EvalkitError: no run or several match, or the run is damaged or not finished.
    """
    from evalkit.runs.finding import find_run, root_of_runs

    return find_run(given, root or root_of_runs())


CONFIG = typed_option("--config", type=FOLDER, is_eager=True, expose_value=False, callback=read_config,
                      envvar="EVALKIT_CONFIG", help="YAML file with any of these options, by name.")  # fmt: skip
ORIGIN = option_group(
    option("--revision", help="Branch, tag or commit of a hub model."),
    option("--tokenizer", help="Another folder or hub name to take the tokenizer from."),
)
COMPUTING = option_group(
    option("--device", default="auto", help="auto, cpu, cuda, cuda:1, …"),
    option(
        "--device-map",
        default="none",
        metavar="none|auto",
        help="For a model larger than one GPU: auto spreads its layers over all GPUs and the CPU's memory.",
    ),
    option("--dtype", default="auto", help="auto (the checkpoint's own), float32, bfloat16 or float16."),
    option("--attention", default="auto", help="auto, sdpa or eager."),
)


def context_options(default: str) -> Callable[[Command], Command]:
    """Declare options of context extension; `default` describes the default of `--context` in the help."""
    extension = "Context window in tokens, extended by scaling rotary positions; none: no extension."
    return option_group(
        option("--context", metavar="TOKENS", help=f"{extension}  [default: {default}]"),
        option("--context-method", help="yarn, dynamic-yarn, linear, ntk, or none.  [default: yarn]"),
        option("--context-original", type=int, help="Context window of its training.  [default: the checkpoint's]"),
        option("--context-config", help="A name in configs/context, or a YAML file, with these and YaRN's parameters."),
    )


SELECTION = option_group(
    option("--sample", type=int, metavar="N", help="Random documents of each task, the same for every checkpoint; a "
           "larger sample contains the smaller one.  [default: all]"),
    option("--seed", type=int, metavar="N", help="Seed of the sample.  [default: 0]"),
    option("--limit", "-L", type=int, metavar="N", help="Only the first documents of each task, as in lm-eval."),
)  # fmt: skip
CONTEXT = context_options("the trained context window")
CHAT = option("--chat", is_flag=True, help="Put prompts into the tokenizer's chat template, for models tuned to chat.")
DRY_RUN = typed_option(
    "--dry-run",
    "without_computing",
    is_flag=True,
    help="Compute nothing; print documents, tokens, time, memory and disk.",
)
TOKEN_BUDGET = option(
    "--token-budget", metavar="TOKENS|auto", help="Maximum tokens of a batch, limited by memory.  [default: auto]"
)
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
    if (found := given if given is not None else model) is None:
        raise UsageError(
            f"name a checkpoint: {ctx.command_path} CKPT, or --model CKPT (a folder, a hub name, a .gguf file, or "
            f"demo); see {ctx.command_path} --help"
        )
    return found


def checkpoints_of(ctx: click.Context, given: Sequence[str], model: str | None) -> tuple[str, ...]:
    """Return one checkpoint or several, as arguments or by `--model`; patterns are expanded.

    Raises:
        UsageError: none is given, both forms are used, or nothing matches a pattern.
    """
    from evalkit.models.files import is_pattern, matching

    if len(given) > 1 and model is not None and is_typed(ctx, "model"):
        raise UsageError(f"checkpoints are given as arguments and as --model {model}; give all as arguments")
    found: list[str] = []
    for one in given if len(given) > 1 else [checkpoint_of(ctx, given[0] if given else None, model)]:
        if not is_pattern(one):
            found.append(one)
        elif matches := matching(one):
            found += matches
        else:
            raise UsageError(f"{one}: no folder and no .gguf file matches")
    return tuple(dict.fromkeys(found))


TRUST = option_group(
    option("--allow-pickle", is_flag=True, help="Read pickled weights; they can run code."),
    option("--trust-remote-code", is_flag=True, help="Let the checkpoint's own Python files run."),
)
