"""`evalkit compare`, `figure` and `report`: several finished runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.groups import KINDS, Band, FigureRequest, parsed_layers
from evalkit.cli.parameters import argument, command, exclude, option, require, typed_option
from evalkit.cli.running import BENCHMARK, GROUPS, OUTCOME, PLOT, RUNS_IN, STUDY, Printer, Source, say
from evalkit.display import doing
from evalkit.errors import UsageError
from evalkit.escape import printable

if TYPE_CHECKING:
    from evalkit.benchmarks.attention.figure_runs import AnalysedRun
    from evalkit.comparison.sides import Side

RUNS = argument(required=False)


@command()
def compare(
    *,
    runs: tuple[str, ...] = RUNS,
    groups: tuple[str, ...] = GROUPS,
    study: Path | None = STUDY,
    benchmark: str | None = BENCHMARK,
    rule: str | None = option(None, "How the answer is chosen (evalkit ls rules); of attention a measure, as rank@-1.",
                              "the runs' own"),
    outcome: str | None = OUTCOME,
    curve: bool = option(False, "The runs are checkpoints of one training (of one each group): the outcome by step."),
    printer: Printer,
    plot: Path | None = PLOT,
    fail_if_worse: bool = option(False, "Exit with 3 where a later side is worse, with 4 where it is undecided."),
    margin: float = option(0.0, "With --fail-if-worse: points, or the outcome's unit, by which the average may be "
                           "worse."),
    root: Path | None = RUNS_IN,
) -> int:  # fmt: skip
    """Compare runs on the same documents: paired differences, intervals, tests, and the smallest detectable difference.

    RUNS are run folders, or ids, names or checkpoints of runs in --in (evalkit ls runs); of several runs of a
    checkpoint, those that are measured alike. The first is the baseline
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
    from evalkit.comparison.comparison import compare_sides
    from evalkit.comparison.comparison_report import comparison_report
    from evalkit.comparison.curves import curve as curve_of
    from evalkit.comparison.curves import curve_report
    from evalkit.comparison.differences import exit_code
    from evalkit.comparison.sides import find_trainings, sides_of
    from evalkit.runs.score_table import outcome_key, with_default_rule

    exclude(curve=curve, fail_if_worse=fail_if_worse)
    require("--fail-if-worse", fail_if_worse, margin=margin or None)
    exclude(study=study, **{"in": root})
    if not isfinite(margin):
        raise UsageError(f"--margin {margin}: is not a finite number")
    source, key, notes = Source(study, benchmark, groups), outcome_key(outcome, rule), list[str]()
    with doing("reading and comparing runs"):
        if results := source.results:
            from evalkit.studies.results import study_sides, study_trainings

            measured = results.study.benchmark(source.benchmark)
            key = with_default_rule(key, measured.rule)
        if curve:
            if results:
                trainings = study_trainings(results, runs, measured)
                curves = [curve_of(training.side, key, training.steps) for training in trainings]
                notes += [note for training in trainings for note in training.notes]
            else:
                curves = [curve_of(side, key) for side in find_trainings(source.named(runs, root))]
            shown = curve_report(curves)
        else:
            sides: Sequence[Side]
            if results:
                chosen = study_sides(results, runs, measured)
                sides, notes = chosen.sides, [*chosen.notes]
            else:
                named = source.named(runs, root, is_strict=fail_if_worse)
                sides = sides_of(named.singles, named.groups)
            comparisons = compare_sides(sides, key)
            shown = comparison_report(comparisons)
    printer(shown.with_notes(tuple(notes)))
    if plot:
        from evalkit.comparison import plots

        if curve:
            plots.curves(curves, plot)
        else:
            plots.forest(comparisons, plot)
    if not fail_if_worse:
        return 0
    # Percentage points for shares, else the measure's own unit
    return exit_code(comparisons, margin / (100 if comparisons[0].measure.is_share else 1))


@command()
def figure(
    *,
    figure: str | None = argument(metavar="[NAME]", required=False),
    runs: tuple[str, ...] = RUNS,
    study: Path | None = STUDY,
    benchmark: str | None = BENCHMARK,
    every: bool = typed_option(False, "Every figure that the runs have measures for, as .pdf and .png in the folder "
                               "--output.", option="--all"),
    listed: bool = typed_option(False, "List the figures and their options.", option="--list"),
    names: tuple[str, ...] | None = typed_option(None, "Names of the runs in the legend, separated by commas.",
                                                 "their models"),
    layers: tuple[str, ...] | None = option(None, "From 0, or from -1 for the last one backwards.", "all; bos: the "
                                            "last; position of several runs: first, middle, last", metavar="NUMBERS"),
    tasks: tuple[str, ...] | None = option(None, "Documents of these tasks only.", "all", metavar="NAMES"),
    band: Band | None = typed_option(None, "What the standard deviation is over.", "the paper's of each figure"),
    measure: str | None = typed_option(None, "Of bos, negative, rank and heatmap: another measure (see --list)."),
    paper: bool = typed_option(False, "Of entropy and categories: the paper's definition alone."),
    output: Path | None = typed_option(None, "File .pdf, .png or .svg; with --all a folder.", "NAME.pdf", short="-o"),
) -> None:  # fmt: skip
    """Draw finished runs of evalkit attention: the paper's figures and others. NAME is one of evalkit figure --list.

    RUNS are run folders, or ids, names or checkpoints of runs in results/runs or EVALKIT_OUTPUT (evalkit ls runs). With
    --study they are names of its checkpoints, NAME or NAME@STEP; without any, those of the figure under the study's
    `figures`, or all that are finished. The drawn numbers are written beside the figure as .csv, shares as fractions.
    Notes below the figure state what lines and bands are means and deviations of, and in what the runs differ besides
    their models.

    \b
    evalkit figure entropy RUN_A RUN_B -o entropy.pdf              and entropy.csv
    evalkit figure bos RUN_A RUN_B --names Vanilla,Diff --layers -1
    evalkit figure heatmap RUN --measure distance -o distance.png
    evalkit figure categories --paper --study study.yaml -o categories.pdf
    evalkit figure --all RUN_A RUN_B -o figures/
    """
    from evalkit.reporting.figures import check_figure_path

    if listed:
        for name, kind in KINDS.items():
            click.echo(f"{name:<11} {kind.words}")
            if kind.measures:
                click.echo(f"{'':<11} --measure {', '.join(kind.measures)}")
        return
    if every and figure is not None:
        runs, figure = (figure, *runs), None
    request, source = (
        FigureRequest(parsed_layers(layers or ()), tasks or (), band, measure, paper),
        Source(study, benchmark),
    )
    if figure is not None:
        request.check(figure)
        check_figure_path(path := output or Path(f"{figure}.pdf"))
    elif every:
        exclude(all=True, measure=measure, paper=paper)
        require("--output FOLDER", output is not None, all=True)
        if (path := output or Path()).exists() and not path.is_dir():
            raise UsageError(f"--output {path} is a file; --all needs a folder")
    else:
        raise UsageError(f"name a figure: {', '.join(KINDS)}; or give --all")
    if not runs and study is None:
        raise UsageError("name runs of evalkit attention (evalkit ls runs lists them), or --study FILE.yaml")
    of_study = source.results.study.figures if source.results and not runs else {}
    read: dict[tuple[str, ...], list[AnalysedRun]] = {}

    def analysed(name: str) -> list[AnalysedRun]:
        if (chosen := of_study.get(name, runs)) not in read:
            with doing("reading runs"):
                read[chosen], notes = _analysed(chosen, source, names, request)
            for note in notes:
                say(note)
        return read[chosen]

    if figure is not None:
        _draw(figure, analysed(figure), request, [path])
        return
    written = False
    for name, kind in KINDS.items():
        drawn = FigureRequest(request.layers, request.tasks, request.band if kind.band else None)
        try:
            _draw(name, analysed(name), drawn, [path / f"{name}{suffix}" for suffix in (".pdf", ".png")])
            written = True
        except UsageError as error:
            say(f"left out: {name}: {error}")
    if not written:
        raise UsageError("the runs have the measures of no figure; see the reasons above")


def _analysed(
    given: tuple[str, ...], source: Source, names: tuple[str, ...] | None, request: FigureRequest
) -> tuple[list[AnalysedRun], list[str]]:
    from evalkit.benchmarks.attention.figure_runs import AnalysedRun, run_differences
    from evalkit.comparison.sides import Side, check_unique, sides_of
    from evalkit.studies.results import study_analyses

    sides: Sequence[Side]
    if source.results is None:
        named = source.named(given, usable=lambda run: run.kind == ATTENTION)
        sides, notes = sides_of(named.singles, ()), tuple[str, ...]()
    else:
        analyses = study_analyses(source.results, given, source.benchmark)
        sides, notes = analyses.sides, analyses.notes
    if names is not None:
        if len(names) != len(sides):
            known = ", ".join(side.name for side in sides)
            raise UsageError(f"--names has {len(names)} names for {len(sides)} runs ({known}); give as many")
        sides = [Side(printable(name), side.runs) for name, side in zip(names, sides, strict=True)]
    check_unique(sides)
    analysed = [AnalysedRun(side.name, side.runs[0], request.tasks) for side in sides]
    return analysed, [*notes, *(f"warning: {text[0].lower()}{text[1:]}" for text in run_differences(analysed))]


def _draw(name: str, analysed: list[AnalysedRun], request: FigureRequest, paths: list[Path]) -> None:
    from evalkit.benchmarks.attention.figures import make, write

    with doing(f"figure {name}"):
        files = write(make(name, analysed, request), analysed, paths)
    for path in files:
        click.echo(printable(str(path)))


def _without_others(given: Sequence[str]) -> list[str]:
    """Leave out files and folders that are neither runs nor checkpoints, as a pattern may match; say so."""
    kept = []
    for name in given:
        path = Path(name)
        is_known = path.suffix == ".gguf" or any((path / file).is_file() for file in ("manifest.json", "config.json"))
        if is_known or not path.exists():
            kept.append(name)
        else:
            say(f"left out: {name}: no run folder")
    return kept


@command()
def report(
    *,
    runs: tuple[str, ...] = RUNS,
    groups: tuple[str, ...] = GROUPS,
    study: Path | None = STUDY,
    benchmark: str | None = typed_option(None, "Benchmark of the study.", "all"),
    rule: str | None = option(None, "How answers are chosen in comparisons (evalkit ls rules).", "the runs' own"),
    outcome: str | None = OUTCOME,
    names: tuple[str, ...] | None = typed_option(None, "Names of RUNS in the page, separated by commas.",
                                                 "their models"),
    title: str | None = typed_option(None, "Title of the page.", "the names of the runs"),
    without_documents: bool = typed_option(False, "Leave out the documents: a page of some 100 kB."),
    sample: int | None = typed_option(None, "At most this many random documents of each task.", "all",
                                      shows_least=True),
    seed: int = typed_option(0, "Of the sample; a larger sample contains the smaller one.", least=0, shows_least=True),
    output: Path = typed_option(Path("report.html"), "File to write.", short="-o"),
) -> None:  # fmt: skip
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
    exclude(study=study, names=names)
    exclude(without_documents=without_documents, sample=sample)
    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--output {output}: the report is an HTML page; give a file name that ends in .html")
    source = Source(study, benchmark, groups)
    with doing("reading runs"):
        from evalkit.data.sampling import DocumentSample
        from evalkit.pages.report import contents_of_runs, contents_of_study, write_report
        from evalkit.runs.score_table import outcome_key

        key = outcome_key(outcome, rule)
        if source.results is not None:
            contents = contents_of_study(source.results, runs, source.benchmark, key)
        else:
            named = source.named(_without_others(runs))
            contents = contents_of_runs(named.singles, named.groups, key, names or ())
    for note in contents.notes:
        say(note)
    chosen = None if sample is None else DocumentSample(sample, seed)
    size = write_report(contents, output, say, title=title, with_documents=not without_documents, sample=chosen)
    click.echo(printable(f"{output} ({size / 1e6:,.1f} MB)"))
