"""Running a benchmark from a command: plan, run, print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.parameters import option, option_group, typed_option
from evalkit.display import doing
from evalkit.errors import UsageError
from evalkit.escape import printable
from evalkit.reporting.markup import FORMATS, Format

if TYPE_CHECKING:
    from evalkit.benchmarks.base import Plan
    from evalkit.benchmarks.run_summary import SummarisedRun
    from evalkit.display import Progress
    from evalkit.reporting.report import Report
    from evalkit.runs.folder import Run
    from evalkit.studies.running import JobRunner, Outcome


WORKERS = option_group(
    typed_option("--workers", type=click.IntRange(min=1), metavar="N", help="Compute with this many workers by Ray: "
                 "GPUs, or shares of the cores, of this machine or of --ray."),
    typed_option("--ray", metavar="ADDRESS", help="Compute on this Ray cluster: HOST:PORT, or auto (docs/scale.md)."),
    typed_option("--worker-cpus", type=click.IntRange(min=1), metavar="N", help="CPU cores of a worker, which are its "
                 "threads.  [default: an equal share]"),
    typed_option("--worker-gpus", type=click.FloatRange(min=0), metavar="N", help="GPUs of a worker; 0.5: two workers "
                 "share one.  [default: 1 where there are any]"),
    typed_option("--ship-checkpoints", is_flag=True, help="Send the checkpoints to the workers, which have no file "
                 "system in common with this machine."),
)  # fmt: skip
_NAMES = ("workers", "ray", "worker_cpus", "worker_gpus", "ship_checkpoints")


def worker_options(command: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of this module from a command's options and return them."""
    return {name: command.pop(name) for name in _NAMES}


def runner_of(options: dict[str, Any]) -> JobRunner:
    """Return what computes the runs: workers if these are asked for, else this process.

    Raises:
        UsageError: an option of workers is given without workers.
    """
    if options["workers"] is None and options["ray"] is None:
        for name in _NAMES:
            if options[name]:
                raise UsageError(f"--{name.replace('_', '-')}: is for workers; add --workers N or --ray ADDRESS")
        from evalkit.studies.running import run_here

        return run_here
    from evalkit.studies.cluster.driver import ClusterRunner
    from evalkit.studies.cluster.ray_cluster import ClusterOptions

    cpus, gpus = options["worker_cpus"], options["worker_gpus"]
    return ClusterRunner(ClusterOptions(options["workers"], options["ray"], cpus, gpus, options["ship_checkpoints"]))


def has_workers(options: dict[str, Any]) -> bool:
    """Return whether workers are asked for."""
    return options["workers"] is not None or options["ray"] is not None


FORMAT = option("--format", "form", type=click.Choice(FORMATS), default="terminal", help="Format of the output.")
PRINTING = option_group(
    FORMAT,
    option("--standalone", is_flag=True, help="Write a complete LaTeX document or HTML page."),
)


def print_report(report: Report, form: Format, standalone: bool = False, output: Path | None = None) -> None:
    """Print a report, or write it into a file and print that file's name.

    Raises:
        UsageError: the format does not support the report, or the file cannot be written.
    """
    from evalkit.reporting.report import render

    if standalone and form not in ("latex", "html"):
        raise UsageError(f"--standalone is for --format latex and html; it cannot be used with --format {form}")
    if output is not None:
        _write(output, render(report, form, standalone=standalone) + "\n")
        return
    width = None
    if form == "terminal":
        from evalkit.reporting.terminal import terminal_width

        width = terminal_width()
    click.echo(render(report, form, standalone=standalone, width=width))
    if form == "csv":
        for note in report.all_notes if report.records is not None else report.notes:
            click.echo(printable(note), err=True)


def print_run(run: Run, report: Report, form: Format, standalone: bool = False) -> None:
    """Print a report of a run with its selection of documents; in the terminal format, also the run's folder."""
    from evalkit.runs.traits import selection_words

    selected = selection_words(run)
    print_report(report.with_notes((f"documents: {selected}",)) if selected else report, form, standalone)
    if form == "terminal":
        click.echo(f"\n{printable(str(run.folder))}")


def _write(output: Path, text: str) -> None:
    from evalkit.paths import replace_file

    if output.is_dir():
        raise UsageError(f"{output} is a folder; name a file with --output")
    try:
        replace_file(output, text.encode())
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror or error}; choose another --output") from error
    click.echo(printable(str(output)))


def run_and_print(
    model: str, options: dict[str, Any], runner: JobRunner | None, output: Callable[[Run, str], None]
) -> None:
    """Run a benchmark and print the result.

    Args:
        model: see `evalkit.evaluate`.
        options: see `evalkit.evaluate`.
        runner: computes the run; None: this process.
        output: prints the finished run, under the requested rule.

    Raises:
        EvalkitError: the run failed; or, after all is saved and printed, something was skipped.
    """
    from evalkit.benchmarks.run import planned
    from evalkit.benchmarks.session import run_plan
    from evalkit.display import Progress
    from evalkit.errors import DataError

    with Progress() as progress:
        with doing("planning the run"):
            plan = planned(model, options, progress.say)
        run = run_plan(plan, progress) if runner is None else _run_by(runner, model, plan, progress)
    output(run, plan.manifest["rule"])
    if left_out := plan.manifest.get("left_out"):
        raise DataError(f"left out: {'; '.join(left_out)}")


def dry_run(models: Sequence[str], options: dict[str, Any]) -> Report:
    """Return what runs will take: documents, tokens, time and memory. Nothing is computed.

    Args:
        models: see `evalkit.evaluate`.
        options: see `evalkit.evaluate`.

    Raises:
        EvalkitError: a run cannot be planned.
    """
    from evalkit.benchmarks.run import planned
    from evalkit.display import Progress
    from evalkit.studies.dry_run import plans_report

    with Progress() as progress:
        with doing("planning the run"):
            plans = [(model, planned(model, options, progress.say)) for model in models]
        return plans_report(plans, progress.say)


def _run_by(runner: JobRunner, model: str, plan: Plan, progress: Progress) -> Run:
    """Have a run computed; raise a `RunError` if it is not finished."""
    from evalkit.errors import RunError
    from evalkit.runs.folder import load_run
    from evalkit.studies.planning import Job

    [outcome] = runner([Job(model, plan)], progress)
    if outcome.state != "finished":
        raise RunError(outcome.message)
    return load_run(plan.folder)


def run_several(models: Sequence[str], options: dict[str, Any], runner: JobRunner) -> tuple[Report, bool]:
    """Run a benchmark on several checkpoints.

    Args:
        models: see `evalkit.evaluate`.
        options: see `evalkit.evaluate`.
        runner: computes the runs.

    Returns:
        A summary, and whether all runs are finished and nothing was left out.

    Raises:
        EvalkitError: a run cannot be planned, or nothing can be computed.
    """
    from evalkit.benchmarks.run_summary import summary_report
    from evalkit.display import Progress
    from evalkit.studies.planning import plan_checkpoints

    with Progress() as progress:
        outcomes = runner(plan_checkpoints(models, options, progress.say), progress)
    runs = [_summarised(one) for one in outcomes]
    return summary_report(runs), not any(one.message for one in runs)


def _summarised(outcome: Outcome) -> SummarisedRun:
    from evalkit.benchmarks.run_summary import SummarisedRun
    from evalkit.runs.folder import load_run

    if outcome.state != "finished":
        return SummarisedRun(outcome.job.label, None, state=outcome.state, message=outcome.message)
    plan, run = outcome.job.plan, load_run(outcome.job.plan.folder)
    left_out = "; ".join(plan.manifest.get("left_out", ()))
    rule = run.other_rule(plan.manifest["rule"])
    return SummarisedRun(outcome.job.label, run, rule, message=f"left out: {left_out}" if left_out else "")
