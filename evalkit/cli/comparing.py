"""`evalkit compare` and `evalkit figure`: several finished runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from evalkit.benchmarks.attention.groups import KINDS, Band, FigureRequest, parsed_layers
from evalkit.cli.options import OUTCOME, OUTPUT, PLOT, Source, named_run, source
from evalkit.cli.parameters import (
    FOLDER,
    MARGIN,
    argument,
    comma_separated,
    exclude,
    is_typed,
    option,
    require,
    typed_option,
)
from evalkit.cli.running import PRINTING, Printer, say
from evalkit.display import doing
from evalkit.errors import UsageError
from evalkit.escape import printable

if TYPE_CHECKING:
    from evalkit.benchmarks.attention.figure_runs import AnalysedRun
    from evalkit.comparison.curves import Curve
    from evalkit.comparison.sides import Side
    from evalkit.runs.folder import Run


@click.command()
@argument("runs", nargs=-1)
@source(groups=True)
@option(
    "--rule",
    help="How the answer is chosen (evalkit ls rules); of attention a measure, as rank@-1.  [default: the runs' own]",
)
@OUTCOME
@option(
    "--curve", is_flag=True, help="The runs are checkpoints of one training (of one each group): the outcome by step."
)
@PRINTING
@PLOT
@option("--fail-if-worse", is_flag=True, help="Exit with 3 where a later side is worse, with 4 where it is undecided.")
@option("--margin", type=MARGIN, default=0.0, help="With --fail-if-worse: points, or the outcome's "
        "unit, by which the average may be worse.")  # fmt: skip
@OUTPUT
@click.pass_context
def compare(
    ctx: click.Context,
    runs: tuple[str, ...],
    source: Source,
    rule: str | None,
    outcome: str | None,
    curve: bool,
    printer: Printer,
    plot: Path | None,
    fail_if_worse: bool,
    margin: float,
    output: Path,
) -> int:
    """Compare runs on the same documents: paired differences, intervals, tests, and the smallest detectable difference.

    RUNS are run folders, or ids, names or checkpoints of runs in --output (evalkit ls runs). The first is the baseline
    A; each other one is compared with it, with Holm's correction over the tasks of each pair. With --study they are
    names of its checkpoints, NAME or NAME@STEP, whose seeds are the runs of a side; without any, all of them.

    \b
    evalkit compare RUN_A RUN_B
    evalkit compare RUN_A RUN_B RUN_C --rule acc_norm --plot forest.pdf
    evalkit compare RUN_A RUN_B --outcome bits_per_byte                finer than right or wrong
    evalkit compare --group old=RUN,RUN,RUN --group new=RUN,RUN,RUN     several seeds: the claim is about architectures
    evalkit compare RUN_A RUN_B --fail-if-worse --margin 1             in continuous integration
    evalkit compare --curve RUN RUN RUN --plot curve.png               checkpoints of one training
    evalkit compare --study study.yaml intg vanilla                    names of a study, with all their seeds
    evalkit compare --study study.yaml --curve intg                    its steps, a curve for each seed
    """
    from evalkit.runs.score_table import outcome_key

    exclude(curve=curve, fail_if_worse=fail_if_worse)
    require("--fail-if-worse", fail_if_worse, margin=margin or None)
    exclude(study=source.study, output=output if is_typed(ctx, "output") else None)
    key = outcome_key(outcome, rule)
    if curve:
        from evalkit.comparison.curves import curve_report

        with doing("reading runs"):
            curves, notes = _curves(runs, source, key, output)
        printer(curve_report(curves).with_notes(notes))
        if plot:
            from evalkit.comparison.plots import curves as draw_curves

            draw_curves(curves, plot)
        return 0
    from evalkit.comparison.comparison import compare_sides
    from evalkit.comparison.comparison_report import comparison_report
    from evalkit.comparison.differences import exit_code

    with doing("reading and comparing runs"):
        sides, notes, key = _sides(runs, source, key, output)
        comparisons = compare_sides(sides, key)
        report = comparison_report(comparisons).with_notes(notes)
    printer(report)
    if plot:
        from evalkit.comparison.plots import forest

        forest(comparisons, plot)
    # Percentage points for shares, else the measure's own unit
    scale = 100 if comparisons[0].measure.is_share else 1
    return exit_code(comparisons, margin / scale) if fail_if_worse else 0


def _sides(
    runs: tuple[str, ...], source: Source, key: str | None, output: Path
) -> tuple[Sequence[Side], tuple[str, ...], str | None]:
    """Return sides, notes, and the key of the outcome, of a study under the benchmark's rule by default."""
    if source.results is None:
        from evalkit.comparison.sides import find_sides

        return find_sides(runs, source.groups, output), (), key
    from evalkit.runs.score_table import with_default_rule
    from evalkit.studies.results import study_sides

    benchmark = source.results.study.benchmark(source.benchmark)
    chosen = study_sides(source.results, runs, benchmark)
    return chosen.sides, chosen.notes, with_default_rule(key, benchmark.rule)


def _curves(
    runs: tuple[str, ...], source: Source, key: str | None, output: Path
) -> tuple[list[Curve], tuple[str, ...]]:
    """Return a curve for each training, and notes."""
    from evalkit.comparison.curves import curve

    if source.results is None:
        from evalkit.comparison.sides import find_trainings

        return [curve(side, key) for side in find_trainings(runs, source.groups, output)], ()
    from evalkit.runs.score_table import with_default_rule
    from evalkit.studies.results import study_trainings

    benchmark = source.results.study.benchmark(source.benchmark)
    trainings = study_trainings(source.results, runs, benchmark)
    key = with_default_rule(key, benchmark.rule)
    curves = [curve(training.side, key, training.steps) for training in trainings]
    return curves, tuple(note for training in trainings for note in training.notes)


_SUFFIXES = (".pdf", ".png")
"""Of the files that --all writes."""


@click.command()
@argument("figure", required=False, metavar="[NAME]")
@argument("runs", nargs=-1)
@source()
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
    source: Source,
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
    from evalkit.reporting.figures import check_figure_path

    if listed:
        _list()
        return
    if every and figure is not None:
        runs, figure = (figure, *runs), None
    request = FigureRequest(parsed_layers(layers or ()), tasks or (), band, measure, paper)
    if figure is not None:
        request.check(figure)
        check_figure_path(path := output or Path(f"{figure}.pdf"))
    elif every:
        exclude(all=True, measure=measure, paper=paper)
        require("--output FOLDER", output is not None, all=True)
        path = output or Path()
    else:
        raise UsageError(f"name a figure: {', '.join(KINDS)}; or give --all")
    if not runs and source.study is None:
        raise UsageError("name runs of evalkit attention (evalkit ls runs lists them), or --study FILE.yaml")
    with doing("reading runs"):
        analysed, notes = _analysed(runs, source, names, request)
    for note in notes:
        say(note)
    if figure is None:
        _draw_every(analysed, request, path)
    else:
        _draw(figure, analysed, request, [path])


def _analysed(
    given: tuple[str, ...], source: Source, names: tuple[str, ...] | None, request: FigureRequest
) -> tuple[list[AnalysedRun], list[str]]:
    """Return the runs by the names of their lines, and notes about them."""
    from evalkit.benchmarks.attention.figure_runs import AnalysedRun, run_differences
    from evalkit.comparison.sides import Side, check_unique
    from evalkit.comparison.sides import names as names_of

    runs: Sequence[Run]
    known: Sequence[str]
    if source.results is None:
        runs, notes = [named_run(run) for run in given], []
        known = names_of(runs)
    else:
        from evalkit.studies.results import study_analyses

        analyses = study_analyses(source.results, given, source.benchmark)
        runs, known, notes = analyses.runs, analyses.names, [*analyses.notes]
    if names is not None:
        if len(names) != len(runs):
            raise UsageError(f"--names has {len(names)} names for {len(runs)} runs ({', '.join(known)}); give as many")
        known = [printable(name) for name in names]
    check_unique([Side(name, (run,)) for name, run in zip(known, runs, strict=True)])
    analysed = [AnalysedRun(name, run, request.tasks) for name, run in zip(known, runs, strict=True)]
    return analysed, [*notes, *(f"warning: {text[0].lower()}{text[1:]}" for text in run_differences(analysed))]


def _draw_every(analysed: list[AnalysedRun], request: FigureRequest, folder: Path) -> None:
    """Draw every figure that the runs have the measures of; report the others."""
    written = False
    for name, kind in KINDS.items():
        drawn = FigureRequest(request.layers, request.tasks, request.band if kind.band else None)
        try:
            _draw(name, analysed, drawn, [folder / f"{name}{suffix}" for suffix in _SUFFIXES])
            written = True
        except UsageError as error:
            say(f"left out: {name}: {error}")
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
