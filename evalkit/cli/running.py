"""Running a benchmark from a command: options → plan → run or dry run → printed report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from evalkit.cli.parameters import Command, option, option_group, require, typed_option
from evalkit.display import Progress, Say, doing
from evalkit.errors import DataError, RunError, UsageError
from evalkit.escape import printable
from evalkit.paths import replace_file
from evalkit.reporting.table import FORMATS, Format

if TYPE_CHECKING:
    from evalkit.benchmarks.base import Plan
    from evalkit.reporting.report import Report
    from evalkit.runs.folder import Run
    from evalkit.studies.running import JobRunner, Outcome


def say(text: str) -> None:
    """Print a line about the output on standard error."""
    click.echo(printable(text), err=True)


@dataclass(frozen=True)
class Printer:
    """Prints reports in the format that a command was given."""

    form: Format
    standalone: bool

    def __call__(self, report: Report, output: Path | None = None) -> None:
        """Print a report, or write it into a file and print that file's name.

        Raises:
            UsageError: the format does not support the report, or the file cannot be written.
        """
        from evalkit.reporting.report import render
        from evalkit.reporting.terminal import terminal_width

        if self.standalone and self.form not in ("latex", "html"):
            raise UsageError(f"--standalone is for --format latex and html, not for --format {self.form}")
        width = terminal_width() if self.form == "terminal" and output is None else None
        text = render(report, self.form, standalone=self.standalone, width=width)
        if output is None:
            click.echo(text)
            if self.form == "csv":
                for note in report.all_notes if report.records is not None else report.notes:
                    say(note)
            return
        try:
            replace_file(output, f"{text}\n".encode())
        except (OSError, ValueError) as error:  # ValueError: the path of a folder without a name, such as "."
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"--output {output} cannot be written: {reason}; choose another file") from error
        click.echo(printable(str(output)))

    def run(self, run: Run, report: Report) -> None:
        """Print a report of a run with its selection of documents; in the terminal format, also the run's folder."""
        from evalkit.runs.traits import selection_words

        selected = selection_words(run)
        self(report.with_notes((f"documents: {selected}",)) if selected else report)
        if self.form == "terminal":
            click.echo(f"\n{printable(str(run.folder))}")


def PRINTING(command: Command) -> Command:
    """Add the options of the output's format, which the command gets as a `Printer`."""

    @wraps(command)
    def called(*arguments: Any, form: Format, standalone: bool, **options: Any) -> Any:
        return command(*arguments, printer=Printer(form, standalone), **options)

    add = option_group(
        option("--format", "form", type=click.Choice(FORMATS), default="terminal", help="Format of the output."),
        option("--standalone", is_flag=True, help="Write a complete LaTeX document or HTML page."),
    )
    added: Any = add(called)
    return cast(Command, added)


DRY_RUN = typed_option(
    "--dry-run", "without_computing", is_flag=True, help="Compute nothing; print documents, tokens and time."
)
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


@dataclass(frozen=True)
class Workers:
    """What computes the runs of a command: the values of `WORKERS`."""

    runner: JobRunner
    """Computes runs: in this process, if no workers are requested."""
    given: str = ""
    """The option by which workers are requested; empty: none are."""


def workers_of(options: dict[str, Any]) -> Workers:
    """Remove the options of `WORKERS` from a command's options, and return what they say.

    Raises:
        UsageError: an option of workers is given without workers.
    """
    workers, ray = options.pop("workers", None), options.pop("ray", None)
    details = {name: options.pop(name, None) for name in ("worker_cpus", "worker_gpus", "ship_checkpoints")}
    require("--workers N or --ray ADDRESS", workers is not None or ray is not None, **details)
    if workers is None and ray is None:
        from evalkit.studies.running import run_here

        return Workers(run_here)
    from evalkit.studies.cluster.driver import ClusterRunner
    from evalkit.studies.cluster.resources import ClusterOptions

    runner = ClusterRunner(ClusterOptions(workers, ray, *details.values()))
    return Workers(runner, "--ray" if workers is None else "--workers")


def plan_of(model: str, options: dict[str, Any], say: Say) -> Plan:
    """Plan the run of a checkpoint; `options` as of `evalkit.evaluate`."""
    from evalkit.benchmarks.run import planned

    with doing(f"planning the run of {model}"):
        return planned(model, options, say)


Show = Callable[["Run", str], "Report"]
"""(finished run, requested rule) → its report."""


@dataclass(frozen=True)
class Evaluation:
    """What a command computes and how it prints it."""

    workers: Workers
    is_dry: bool
    print: Printer
    options: dict[str, Any]
    """See `evalkit.evaluate`."""

    def run(self, model: str, show: Show | None = None, draw: Callable[[Run], None] | None = None) -> None:
        """Run the benchmark on a checkpoint, and print its report or that of `show`; of a dry run, what it would take.

        Raises:
            EvalkitError: the run failed; or, after all is saved and printed, something was skipped.
        """
        from evalkit.benchmarks.registry import benchmark_of
        from evalkit.benchmarks.session import run_plan
        from evalkit.studies.running import Job

        if self.is_dry:
            self.print(dry_run([model], self.options))
            return
        with Progress() as progress:
            plan = plan_of(model, self.options, progress.say)
            if self.workers.given:
                [run] = finished_runs(self.workers.runner([Job(model, plan)], progress))
            else:
                run = run_plan(plan, progress)
        with doing("reading scores"):
            rule = plan.manifest["rule"]
            report = show(run, rule) if show else benchmark_of(run).report(run, rule)
        self.print.run(run, report)
        if draw:
            draw(run)
        if left_out := plan.manifest.get("left_out"):
            raise DataError(f"left out: {'; '.join(left_out)}")


def evaluation_of(command: dict[str, Any]) -> Evaluation:
    """Take the options of a command apart, and return what it computes."""
    return Evaluation(workers_of(command), command.pop("without_computing"), command.pop("printer"), command)


def dry_run(models: Sequence[str], options: dict[str, Any]) -> Report:
    """Return what runs will take: documents, tokens and time; arguments as of `evalkit.evaluate`."""
    from evalkit.studies.dry_run import plans_report

    with Progress() as progress:
        return plans_report([(model, plan_of(model, options, progress.say)) for model in models], progress.say)


def finished_runs(outcomes: Sequence[Outcome]) -> list[Run]:
    """Open the computed runs. Raises a `RunError` if one is not finished."""
    from evalkit.runs.folder import load_run

    for outcome in outcomes:
        if outcome.state != "finished":
            label = f"{outcome.job.label}: " if len(outcomes) > 1 else ""
            raise RunError(f"{label}{outcome.message}")
    return [load_run(outcome.job.plan.folder) for outcome in outcomes]


def run_several(models: Sequence[str], options: dict[str, Any], runner: JobRunner) -> tuple[Report, bool]:
    """Run a benchmark on several checkpoints; return a summary, and whether all are finished and nothing was left out.

    Raises:
        EvalkitError: a run cannot be planned, or nothing can be computed.
    """
    from evalkit.benchmarks.run_listing import SummarisedRun, summary_report
    from evalkit.runs.folder import load_run
    from evalkit.studies.running import plan_checkpoints

    with Progress() as progress:
        outcomes = runner(plan_checkpoints(models, options, progress.say), progress)
    runs = []
    for outcome in outcomes:
        label, plan = outcome.job.label, outcome.job.plan
        if outcome.state != "finished":
            runs.append(SummarisedRun(label, None, state=outcome.state, message=outcome.message))
            continue
        run, left_out = load_run(plan.folder), "; ".join(plan.manifest.get("left_out", ()))
        rule = run.other_rule(plan.manifest["rule"])
        runs.append(SummarisedRun(label, run, rule, message=f"left out: {left_out}" if left_out else ""))
    return summary_report(runs), not any(run.message for run in runs)
