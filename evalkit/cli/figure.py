"""`evalkit figure`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from evalkit.benchmarks.attention.groups import KINDS, Band, FigureRequest, parsed_layers
from evalkit.cli.options import BENCHMARK, STUDY, check_benchmark, named_run
from evalkit.cli.parameters import FOLDER, argument, comma_separated, option, typed_option
from evalkit.display import doing
from evalkit.errors import UsageError
from evalkit.escape import printable

if TYPE_CHECKING:
    from evalkit.benchmarks.attention.figure_runs import AnalysedRun
    from evalkit.runs.folder import Run

_SUFFIXES = (".pdf", ".png")
"""Of the files that --all writes."""


@click.command()
@argument("figure", required=False, metavar="[NAME]")
@argument("runs", nargs=-1)
@STUDY
@BENCHMARK
@typed_option("--all", "every", is_flag=True, help="Every figure that the runs have measures for, as .pdf and .png in "
              "the folder --output.")  # fmt: skip
@typed_option("--list", "listed", is_flag=True, help="List the figures and their options.")
@typed_option("--names", callback=comma_separated, help="Names of the runs in the legend, separated by commas.  "
              "[default: their models]")  # fmt: skip
@option("--layers", callback=comma_separated, metavar="NUMBERS", help="From 0, or from -1 for the last one backwards.  "
        "[default: all; bos: the last; position of several runs: first, middle, last]")  # fmt: skip
@option("--tasks", callback=comma_separated, metavar="NAMES", help="Documents of these tasks only.  [default: all]")
@typed_option("--band", type=click.Choice(get_args(Band)), help="What the standard deviation is over.  [default: the "
              "paper's of each figure]")  # fmt: skip
@typed_option("--measure", help="Of bos, rank and heatmap: another measure (see --list).")
@typed_option("--paper", is_flag=True, help="Of entropy and categories: the paper's definition alone.")
@typed_option("--output", "-o", type=FOLDER, help="File .pdf, .png or .svg; with --all a folder.  [default: NAME.pdf]")
def figure(
    figure: str | None,
    runs: tuple[str, ...],
    study: Path | None,
    benchmark: str | None,
    every: bool,
    listed: bool,
    names: tuple[str, ...] | None,
    layers: tuple[str, ...] | None,
    tasks: tuple[str, ...] | None,
    band: Band | None,
    measure: str | None,
    paper: bool,
    output: Path | None,
) -> None:
    """Draw finished runs of evalkit attention: the paper's figures and others. NAME is one of evalkit figure --list.

    RUNS are run folders, or ids, names or checkpoints of runs in results/runs or EVALKIT_OUTPUT (evalkit ls runs). With
    --study they are names of its checkpoints, NAME or NAME@STEP; without any, all that are finished. The drawn numbers
    are written beside the figure as .csv, shares as fractions. Notes below the figure state what lines and bands are
    means and deviations of, and in what the runs differ besides their models.

    \b
    evalkit figure entropy RUN_A RUN_B -o entropy.pdf              and entropy.csv
    evalkit figure bos RUN_A RUN_B --names Vanilla,Diff --layers -1
    evalkit figure heatmap RUN --measure distance -o distance.png
    evalkit figure categories --paper --study study.yaml -o categories.pdf
    evalkit figure --all RUN_A RUN_B -o figures/
    """
    if listed:
        _list()
        return
    if every and figure is not None:
        runs, figure = (figure, *runs), None
    request = FigureRequest(parsed_layers(layers or ()), tasks or (), band, measure, paper)
    _check(figure, runs, every, study, benchmark, request, output)
    with doing("reading runs"):
        analysed, notes = _analysed(runs, study, benchmark, names, request)
    for note in notes:
        click.echo(printable(note), err=True)
    if figure is None:
        assert output is not None
        _draw_every(analysed, request, output)
    else:
        _draw(figure, analysed, request, [output or Path(f"{figure}.pdf")])


def _check(
    figure: str | None,
    runs: tuple[str, ...],
    every: bool,
    study: Path | None,
    benchmark: str | None,
    request: FigureRequest,
    output: Path | None,
) -> None:
    """Validate a command before any run is read."""
    if figure is None and not every:
        raise UsageError(f"name a figure: {', '.join(KINDS)}; or give --all")
    check_benchmark(benchmark, study)
    if figure is not None:
        from evalkit.reporting.figures import check_figure_path

        request.check(figure)
        check_figure_path(output or Path(f"{figure}.pdf"))
    else:
        if request.measure or request.paper:
            raise UsageError(f"{'--measure' if request.measure else '--paper'} is for one figure; name it in place of "
                             "--all")  # fmt: skip
        if output is None:
            raise UsageError("--all writes several files; give their folder: -o figures/")
        if output.exists() and not output.is_dir():
            raise UsageError(f"--output {output} is a file; --all needs a folder")
    if not runs and study is None:
        raise UsageError(
            "name one or more runs of evalkit attention (evalkit ls runs lists them), or --study FILE.yaml"
        )


def _analysed(
    given: tuple[str, ...],
    study: Path | None,
    benchmark: str | None,
    names: tuple[str, ...] | None,
    request: FigureRequest,
) -> tuple[list[AnalysedRun], list[str]]:
    """Return the runs by the names of their lines, and notes about them."""
    from evalkit.benchmarks.attention.figure_runs import AnalysedRun, run_differences
    from evalkit.comparison.sides import Side, check_unique
    from evalkit.comparison.sides import names as names_of

    found: Sequence[Run]
    known: Sequence[str]
    if study is None:
        found, notes = [named_run(one) for one in given], []
        known = names_of(found)
    else:
        from evalkit.studies.results import read_results
        from evalkit.studies.sides import study_analyses

        analyses = study_analyses(read_results(study), given, benchmark)
        found, known, notes = analyses.runs, analyses.names, [*analyses.notes]
    if names is not None:
        if len(names) != len(found):
            raise UsageError(f"--names has {len(names)} names for {len(found)} runs ({', '.join(known)}); give as many")
        known = [printable(name) for name in names]
    check_unique([Side(name, (run,)) for name, run in zip(known, found, strict=True)])
    analysed = [AnalysedRun(name, run, request.tasks) for name, run in zip(known, found, strict=True)]
    return analysed, [*notes, *(f"warning: {text[0].lower()}{text[1:]}" for text in run_differences(analysed))]


def _draw_every(analysed: list[AnalysedRun], request: FigureRequest, folder: Path) -> None:
    """Draw every figure that the runs have the measures of; report the others."""
    written = False
    for name, kind in KINDS.items():
        one = FigureRequest(request.layers, request.tasks, request.band if kind.band else None)
        try:
            _draw(name, analysed, one, [folder / f"{name}{suffix}" for suffix in _SUFFIXES])
            written = True
        except UsageError as error:
            click.echo(printable(f"left out: {name}: {error}"), err=True)
    if not written:
        raise UsageError("the runs have the measures of no figure; see the reasons above")


def _draw(name: str, analysed: list[AnalysedRun], request: FigureRequest, paths: list[Path]) -> None:
    from evalkit.benchmarks.attention.figures import make, write

    with doing(f"figure {name}"):
        files = write(make(name, analysed, request), analysed, paths)
    for path in files:
        click.echo(printable(str(path)))


def _list() -> None:
    for name, kind in KINDS.items():
        click.echo(f"{name:<11} {kind.words}")
        if kind.measures:
            click.echo(f"{'':<11} --measure {', '.join(kind.measures)}")
