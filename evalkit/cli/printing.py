"""Printing of reports, with the same formats for every command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from evalkit.cli.parameters import option, option_group
from evalkit.errors import UsageError
from evalkit.reporting.escape import printable
from evalkit.reporting.formats import FORMATS, Format

if TYPE_CHECKING:
    from evalkit.reporting.report import Report
    from evalkit.runs.folder import Run

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
    from evalkit.atomic import replace_file

    if output.is_dir():
        raise UsageError(f"{output} is a folder; name a file with --output")
    try:
        replace_file(output, text.encode())
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror or error}; choose another --output") from error
    click.echo(printable(str(output)))
