"""`evalkit report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from evalkit.cli.options import GROUP, OUTCOME, STUDY, check_benchmark, check_groups, named_run
from evalkit.cli.parameters import FOLDER, argument, comma_separated, option, typed_option
from evalkit.display import doing
from evalkit.errors import UsageError
from evalkit.escape import printable

if TYPE_CHECKING:
    from evalkit.pages.report import PageContents


@click.command()
@argument("runs", nargs=-1)
@GROUP
@STUDY
@typed_option("--benchmark", help="Benchmark of the study.  [default: all]")
@option("--rule", help="How answers are chosen in comparisons (evalkit ls rules).  [default: the runs' own]")
@OUTCOME
@typed_option("--names", callback=comma_separated, help="Names of RUNS in the page, separated by commas.  [default: "
              "their models]")  # fmt: skip
@typed_option("--title", help="Title of the page.  [default: the names of the runs]")
@typed_option("--without-documents", is_flag=True, help="Leave out the documents: a page of some 100 kB.")
@typed_option("--sample", type=click.IntRange(min=1), help="At most this many random documents of each task.  "
              "[default: all]")  # fmt: skip
@typed_option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the sample; a larger sample "
              "contains the smaller one.")  # fmt: skip
@typed_option("--output", "-o", type=FOLDER, default=Path("report.html"), show_default=True, help="File to write.")
def report(
    runs: tuple[str, ...],
    groups: tuple[str, ...],
    study: Path | None,
    benchmark: str | None,
    rule: str | None,
    outcome: str | None,
    names: tuple[str, ...] | None,
    title: str | None,
    without_documents: bool,
    sample: int | None,
    seed: int,
    output: Path,
) -> None:
    """Write one HTML page of finished runs: results, comparisons, figures, and every document with its scores.

    The page is one file. It opens from disk in a browser, without a network, so it can be sent to anyone. The first run
    is the baseline; runs of several suites can share a page. RUNS are run folders, or ids, names or checkpoints of runs
    in results/runs or EVALKIT_OUTPUT (evalkit ls runs). With --study they are names of its checkpoints, NAME or
    NAME@STEP; without any, all that are finished.

    \b
    evalkit report RUN -o report.html
    evalkit report RUN_A RUN_B RUN_C -o report.html                   with comparisons
    evalkit report --study study.yaml --sample 200 -o report.html
    evalkit report RUN --without-documents -o summary.html            some 100 kB
    """
    _check(study, benchmark, groups, names, without_documents, sample, output)
    with doing("reading runs"):
        from evalkit.runs.outcomes import outcome_key

        contents = _contents(runs, groups, study, benchmark, outcome_key(outcome, rule), names)
    for note in contents.notes:
        click.echo(printable(note), err=True)
    from evalkit.data.sampling import DocumentSample
    from evalkit.pages.report import PageRequest, write_report

    chosen = None if sample is None else DocumentSample(sample, seed)
    request = PageRequest(title, not without_documents, chosen)
    size = write_report(contents, request, output, lambda text: click.echo(printable(text), err=True))
    click.echo(printable(f"{output} ({size / 1e6:,.1f} MB)"))


def _check(
    study: Path | None,
    benchmark: str | None,
    groups: tuple[str, ...],
    names: tuple[str, ...] | None,
    without_documents: bool,
    sample: int | None,
    output: Path,
) -> None:
    """Validate a command before any run is read."""
    check_benchmark(benchmark, study)
    check_groups(groups, study)
    if study is not None and names:
        raise UsageError("--names is for runs; with --study its own names are used: omit --names")
    if without_documents and sample is not None:
        raise UsageError("--sample chooses documents, and --without-documents leaves them out; give one of them")
    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--output {output}: the report is an HTML page; give a file name that ends in .html")


def _contents(
    runs: tuple[str, ...],
    groups: tuple[str, ...],
    study: Path | None,
    benchmark: str | None,
    rule: str | None,
    names: tuple[str, ...] | None,
) -> PageContents:
    from evalkit.pages.report import contents_of_runs, contents_of_study

    if study is not None:
        from evalkit.studies.results import read_results

        return contents_of_study(read_results(study), runs, benchmark, rule)
    from evalkit.comparison.sides import read_group

    named = [read_group(group) for group in groups]
    return contents_of_runs(
        [named_run(run) for run in runs],
        [(name, [named_run(run) for run in members]) for name, members in named],
        rule,
        names or (),
    )
