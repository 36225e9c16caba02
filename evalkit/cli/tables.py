"""`evalkit table`, `evalkit integrity` and `evalkit export`: results as tables and exports."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.activity import doing
from evalkit.cli.options import EXPORT, FOLDER, RUN, argument, named_run, option, typed_option
from evalkit.cli.printing import PRINTING, print_report
from evalkit.errors import UsageError
from evalkit.reporting.escape import printable

if TYPE_CHECKING:
    from evalkit.reporting.formats import Format

_SOURCES = ("published", "runs", "both")

_FILE = typed_option("--output", "-o", type=FOLDER, help="File to write.  [default: the terminal]")


@click.command()
@argument("name", required=False)
@argument("more", nargs=-1, metavar="")
@option("--source", type=click.Choice(_SOURCES), default="published", help="Source of numbers: the paper, "
        "runs, or runs with the difference to the paper.")  # fmt: skip
@option("--runs", metavar="RUN RUN …|FILE.yaml", help="Runs, assigned to rows by their models; or a YAML "
        "file that maps rows to runs.")  # fmt: skip
@option("--rule", help="How the runs' answers are chosen (evalkit ls rules).  [default: the runs' own]")
@option("--stderr", "spreads", is_flag=True, help="Print ±: standard error of a run, deviation over several.")
@option(
    "--significance",
    is_flag=True,
    help="Mark best numbers with a significant lead (as compare tests).",
)
@option(
    "--allow-mixed", "mixed", is_flag=True, help="Mark runs with another protocol than the first; do not reject them."
)
@option("--as-printed", is_flag=True, help="The paper's own averages and marks, errors included.")
@option("--audit", is_flag=True, help="Where the paper's tables and text contradict its numbers.")
@PRINTING
@_FILE
def table(
    name: str | None,
    more: tuple[str, ...],
    runs: str | None,
    audit: bool,
    form: Format,
    standalone: bool,
    output: Path | None,
    **options: object,
) -> None:
    """Print one of the paper's tables, filled from the paper or from your runs; NAME may be your own layout file.

    \b
    evalkit table main_res
    evalkit table main_res --format latex --standalone -o main_res.tex
    evalkit table sig_abl_main --source runs --runs RUN RUN RUN
    evalkit table main_res --source both --runs my_runs.yaml --stderr
    evalkit table my_table.yaml --source runs --runs my_runs.yaml --format markdown
    evalkit table --audit
    """
    from evalkit.reporting.report import Report
    from evalkit.tables.layout import layout_names
    from evalkit.tables.request import TableRequest, audited, make

    if more and runs is None:
        raise UsageError(f"{more[0]}: a table has one NAME; give runs after --runs")
    if audit:
        if runs or options["as_printed"]:
            raise UsageError("--audit reads the published tables only; omit --runs and --as-printed")
        made = audited([name] if name else layout_names())
    elif name is None:
        raise UsageError(f"name a table, or a layout file: {', '.join(layout_names())}; or give --audit")
    else:
        with doing("reading runs") if runs else nullcontext():
            made = make(TableRequest(name, **_runs(runs, more), **options))  # type: ignore[arg-type]
    print_report(Report((made,)), form, standalone, output)


def _runs(first: str | None, more: tuple[str, ...]) -> dict[str, Any]:
    """Parse --runs: a mapping, or runs."""
    if first is None:
        return {}
    given = (first, *more)
    files = [text for text in given if text.endswith((".yaml", ".yml")) or Path(text).is_file()]
    if files and len(given) > 1:
        raise UsageError(f"--runs {' '.join(given)}: give one YAML file, or runs alone")
    return {"mapping": Path(first)} if files else {"runs": given}


@click.command()
@RUN
@option("--rule", help="How the run's answers are chosen (evalkit ls rules).  [default: the run's own]")
@option("--tokens", help="Number of training tokens, printed as given: 128B.")
@PRINTING
@_FILE
def integrity(
    run: str, rule: str | None, tokens: str | None, form: Format, standalone: bool, output: Path | None
) -> None:
    """Print a run beside public models, as the paper's integrity check does, and how the protocols differ.

    RUN is a run folder, or the id, name or checkpoint of one in results/runs or EVALKIT_OUTPUT (evalkit ls runs).

    \b
    evalkit integrity 1a2b3c4d --tokens 128B
    """
    from evalkit.reporting.report import Report
    from evalkit.tables.integrity import check

    with doing("reading scores"):
        made = check(named_run(run), rule, tokens)
    print_report(Report((made,)), form, standalone, output)


@click.command()
@RUN
@option("--to", "form", type=EXPORT, help="lm_eval: lm-eval's results file; hub: the Hugging Face hub's "
        "metadata; every_eval_ever: the Every Eval Ever schema; or another's (evalkit ls exports).")  # fmt: skip
@option("--rule", help="How answers are chosen, for all but lm_eval.  [default: the run's own]")
@typed_option("--output", "-o", type=FOLDER, help="Folder to write into.  [default: one in the run folder]")
def export(run: str, form: str | None, rule: str | None, output: Path | None) -> None:
    """Export a finished run to another tool's format; prints the files.

    RUN is a run folder, or the id, name or checkpoint of one in results/runs or EVALKIT_OUTPUT (evalkit ls runs).

    \b
    evalkit export 1a2b3c4d --to hub
    """
    from evalkit.export import export_run, form_names

    if form is None:
        raise UsageError(f"give a format: --to {' | '.join(form_names())}")
    with doing(f"exporting {run}"):
        written = export_run(named_run(run), form, rule, output)
    for path in written:
        click.echo(printable(str(path)))
