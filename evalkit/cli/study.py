"""`evalkit study`: many checkpoints and benchmarks by one file; `evalkit run --watch`: a training's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.parameters import Commands, argument, command, flag, is_typed, require, typed_option
from evalkit.cli.running import Printer, Workers, plan_of
from evalkit.display import Progress, doing
from evalkit.errors import CheckpointError, RunInUseError, TemplateError, UsageError

if TYPE_CHECKING:
    from evalkit.studies.watch import Arrived, GrowingCurve, Watcher

_IN_USE = 30.0
"""Seconds until a run that another process computes is looked at again."""


@dataclass(frozen=True)
class WatchOptions:
    watch: Path | None = typed_option(None, "In place of CKPT: a folder, whose checkpoints are evaluated as they "
                                      "appear, until Ctrl-C.")  # fmt: skip
    until: int | None = typed_option(None, "With --watch: end at this step.", metavar="STEP", least=0, shows_least=True)
    idle: float | None = typed_option(None, "With --watch: end after this time without a new checkpoint.",
                                      metavar="MINUTES")  # fmt: skip
    plot: Path | None = typed_option(None, "With --watch: also draw the curve, into a .png, .pdf or .svg file.")

    def __post_init__(self) -> None:
        require("--watch", self.watch is not None, until=self.until, idle=self.idle, plot=self.plot)
        if self.watch is None:
            return
        values = click.get_current_context().params
        for name in ("checkpoints", "model", "revision", "show_prompts", "detail", "form", "standalone", "quiet"):
            if is_typed(name) and values.get(name):
                shown = {"checkpoints": "CKPT", "form": "--format"}.get(name, flag(name))
                raise UsageError(f"{shown} cannot be used with --watch, which prints a line for each checkpoint")
        if not self.watch.expanduser().is_dir():
            raise UsageError(f"--watch {self.watch}: is not a folder; give the one that the training saves in")


def watch(watched: WatchOptions, options: dict[str, Any]) -> None:
    """Evaluate checkpoints of a folder as they appear, and print a line for each; `options` as of `evalkit.evaluate`.

    Raises a `CheckpointError` at the end if one was not evaluated.
    """
    from evalkit.cache import remembering
    from evalkit.studies.watch import GrowingCurve, Watcher

    folder, say = (watched.watch or Path()).expanduser(), Progress().say
    idle = None if watched.idle is None else 60 * watched.idle
    allow_pickle = options.get("allow_pickle", False)
    watcher = Watcher(folder, until=watched.until, idle=idle, allow_pickle=allow_pickle, say=say)
    curve, failed = GrowingCurve(folder, watched.plot, say), dict[str, str]()
    say(f"watching {folder}; Ctrl-C ends it, and the same command resumes")
    seen = False
    with remembering():
        for checkpoint in watcher:
            failed.pop(checkpoint.folder.name, None)
            _evaluate(checkpoint, options, watcher, curve, failed)
            seen = True
    if left := watcher.incomplete | failed:
        raise CheckpointError(f"not evaluated: {'; '.join(f'{name}: {why}' for name, why in left.items())}")
    if not seen:
        raise CheckpointError(
            f"no checkpoint appeared in {folder}; expected folders with a config.json and a step in their name"
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


@click.group(cls=Commands)
def study() -> None:
    """Evaluate many checkpoints on many benchmarks, as one YAML file names them (docs/studies.md).

    \b
    evalkit study run study.yaml --dry-run     runs, tokens and time
    evalkit study run study.yaml               compute; again on another machine: takes what nobody has
    evalkit study status study.yaml            what is done, where the rest is, how long it takes
    """


@command(study, resumes=True)
def run(
    *,
    file: Path = argument(metavar="STUDY"),
    wait: bool = typed_option(False, "Stay until other processes have finished their runs; take over the runs of "
                              "processes that have ended."),
    dry_run: bool = typed_option(False, "Compute nothing; print runs, tokens and time."),
    workers: Workers,
    printer: Printer,
) -> int:  # fmt: skip
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

    if dry_run and (wait or workers.option):
        raise UsageError(f"{'--wait' if wait else workers.option}: a dry run computes nothing; leave out one of them")
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
            failed = any(outcome.state == "failed" or outcome.left_out for outcome in outcomes)
    printer(report)
    return 1 if failed else 0


@command(study)
def status(*, file: Path = argument(metavar="STUDY"), printer: Printer) -> int:
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
    return 1 if any(state.state == "failed" for state in states) else 0
