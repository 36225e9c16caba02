"""`evalkit study`: many checkpoints and benchmarks by one file; `evalkit run --watch`: a training's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.options import figure_path
from evalkit.cli.parameters import FOLDER, SETTINGS, Commands, argument, is_typed, option_group, require, typed_option
from evalkit.cli.running import PRINTING, WORKERS, Printer, plan_of, workers_of
from evalkit.display import Progress, doing
from evalkit.errors import CheckpointError, RunInUseError, TemplateError, UsageError

if TYPE_CHECKING:
    from evalkit.studies.watch import Arrived, GrowingCurve, Watcher


WATCH = option_group(
    typed_option("--watch", type=FOLDER, help="In place of CKPT: a folder, whose checkpoints are evaluated as they "
                 "appear, until Ctrl-C."),
    typed_option("--until", type=click.IntRange(min=0), metavar="STEP", help="With --watch: end at this step."),
    typed_option("--idle", type=click.FloatRange(min=0), metavar="MINUTES", help="With --watch: end after this time "
                 "without a new checkpoint."),
    typed_option("--plot", type=FOLDER, callback=figure_path, help="With --watch: also draw the curve, into a .png, "
                 ".pdf or .svg file."),
)  # fmt: skip

_IN_USE = 30.0
"""Seconds until a run that another process computes is looked at again."""


@dataclass(frozen=True)
class WatchOptions:
    """The values of the options of this module."""

    folder: Path
    until: int | None
    idle: float | None
    """Minutes."""
    plot: Path | None


def watched(ctx: click.Context, options: dict[str, Any]) -> WatchOptions | None:
    """Remove the options of this module from a command's options, and return their values; None without --watch.

    Raises:
        UsageError: one of them is given without --watch, or --watch with an option that it excludes.
    """
    folder, until, idle, plot = (options.pop(name) for name in ("watch", "until", "idle", "plot"))
    require("--watch", folder is not None, until=until, idle=idle, plot=plot)
    if folder is None:
        return None
    for name in ("checkpoints", "model", "revision", "show_prompts", "detail", "form", "standalone"):
        if is_typed(ctx, name) and ctx.params.get(name):
            shown = {"checkpoints": "CKPT", "form": "--format"}.get(name, f"--{name.replace('_', '-')}")
            raise UsageError(f"{shown} cannot be used with --watch, which prints a line for each checkpoint")
    if not folder.expanduser().is_dir():
        raise UsageError(f"--watch {folder}: is not a folder; give the folder that the training saves checkpoints in")
    return WatchOptions(folder.expanduser(), until, idle, plot)


def watch(given: WatchOptions, options: dict[str, Any]) -> None:
    """Evaluate checkpoints as they appear, and print a line for each.

    Args:
        given: what is watched, and until when.
        options: see `evalkit.evaluate`.

    Raises:
        EvalkitError: the options are invalid; or, at the end, a checkpoint was not evaluated.
    """
    from evalkit.benchmarks.request import remembering
    from evalkit.studies.watch import GrowingCurve, Watcher

    say = Progress().say
    idle = None if given.idle is None else 60 * given.idle
    allow_pickle = options.get("allow_pickle", False)
    watcher = Watcher(given.folder, until=given.until, idle=idle, allow_pickle=allow_pickle, say=say)
    curve, failed = GrowingCurve(given.folder, given.plot, say), dict[str, str]()
    say(f"watching {given.folder}; Ctrl-C ends it, and the same command resumes")
    seen = False
    with remembering():
        for checkpoint in watcher:
            failed.pop(checkpoint.folder.name, None)
            _evaluate(checkpoint, options, watcher, curve, failed)
            seen = True
    if left := watcher.incomplete | failed:
        listed = "; ".join(f"{name}: {why}" for name, why in left.items())
        raise CheckpointError(f"not evaluated: {listed}")
    if not seen:
        raise CheckpointError(
            f"no checkpoint appeared in {given.folder}; expected folders with a config.json and a step in their name"
        )


def _evaluate(
    checkpoint: Arrived, options: dict[str, Any], watcher: Watcher, curve: GrowingCurve, failed: dict[str, str]
) -> None:
    """Evaluate a checkpoint and print its line; an error of this checkpoint is printed, and its reason kept."""
    from evalkit.benchmarks.session import run_plan
    from evalkit.models.loading.files import why_incomplete
    from evalkit.studies.running import FAILURES, why_failed

    folder, say = checkpoint.folder, Progress().say
    try:
        with Progress() as progress:
            plan = plan_of(str(folder), options, progress.say)
            run = run_plan(plan, progress)
        if line := curve.add(checkpoint.step, run, plan.manifest["rule"]):
            click.echo(line)
        if left_out := plan.manifest.get("left_out"):
            failed[folder.name] = f"left out: {'; '.join(left_out)}"
    except (UsageError, TemplateError):  # of every checkpoint
        raise
    except FAILURES as error:
        if not folder.is_dir():
            say(f"{folder.name} was removed before it was evaluated")
        elif isinstance(error, RunInUseError):
            failed[folder.name] = str(error)
            say(f"{folder.name}: {error}")
            watcher.again(checkpoint, _IN_USE)
        elif why_incomplete(folder, allow_pickle=bool(options.get("allow_pickle"))):
            watcher.again(checkpoint)  # it is being removed or written again
        else:
            failed[folder.name] = why_failed(error)
            say(f"{folder.name} failed: {failed[folder.name]}")


_FILE = argument("file", metavar="STUDY", type=FOLDER)


@click.group(cls=Commands, context_settings=SETTINGS)
def study() -> None:
    """Evaluate many checkpoints on many benchmarks, as one YAML file names them (docs/studies.md).

    \b
    evalkit study run study.yaml --dry-run     runs, tokens and time
    evalkit study run study.yaml               compute; again on another machine: takes what nobody has
    evalkit study status study.yaml            what is done, where the rest is, how long it takes
    """


@study.command()
@_FILE
@typed_option("--wait", is_flag=True, help="Stay until other processes have finished their runs; take over the runs of "
              "processes that have ended.")  # fmt: skip
@typed_option("--dry-run", is_flag=True, help="Compute nothing; print runs, tokens and time.")
@WORKERS
@PRINTING
@click.pass_context
def run(ctx: click.Context, /, file: Path, wait: bool, dry_run: bool, printer: Printer, **options: Any) -> None:
    """Compute the runs of a study that are not finished and that no other process computes.

    STUDY is a YAML file. All runs are planned before anything is computed. A run that fails is reported at the end,
    and the others go on. The same command again continues, in this process or in others at the same time.

    \b
    evalkit study run study.yaml                       one process, one device
    evalkit study run study.yaml --workers 8           eight GPUs of this machine, or shares of its cores
    evalkit study run study.yaml --ray HOST:PORT       a Ray cluster

    Exits with 1 if a run failed or left out tasks, and with 0 if the others compute the rest.
    """
    from evalkit.studies.study_file import read_study

    workers = workers_of(options)
    if dry_run and (wait or workers.given):
        raise UsageError(f"{'--wait' if wait else workers.given}: a dry run computes nothing; leave out one of them")
    with doing("reading the study"):
        content = read_study(file)
    with Progress() as progress:
        if dry_run:
            from evalkit.studies.dry_run import dry_run_report

            report, failed = dry_run_report(content, progress.say), False
        else:
            from evalkit.studies.running import outcomes_report, run_study

            outcomes = run_study(content, progress, workers.runner, wait)
            report = outcomes_report(outcomes)
            failed = any(one.state == "failed" or one.left_out for one in outcomes)
    printer(report)
    ctx.exit(1 if failed else 0)


@study.command()
@_FILE
@PRINTING
@click.pass_context
def status(ctx: click.Context, file: Path, printer: Printer) -> None:
    """Show which runs of a study are finished, running, interrupted, missing or failed, and the time left.

    Exits with 1 if a run failed.
    """
    with doing("reading the study's runs"):
        from evalkit.models.loading.locate import silent
        from evalkit.studies.status import states_of, status_report
        from evalkit.studies.study_file import read_study

        content = read_study(file)
        states = states_of(content, silent)
        report = status_report(content, states)
    printer(report)
    ctx.exit(1 if any(state.state == "failed" for state in states) else 0)
