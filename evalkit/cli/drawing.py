"""`evalkit figure` and `report`: finished runs drawn, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.groups import KINDS, Band, FigureRequest, parsed_layers
from evalkit.cli.parameters import argument, command, exclude, option, require, typed_option
from evalkit.cli.running import BENCHMARK, GROUPS, OUTCOME, RUNS_GIVEN, STUDY, STUDY_IN, Source, say
from evalkit.display import doing
from evalkit.errors import UsageError
from evalkit.escape import printable
from evalkit.reporting.figures import Size

if TYPE_CHECKING:
    from evalkit.benchmarks.attention.figure_runs import AnalysedRun
    from evalkit.comparison.sides import Side


@command()
def figure(
    *,
    figure: str | None = argument(metavar="[NAME]", required=False),
    runs: tuple[str, ...] = RUNS_GIVEN,
    groups: tuple[str, ...] = GROUPS,
    study: Path | None = STUDY,
    benchmark: str | None = BENCHMARK,
    every: bool = typed_option(False, "Every figure that the runs have measures for, as .pdf and .png in the folder "
                               "--output.", option="--all"),
    listed: bool = typed_option(False, "List the figures and their options.", option="--list"),
    names: tuple[str, ...] | None = typed_option(None, "Names in the legend, of runs and groups, separated by commas.",
                                                 "their models"),
    layers: tuple[str, ...] | None = option(None, "From 0, or from -1 for the last one backwards.", "all; bos: the "
                                            "last; position of several runs: first, middle, last", metavar="NUMBERS"),
    tasks: tuple[str, ...] | None = option(None, "Documents of these tasks only.", "all", metavar="NAMES"),
    band: Band | None = typed_option(None, "What the standard deviation is over.", "the paper's of each figure"),
    measure: str | None = typed_option(None, "Of bos, negative, rank and heatmap: another measure (see --list)."),
    paper: bool = typed_option(False, "The paper's definition alone; with --all only the paper's figures."),
    size: Size | None = typed_option(None, "Width of print: 3.3 or 6.9 inches.", "that of the panels"),
    notes: bool = typed_option(False, "Print the caption below the figure too."),
    root: Path | None = STUDY_IN,
    output: Path | None = typed_option(None, "File .pdf, .png or .svg; with --all a folder.", "NAME.pdf", short="-o"),
) -> None:  # fmt: skip
    """Draw finished runs of evalkit attention: the paper's figures and others. NAME is one of evalkit figure --list.

    RUNS are run folders, or ids, names or checkpoints of runs in --in (evalkit ls runs). With
    --study they are names of its checkpoints, NAME or NAME@STEP; without any, those of the figure under the study's
    `figures`, or all that are finished. Seeds of a model are one line, their mean. Beside the figure are written its
    numbers, as .csv with shares as fractions, and a caption in NAME-caption.tex: what lines and bands are, and in what
    the runs differ besides their models.

    \b
    evalkit figure entropy RUN_A RUN_B -o entropy.pdf              and entropy.csv
    evalkit figure bos RUN_A RUN_B --names Vanilla,Diff --layers -1
    evalkit figure heatmap RUN --measure distance -o distance.png
    evalkit figure categories --paper --study study.yaml -o categories.pdf
    evalkit figure --all RUN_A RUN_B -o figures/
    evalkit figure --all --paper --study study.yaml --size column -o figures/
    """
    from evalkit.reporting.figures import check_figure_path

    if listed:
        for name, kind in KINDS.items():
            click.echo(f"{name:<11} {kind.words}{f' (the paper: {kind.paper})' * bool(kind.paper)}")
            if kind.measures:
                click.echo(f"{'':<11} --measure {', '.join(kind.measures)}")
        return
    if every and figure is not None:
        runs, figure = (figure, *runs), None
    request, source = (
        FigureRequest(parsed_layers(layers or ()), tasks or (), band, measure, paper, size, notes),
        Source(study, benchmark, groups, root),
    )
    if figure is not None:
        request.check(figure)
        check_figure_path(path := output or Path(f"{figure}.pdf"))
    elif every:
        exclude(all=True, measure=measure)
        require("--output FOLDER", output is not None, all=True)
        if (path := output or Path()).exists() and not path.is_dir():
            raise UsageError(f"--output {path} is a file; --all needs a folder")
    else:
        raise UsageError(f"name a figure: {', '.join(KINDS)}; or give --all")
    if not (runs or groups) and study is None:
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
    for name, kind in ((name, kind) for name, kind in KINDS.items() if kind.paper or not paper):
        drawn = replace(request, band=request.band if kind.band else None)
        try:
            _draw(name, analysed(name), drawn, [path / f"{name}{suffix}" for suffix in (".pdf", ".png")])
            written = True
        except UsageError as error:
            say(f"{name}: not drawn, {error}")
    if not written:
        raise UsageError("the runs have the measures of no figure; see the reasons above")


def _analysed(
    given: tuple[str, ...], source: Source, names: tuple[str, ...] | None, request: FigureRequest
) -> tuple[list[AnalysedRun], list[str]]:
    from evalkit.benchmarks.attention.figure_runs import AnalysedRun, run_differences
    from evalkit.comparison.sides import check_uniform, check_unique, sides_of
    from evalkit.studies.results import study_analyses

    sides: Sequence[Side]
    if source.results is None:
        sides = sides_of(*source.named(given, lambda run: run.kind == ATTENTION, may_differ=True))
        notes = tuple[str, ...]()
    else:
        analyses = study_analyses(source.results, given, source.benchmark)
        sides, notes = analyses.sides, analyses.notes
    if names is not None:
        if len(names) != len(sides):
            known = ", ".join(side.name for side in sides)
            raise UsageError(f"--names has {len(names)} names for {len(sides)} runs ({known}); give as many")
        sides = [replace(side, name=printable(name)) for name, side in zip(names, sides, strict=True)]
    check_unique(sides)
    analysed = list[AnalysedRun]()
    for side in sides:
        check_uniform(side)
        named_runs = zip(side.marks, side.runs, strict=True)
        analysed += [AnalysedRun(f"{side.name}{mark}", run, request.tasks, side.name) for mark, run in named_runs]
    return analysed, [*notes, *(f"warning: {text[0].lower()}{text[1:]}" for text in run_differences(analysed))]


def _draw(name: str, analysed: list[AnalysedRun], request: FigureRequest, paths: list[Path]) -> None:
    from evalkit.benchmarks.attention.figures import make, write

    with doing(f"figure {name}"):
        files = write(make(name, analysed, request), analysed, paths)
    for path in files:
        click.echo(printable(str(path)))


def _without_others(given: Sequence[str], root: Path | None) -> list[str]:
    """Leave out files and folders that are neither runs, checkpoints nor names of runs, as a pattern may match."""
    from evalkit.comparison.naming import matching_runs
    from evalkit.runs.finding import root_of_runs
    from evalkit.runs.folder import CHECKPOINT, is_run_folder

    kept = []
    for name in given:
        path = Path(name)
        is_checkpoint = any((path / file).is_file() for file in (CHECKPOINT, "adapter_config.json"))
        is_known = is_checkpoint or path.suffix == ".gguf" or is_run_folder(path)
        if is_known or not path.exists() or matching_runs(name, root or root_of_runs()):
            kept.append(name)
        else:
            inside = any(map(is_run_folder, path.iterdir())) if path.is_dir() else False
            say(f"left out: {name}: no run folder" + f"; for the runs in it give {name.rstrip('/')}/*" * inside)
    return kept


@command()
def report(
    *,
    runs: tuple[str, ...] = RUNS_GIVEN,
    groups: tuple[str, ...] = GROUPS,
    study: Path | None = STUDY,
    benchmark: str | None = typed_option(None, "Benchmark of the study.", "all"),
    rule: str | None = option(None, "How answers are chosen, in tables too (evalkit ls rules).", "the runs' own"),
    outcome: str | None = OUTCOME,
    names: tuple[str, ...] | None = typed_option(None, "Names of RUNS in the page, separated by commas.",
                                                 "their models"),
    title: str | None = typed_option(None, "Title of the page.", "the study's name, or those of the runs"),
    without_documents: bool = typed_option(False, "Leave out the documents: a page of some 100 kB."),
    sample: int | None = typed_option(None, "At most this many random documents of each task.", "all",
                                      shows_least=True),
    seed: int = typed_option(0, "Of the sample; a larger sample contains the smaller one.", least=0, shows_least=True),
    root: Path | None = STUDY_IN,
    output: Path = typed_option(Path("report.html"), "File to write.", short="-o"),
) -> None:  # fmt: skip
    """Write one HTML page of finished runs: results, comparisons, figures, and every document with its scores.

    The page is one file. It opens from disk in a browser, without a network, so it can be sent to anyone. The first run
    is the baseline; runs of several suites can share a page. RUNS are run folders, or ids, names or checkpoints of runs
    in --in (evalkit ls runs). With --study they are names of its checkpoints, NAME or
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
    source = Source(study, benchmark, groups, root)
    with doing("reading runs"):
        from evalkit.data.sampling import DocumentSample
        from evalkit.pages.report import contents_of_runs, contents_of_study, write_report
        from evalkit.runs.continuous import outcome_key

        key = outcome_key(outcome, rule)
        if source.results is not None:
            contents = contents_of_study(source.results, runs, source.benchmark, key)
        else:
            given = _without_others(runs, root)
            contents = contents_of_runs(*source.named(given, may_differ=True), key, names or ())
    for note in contents.notes:
        say(note)
    chosen = None if sample is None else DocumentSample(sample, seed)
    size = write_report(contents, output, say, title=title, with_documents=not without_documents, sample=chosen)
    click.echo(printable(f"{output} ({size / 1e6:,.1f} MB)"))
