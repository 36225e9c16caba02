"""`evalkit attention` and `figure`: analyses computed, and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evalkit.attention import ATTENTION
from evalkit.attention.groups import KINDS, Band, FigureRequest, parsed_layers
from evalkit.cli import running
from evalkit.cli.parameters import argument, command, exclude, option, require, typed_option
from evalkit.cli.running import BENCHMARK, GROUPS, RUNS_GIVEN, STUDY, STUDY_IN, Printer, Source, Workers, say
from evalkit.display import doing
from evalkit.errors import UsageError
from evalkit.escape import printable
from evalkit.reporting.figures import Size

if TYPE_CHECKING:
    from evalkit.attention.figure_runs import AnalysedRun
    from evalkit.comparison.sides import Side
    from evalkit.studies.results import StudyResults


@command(
    kind="attention",
    order="ORIGIN CONTEXT ... output name COMPUTING TRUST dry workers detail printer",
    without=("token_budget",),
)
def attention(
    *,
    checkpoints: tuple[str, ...] = running.CHECKPOINTS,
    model: str | None = running.MODEL,
    dry: bool = running.DRY_RUN,
    workers: Workers,
    detail: bool = typed_option(False, "Print all layers and measures."),
    printer: Printer,
    **options: Any,
) -> int:
    """Attention maps: measure what each head attends to, on a sample of the tasks' documents.

    Shares on BOS and on kinds of words, entropy, negative weights, sinks, distance, similarity of heads, effective
    rank; each as the paper defines it and in a form that also holds for signed maps (docs/attention.md). Draw them with
    evalkit figure, compare runs with evalkit compare. The same command again resumes an interrupted run.

    \b
    evalkit attention --model CKPT                                       200 documents of each of the eight tasks
    evalkit attention --model CKPT --measures bos,entropy --layers -1 --sample 50 --seed 1
    evalkit attention --model CKPT --text book.txt --context 8192 --measures bos,mass
    evalkit attention CKPT_A CKPT_B                                      several checkpoints, a line each
    """
    models = running.checkpoints_of(checkpoints, model)
    return running.evaluate(models, options | {"suite": ATTENTION}, printer, dry, workers, detail=detail)


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
    from evalkit.attention.figure_runs import AnalysedRun, run_differences
    from evalkit.comparison.sides import check_uniform, check_unique, sides_of

    notes: list[str] = []
    if source.results is None:
        sides = sides_of(*source.named(given, lambda run: run.kind == ATTENTION, may_differ=True))
    else:
        sides, notes = _study_sides(source.results, given, source.benchmark)
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


def _study_sides(results: StudyResults, names: Sequence[str], benchmark: str | None) -> tuple[list[Side], list[str]]:
    """Return the finished analyses of a study's models, by NAME or NAME@STEP, and notes. Seeds are runs of one side.

    Raises:
        UsageError: an unknown name, no benchmark analyses attention, several do and none is named, or no run is
            finished.
    """
    from evalkit.studies.results import finished_sides, steps_note
    from evalkit.studies.study import select

    study = results.study
    asked = study.benchmarks if benchmark is None else [study.benchmark(benchmark)]
    fitting = [entry for entry in asked if entry.kind == ATTENTION]
    if len(fitting) != 1:
        known = " | ".join(entry.name for entry in fitting) or "none"
        raise UsageError(
            f"study {study.path}: figures are of one benchmark of suite {ATTENTION}, here {known}: give --benchmark, "
            "or add one under 'benchmarks'"
        )
    [chosen] = fitting
    models = [select(study, name) for name in names or study.names]
    checkpoints = [checkpoint for model in models for checkpoint in model.checkpoints]
    if names:
        results.require(checkpoints, chosen)
    if not (sides := finished_sides(results, models, chosen)):
        raise UsageError(f"study {study.path}: no run of {chosen.name} is finished; run {results.remedy}")
    unfinished = results.unfinished(checkpoints, chosen)
    return sides, steps_note(models) + unfinished + results.changes(checkpoints, chosen)


def _draw(name: str, analysed: list[AnalysedRun], request: FigureRequest, paths: list[Path]) -> None:
    from evalkit.attention.figures import make, write

    with doing(f"figure {name}"):
        files = write(make(name, analysed, request), analysed, paths)
    for path in files:
        click.echo(printable(str(path)))
