"""`evalkit table`, `evalkit integrity` and `evalkit export`: results as tables and exports."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.cli.options import OUTCOME, RUN, Source, named_run, source
from evalkit.cli.parameters import FOLDER, argument, exclude, option, require, typed_option
from evalkit.cli.running import PRINTING, Printer, say
from evalkit.display import doing
from evalkit.errors import EvalkitError, TableError, UsageError
from evalkit.escape import printable
from evalkit.reporting.table import SUFFIXES

if TYPE_CHECKING:
    from evalkit.reporting.table import Table
    from evalkit.studies.tables import FilledTable, UnfilledTable
    from evalkit.tables.request import TableRequest

_SOURCES = ("published", "runs", "both")

_FILE = typed_option("--output", "-o", type=FOLDER, help="File to write.  [default: the terminal]")


@click.command()
@argument("name", required=False)
@argument("more", nargs=-1, metavar="")
@option("--source", "origin", type=click.Choice(_SOURCES), help="Source of numbers: the paper, runs, or runs with the "
        "difference to the paper.  [default: published; runs with --study]")  # fmt: skip
@option("--runs", metavar="RUN RUN …|FILE.yaml", help="Runs, assigned to rows by their models; or a YAML "
        "file that maps rows to runs.")  # fmt: skip
@source()
@option("--rule", help="How the runs' answers are chosen (evalkit ls rules).  [default: the runs' own]")
@OUTCOME
@option("--stderr", "spreads", is_flag=True, help="Print ±: standard error of a run, deviation over several.")
@option(
    "--significance",
    is_flag=True,
    help="Mark best numbers with a significant lead (as compare tests).",
)
@option(
    "--allow-mixed", "mixed", is_flag=True, help="Mark runs with another protocol than the first; do not reject them."
)
@option("--drop-empty", is_flag=True, help="Leave out rows without a run, and sections without rows.")
@option("--as-printed", is_flag=True, help="The paper's own averages and marks, errors included.")
@option("--audit", is_flag=True, help="Where the paper's tables and text contradict its numbers.")
@typed_option("--all", "every", is_flag=True, help="Every table, a file each in the folder --output; with --study "
              "those that it has runs for.")  # fmt: skip
@PRINTING
@typed_option("--output", "-o", type=FOLDER, help="File to write, with --all the folder.  [default: the terminal]")
def table(
    name: str | None,
    more: tuple[str, ...],
    origin: str | None,
    runs: str | None,
    source: Source,
    audit: bool,
    every: bool,
    printer: Printer,
    output: Path | None,
    **options: Any,
) -> int:
    """Print one of the paper's tables, filled from the paper or from your runs; NAME may be your own layout file.

    \b
    evalkit table main_res
    evalkit table main_res --format latex --standalone -o main_res.tex
    evalkit table sig_abl_main --source runs --runs RUN RUN RUN
    evalkit table main_res --source both --runs my_runs.yaml --stderr
    evalkit table my_table.yaml --source runs --runs my_runs.yaml --format markdown
    evalkit table main_res --study study.yaml --drop-empty
    evalkit table main_res --study study.yaml --outcome bits_per_byte
    evalkit table --all --study study.yaml --format latex -o tables/
    evalkit table --audit
    """
    from evalkit.reporting.report import Report
    from evalkit.tables.layout import layout_names
    from evalkit.tables.request import TableRequest, make

    if more and runs is None:
        raise UsageError(f"{more[0]}: a table has one NAME; give runs after --runs")
    exclude(study=source.study, runs=runs)
    if source.study is not None and origin == "published":
        raise UsageError("--study is for --source runs or both; omit --source published")
    request = TableRequest(name or "", origin or ("published" if source.study is None else "runs"), **options)
    if every:
        if name is not None:
            raise UsageError(f"--all prints every table; omit {name}")
        exclude(all=True, audit=audit, runs=runs)
        require("--output FOLDER", output is not None, all=True)
        return _print_every(request, source, printer, output or Path())
    if audit:
        exclude(audit=True, runs=runs, study=source.study, as_printed=request.as_printed)
        from evalkit.tables.audit import audited

        made = audited([name] if name else layout_names())
    elif name is None:
        raise UsageError(f"name a table, or a layout file: {', '.join(layout_names())}; or give --all or --audit")
    elif source.study is not None:
        made = _of_study(request, source)
    else:
        with doing("reading runs") if runs else nullcontext():
            made = make(replace(request, **_runs(runs, more)))
    printer(Report((made,)), output)
    return 0


def _of_study(request: TableRequest, source: Source) -> Table:
    """Fill a table from a study; the study's models that are not in it are listed on standard error."""
    from evalkit.studies.tables import UnfilledTable

    with doing("reading runs"):
        filled = _filled(request, source)
    if isinstance(filled, UnfilledTable):
        raise UsageError(f"study {source.study} cannot fill table {filled.name}: {filled.why}")
    for line in filled.without_row:
        click.echo(f"not in {filled.table.name}: {line}", err=True)
    return filled.table


def _filled(request: TableRequest, source: Source) -> FilledTable | UnfilledTable:
    from evalkit.studies.tables import FilledTable, study_table
    from evalkit.tables.request import make

    if source.results is None:
        return FilledTable(make(request), ())
    return study_table(source.results, request, source.benchmark)


def _print_every(request: TableRequest, source: Source, printer: Printer, folder: Path) -> int:
    """Write every table into a folder; return the exit code. A table that fails does not stop the others."""
    from evalkit.reporting.report import Report
    from evalkit.studies.tables import UnfilledTable, study_layouts
    from evalkit.tables.layout import layout_names

    if source.results is not None and source.benchmark is not None:
        source.results.study.benchmark(source.benchmark)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder} cannot be made: {error.strerror or error}") from error
    written: set[str] = set()
    failed = False
    for name in layout_names() if source.results is None else study_layouts(source.results.study):
        try:
            with doing(f"table {name}"):
                filled = _filled(replace(request, name=name), source)
            if isinstance(filled, UnfilledTable):
                say(f"left out: {filled.name}: {filled.why}")
                continue
            if filled.table.name in written:
                raise UsageError(f"another table is called {filled.table.name}; rename the layout's file")
            written.add(filled.table.name)
            printer(Report((filled.table,)), folder / f"{filled.table.name}{SUFFIXES[printer.form]}")
        except EvalkitError as error:
            say(f"evalkit: table {Path(name).stem}: {error}")
            failed = True
    if not (written or failed):
        raise TableError(f"study {source.study} has no finished run for any table")
    return int(failed)


def _runs(first: str | None, more: tuple[str, ...]) -> dict[str, Any]:
    """Parse --runs: a mapping, or runs."""
    if first is None:
        return {}
    runs = (first, *more)
    files = [text for text in runs if text.endswith((".yaml", ".yml")) or Path(text).is_file()]
    if files and more:
        raise UsageError(f"--runs {' '.join(runs)}: give one YAML file, or runs alone")
    return {"mapping": Path(first)} if files else {"runs": runs}


@click.command()
@RUN
@option("--rule", help="How the run's answers are chosen (evalkit ls rules).  [default: the run's own]")
@option("--tokens", help="Number of training tokens, printed as given: 128B.")
@PRINTING
@_FILE
def integrity(run: str, rule: str | None, tokens: str | None, printer: Printer, output: Path | None) -> None:
    """Print a run beside public models, as the paper's integrity check does, and how the protocols differ.

    RUN is a run folder, or the id, name or checkpoint of one in results/runs or EVALKIT_OUTPUT (evalkit ls runs).

    \b
    evalkit integrity 1a2b3c4d --tokens 128B
    """
    from evalkit.reporting.report import Report
    from evalkit.tables.integrity import check

    with doing("reading scores"):
        made = check(named_run(run), rule, tokens)
    printer(Report((made,)), output)


@click.command()
@RUN
@option("--to", "form", help="lm_eval: lm-eval's results file; hub: the Hugging Face hub's "
        "metadata; every_eval_ever: the Every Eval Ever schema; run: the run folder, to publish, without its journal "
        "and the machine's paths; or another's (evalkit ls exports).")  # fmt: skip
@option("--rule", help="How answers are chosen, for all but lm_eval and run.  [default: the run's own]")
@typed_option("--output", "-o", type=FOLDER, help="Folder to write into.  [default: one in the run folder]")
def export(run: str, form: str | None, rule: str | None, output: Path | None) -> None:
    """Export a finished run to another tool's format; prints the files.

    RUN is a run folder, or the id, name or checkpoint of one in results/runs or EVALKIT_OUTPUT (evalkit ls runs).

    \b
    evalkit export 1a2b3c4d --to hub
    evalkit export 1a2b3c4d --to run -o published
    """
    from evalkit.exchange.exports import export_run, form_names

    if form is None:
        raise UsageError(f"give a format: --to {' | '.join(form_names())}")
    with doing(f"exporting {run}"):
        written = export_run(named_run(run), form, rule, output)
    for path in written:
        click.echo(printable(str(path)))
