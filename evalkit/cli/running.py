"""What commands share: the checkpoint, the runs of a study, the output's format, workers, and running a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.parameters import argument, flag, is_typed, option, require, typed_option
from evalkit.display import Progress, Say, doing
from evalkit.errors import DataError, RunError, UsageError
from evalkit.escape import printable
from evalkit.paths import RUNS, replace_file
from evalkit.reporting.table import Format
from evalkit.studies.cluster.resources import ClusterOptions

if TYPE_CHECKING:
    from evalkit.benchmarks.base import Plan
    from evalkit.reporting.report import Report
    from evalkit.runs.folder import Run
    from evalkit.studies.results import StudyResults
    from evalkit.studies.running import JobRunner, Outcome

RUN = argument()
RUNS_GIVEN = argument(required=False)
OUTPUT = option(RUNS, "Folder of run folders.", short="-o")
_IN: dict[str, Any] = {"option": "--in", "metavar": "FOLDER"}
RUNS_IN = typed_option(None, "Folder of run folders.", f"EVALKIT_OUTPUT, or {RUNS}", **_IN)
STUDY_IN = typed_option(None, "Folder of run folders.", f"a study's own; else EVALKIT_OUTPUT, or {RUNS}", **_IN)
OUTCOME = option(None, "accuracy, bits_per_byte, log_loss, … (evalkit ls outcomes).", "accuracy",
                 metavar="NAME")  # fmt: skip
DETAIL = option(False, "Also print every rule, the continuous outcomes, and the subjects of MMLU.")
PLOT = option(None, "Also draw it, into a .png, .pdf or .svg file.")
DRY_RUN = typed_option(False, "Compute nothing; print documents, tokens and time.", option="--dry-run")
STUDY = typed_option(None, "Study file, whose finished runs are read.", metavar="FILE.yaml")
BENCHMARK = typed_option(None, "Benchmark of the study.", "the only one that fits")
GROUPS = typed_option((), "Several seeds or checkpoints of one side; repeat for each side.", option="--group",
                      metavar="NAME=RUN,RUN,…", repeated=True)  # fmt: skip
CHECKPOINTS = argument(metavar="[CKPT]...", required=False)
MODEL = option(None, "Checkpoint folder, hub name, .gguf file, or demo. Or a pattern in quotes, such as "
               "'train/checkpoint-*'.  [required, here or as CKPT]")  # fmt: skip


def say(text: str) -> None:
    """Print a line about the output on standard error."""
    click.echo(printable(text), err=True)


def key_value(text: str, example: str) -> tuple[str, str]:
    """Return key and value of a `--set`."""
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text}: write KEY=VALUE, such as {example}")
    return key, value


def checkpoints_of(given: Sequence[str], model: str | None) -> tuple[str, ...]:
    """Return one checkpoint or several, as arguments or by `--model`; patterns are expanded.

    The command line overrides the environment.
    """
    from evalkit.cli.lm_eval import check_is_checkpoint
    from evalkit.models.loading.files import is_pattern, matching

    if given and model is not None and is_typed("model"):
        check_is_checkpoint(model)
        raise UsageError(f"the checkpoint is given twice, as {given[0]} and as --model {model}; give it once")
    if not given and model is None:
        command = click.get_current_context().command_path
        raise UsageError(
            f"name a checkpoint: {command} CKPT, or --model CKPT (a folder, a hub name, a .gguf file, or demo); see "
            f"{command} --help"
        )
    checkpoints: list[str] = []
    parent = click.get_current_context().parent
    for name in given or [model or ""]:
        if parent and name in getattr(parent.command, "commands", {}) and not Path(name).exists():
            raise UsageError(f"{name} is a command, which is written first: {parent.command_path} {name}")
        check_is_checkpoint(name)
        if is_pattern(name) and not matching(name):
            raise UsageError(f"{name}: no folder and no .gguf file matches")
        checkpoints += matching(name) if is_pattern(name) else [name]
    return tuple(dict.fromkeys(checkpoints))


def named_run(given: str, root: Path | None = None, usable: Callable[[Run], bool] = lambda _: True) -> Run:
    """Return the finished run that a command's RUN means, in a folder of runs or the default one."""
    from evalkit.comparison.naming import find_run
    from evalkit.runs.finding import root_of_runs

    return find_run(given, root or root_of_runs(), usable)


@dataclass(frozen=True)
class Source:
    """The runs that a command reads: those named by arguments, groups of them, or those of a study."""

    study: Path | None
    benchmark: str | None
    groups: tuple[str, ...] = ()
    root: Path | None = None
    """Folder of run folders; None: the default, of a study its own."""

    def __post_init__(self) -> None:
        require("--study", self.study is not None, benchmark=self.benchmark)
        if self.groups and self.study is not None:
            raise UsageError("--group is for runs; with --study the seeds of a name are its group: omit --group")

    def named(
        self, runs: Sequence[str], usable: Callable[[Run], bool] = lambda _: True, may_differ: bool = False
    ) -> tuple[list[Run], list[tuple[str, list[Run]]]]:
        """Return the finished runs that arguments mean, and those of the groups, as `find_groups`."""
        from evalkit.comparison.naming import find_groups
        from evalkit.comparison.sides import read_group
        from evalkit.runs.finding import root_of_runs

        groups = list(map(read_group, self.groups))
        return find_groups(runs, groups, self.root or root_of_runs(), usable, may_differ)

    @property
    def pairs_seeds(self) -> bool:
        """Whether the study declares that seeds are pairs."""
        return self.results is not None and self.results.study.pair_seeds

    @cached_property
    def results(self) -> StudyResults | None:
        """The study's runs; None without a study."""
        if self.study is None:
            return None
        from evalkit.studies.results import read_results

        return read_results(self.study, self.root)


@dataclass(frozen=True)
class Printer:
    """Prints reports in the format that a command was given."""

    form: Format = option("terminal", "Format of the output.", option="--format")
    standalone: bool = option(False, "Write a complete LaTeX document or HTML page.")
    quiet: bool = option(False, "Print the tables only, without sentences and notes.")

    def __call__(self, report: Report, output: Path | None = None) -> None:
        """Print a report, or write it into a file and print that file's name."""
        from evalkit.reporting.report import render
        from evalkit.reporting.terminal import terminal_width

        if self.standalone and self.form not in ("latex", "html"):
            raise UsageError(f"--standalone is for --format latex and html, not for --format {self.form}")
        report = report.tables_alone() if self.quiet else report
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

        selected, quantise = selection_words(run), run.manifest["specification"].get("quantise")
        notes = [f"documents: {selected}"] * bool(selected)
        self(report.with_notes(notes + [f"quantise: {quantise}, linear layers are rounded"] * bool(quantise)))
        if self.form == "terminal" and not self.quiet:
            click.echo(f"\n{printable(str(run.folder))}")


@dataclass(frozen=True)
class Workers(ClusterOptions):
    """What computes the runs of a command: this process, or workers."""

    def __post_init__(self) -> None:
        details = {"worker_cpus": self.worker_cpus, "worker_gpus": self.worker_gpus, "ship_checkpoints": self.ship}
        require("--workers N or --ray ADDRESS", bool(self.option), **details)
        super().__post_init__()

    @property
    def option(self) -> str:
        """The option by which workers are requested; empty: none are."""
        return "--workers" if self.workers is not None else "--ray" if self.address is not None else ""

    @property
    def runner(self) -> JobRunner:
        if self.option:
            from evalkit.studies.cluster.driver import ClusterRunner

            return ClusterRunner(self)
        from evalkit.studies.running import run_here

        return run_here


def plan_of(model: str, options: dict[str, Any], say: Say) -> Plan:
    """Plan the run of a checkpoint; `options` as of `evalkit.evaluate`."""
    from evalkit.benchmarks.run import planned

    with doing(f"planning the run of {model}"):
        return planned(model, options, say)


def dry_run(models: Sequence[str], options: dict[str, Any]) -> Report:
    from evalkit.studies.dry_run import plans_report

    with Progress() as progress:
        runs = [(model, given) for model in models for given in with_uncontrolled(options)]
        plans = [(model, plan_of(model, given, progress.say)) for model, given in runs]
        return plans_report(plans, progress.say)


def with_uncontrolled(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the options of a run; and, of a control, those of the run without it that it is compared with."""
    return [options] + ([options | {"control": None}] if options.get("control") else [])


def draw_into(plot: Path | None, draw: Callable[..., None], *arguments: Any) -> None:
    """Draw into the file of --plot, if it is given: the last argument of `draw`."""
    if plot is not None:
        draw(*arguments, plot)
        say(f"{plot} has been written")


def draw_runs(plot: Path | None, draw: Callable[..., None], runs: Sequence[Run]) -> None:
    """Draw runs by their names into the file of --plot, if it is given."""
    from evalkit.comparison.sides import names

    draw_into(plot, draw, runs, names(runs))


def evaluate(
    models: Sequence[str],
    options: dict[str, Any],
    printer: Printer,
    is_dry: bool,
    workers: Workers | None = None,
    show: Callable[[Run, str], Report] | None = None,
    draw: Callable[[Sequence[Run]], None] | None = None,
    of_one: Mapping[str, Any] | None = None,
    detail: bool = False,
) -> int:
    """Run a benchmark on checkpoints and print its report, of several a line each; of a dry run, what it would take.

    `options` as of `evalkit.evaluate`. `show` returns the report of a finished run under the requested rule, by
    default the benchmark's own, in `detail` if requested. `of_one` are options that several checkpoints cannot have.

    Returns:
        The exit code: 1 if one of several runs is not finished, or left out tasks.

    Raises:
        DataError: tasks of a single run were left out; after all is saved and printed.
    """
    if is_dry:
        printer(dry_run(models, options))
        return 0
    if len(models) > 1:
        single = {"name": options.get("name"), "detail": detail, **(of_one or {})}
        if given := [name for name, value in single.items() if value]:
            raise UsageError(f"{flag(given[0])}: is for one checkpoint, not several")
        return _evaluate_several(models, options, printer, workers, draw)
    from evalkit.benchmarks.registry import results_of
    from evalkit.benchmarks.session import run_plan
    from evalkit.studies.running import Job

    [model] = models
    with Progress() as progress:
        plan, *_ = plans = [plan_of(model, given, progress.say) for given in with_uncontrolled(options)]
        if workers and workers.option:
            run, *others = finished_runs(workers.runner([Job(model, plan) for plan in plans], progress))
        else:
            run, *others = [run_plan(plan, progress) for plan in plans]
    if (name := options.get("name")) not in (None, run.model):
        say(f"these settings were already run, under the name {run.model}; --name {name} is not used")
    with doing("reading scores"):
        rule = plan.manifest["rule"]
        # Without choices, the rule is the benchmark's own measure
        shown = run.other_rule(rule) if run.rule else run.kind
        report = show(run, rule) if show else results_of(run).report(shown, detail)
        for uncontrolled in others:
            report = _with_drop(report, uncontrolled, run, rule)
    printer.run(run, report)
    if draw:
        draw([run])
    if left_out := plan.manifest.get("left_out"):
        raise DataError(f"left out: {'; '.join(left_out)}")
    return 0


def _evaluate_several(
    models: Sequence[str],
    options: dict[str, Any],
    printer: Printer,
    workers: Workers | None,
    draw: Callable[[Sequence[Run]], None] | None,
) -> int:
    from evalkit.benchmarks.run_listing import Summarised, summary_report
    from evalkit.runs.folder import load_run
    from evalkit.studies.running import plan_checkpoints, run_here

    with Progress() as progress:
        jobs = plan_checkpoints(models, options, progress.say)
        outcomes = (workers.runner if workers else run_here)(jobs, progress)
    entries = []
    for outcome in outcomes:
        label, plan = outcome.job.label, outcome.job.plan
        if outcome.state != "finished":
            entries.append(Summarised(label, (), state=outcome.state, message=outcome.message))
            continue
        run, left_out = load_run(plan.folder), "; ".join(plan.manifest.get("left_out", ()))
        rule = run.other_rule(plan.manifest["rule"])
        entries.append(Summarised(label, (run,), rule, message=f"left out: {left_out}" if left_out else ""))
    printer(summary_report(entries))
    if draw and (runs := [run for entry in entries for run in entry.runs]):
        draw(runs)
    return 1 if any(entry.message for entry in entries) else 0


def _with_drop(report: Report, run: Run, control: Run, rule: str) -> Report:
    """Return the report of a control with its paired differences from the run without it."""
    from evalkit.comparison.comparison import compare_sides
    from evalkit.comparison.comparison_report import comparison_report
    from evalkit.comparison.sides import Side
    from evalkit.reporting.report import Report

    sides = Side("own contexts", (run,)), Side("other documents' contexts", (control,))
    drop = comparison_report(compare_sides(sides, rule))
    content = report.content | {"control": drop.content}
    return Report((), content=content, records=report.records, parts=(*(report.parts or (report,)), *drop.parts))


def finished_runs(outcomes: Sequence[Outcome]) -> list[Run]:
    from evalkit.runs.folder import load_run

    for outcome in outcomes:
        if outcome.state != "finished":
            label = f"{outcome.job.label}: " if len(outcomes) > 1 else ""
            raise RunError(f"{label}{outcome.message}")
    return [load_run(outcome.job.plan.folder) for outcome in outcomes]
