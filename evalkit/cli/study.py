"""`evalkit study`: many checkpoints and benchmarks by one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.options import PRINTING, print_report
from evalkit.cli.parameters import FOLDER, SETTINGS, Commands, argument, typed_option
from evalkit.cli.running import WORKERS, workers_of
from evalkit.display import doing
from evalkit.errors import UsageError

if TYPE_CHECKING:
    from evalkit.reporting.markup import Format
    from evalkit.studies.study import Study

_FILE = argument("file", metavar="STUDY", type=FOLDER)


@click.group(cls=Commands, context_settings=SETTINGS)
def study() -> None:
    """Evaluate many checkpoints on many benchmarks, as one YAML file names them (docs/studies.md).

    \b
    evalkit study run study.yaml --dry-run     runs, tokens, time, memory and disk
    evalkit study run study.yaml               compute; again on another machine: takes what nobody has
    evalkit study status study.yaml            what is done, where the rest is, how long it takes
    """


@study.command()
@_FILE
@typed_option("--wait", is_flag=True, help="Stay until other processes have finished their runs; take over the runs of "
              "processes that have ended.")  # fmt: skip
@typed_option("--dry-run", is_flag=True, help="Compute nothing; print runs, tokens, time, memory and disk.")
@WORKERS
@PRINTING
@click.pass_context
def run(
    ctx: click.Context, /, file: Path, wait: bool, dry_run: bool, form: Format, standalone: bool, **options: Any
) -> None:
    """Compute the runs of a study that are not finished and that no other process computes.

    STUDY is a YAML file. All runs are planned before anything is computed. A run that fails is reported at the end,
    and the others go on. The same command again continues, in this process or in others at the same time.

    \b
    evalkit study run study.yaml                       one process, one device
    evalkit study run study.yaml --workers 8           eight GPUs of this machine, or shares of its cores
    evalkit study run study.yaml --ray HOST:PORT       a Ray cluster

    Exits with 1 if a run failed or left out tasks, and with 0 if the others compute the rest.
    """
    from evalkit.display import Progress

    workers = workers_of(options)
    if dry_run and wait:
        raise UsageError("--wait: a dry run computes nothing and waits for nobody; leave out one of them")
    if dry_run and workers.given:
        raise UsageError(f"{workers.given}: a dry run computes nothing, in this process; leave out one of them")
    with doing("reading the study"):
        found = _read(file)
    with Progress() as progress:
        if dry_run:
            from evalkit.studies.dry_run import dry_run_report

            report, failed = dry_run_report(found, progress.say), False
        else:
            from evalkit.studies.running import outcomes_report, run_study

            outcomes = run_study(found, progress, workers.runner, wait)
            report = outcomes_report(outcomes)
            failed = any(one.state == "failed" or one.left_out for _, one in outcomes)
    print_report(report, form, standalone)
    ctx.exit(1 if failed else 0)


@study.command()
@_FILE
@PRINTING
@click.pass_context
def status(ctx: click.Context, file: Path, form: Format, standalone: bool) -> None:
    """Show which runs of a study are finished, running, interrupted, missing or failed, and the time left.

    Exits with 1 if a run failed.
    """
    with doing("reading the study's runs"):
        from evalkit.models.locate import silent
        from evalkit.studies.status import states_of, status_report

        found = _read(file)
        states = states_of(found, silent)
        report = status_report(found, states)
    print_report(report, form, standalone)
    ctx.exit(1 if any(one.state == "failed" for one in states) else 0)


def _read(file: Path) -> Study:
    from evalkit.studies.records import recorded_checkpoints
    from evalkit.studies.study_file import read_study

    return read_study(file, recorded_checkpoints)
