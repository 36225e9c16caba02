"""Figures of finished analyses: the paper's, and what others plot.

In: runs, a figure's name and its options. Out: the figure as .png, .pdf or .svg, and beside it a .csv of the drawn
numbers, with shares as fractions. Every number is a group-by of the run's tables (`figure_runs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import pandas as pd

from evalkit.benchmarks.attention.figure_runs import (
    OVER,
    AnalysedRun,
    described,
    described_bins,
    figure_notes,
    label_of,
    line_words,
    of_groups,
    share_above,
    spread_of,
    unit_of,
)
from evalkit.benchmarks.attention.groups import CATEGORIES, KINDS, MEASURES, Band, FigureRequest
from evalkit.errors import RunError, UsageError
from evalkit.paths import replace_file
from evalkit.reporting.figures import FigurePanel, RunFigure, check_figure_path, draw_panels, short_name
from evalkit.reporting.formats import records_csv
from evalkit.runs.folder import Run

Runs = Sequence[AnalysedRun]
_FOUR = {
    "BOS, special tokens, punctuation": ("bos", "special", "punctuation"),
    "content words": ("content",),
    "function words": ("function",),
    "other": ("other",),
}
"""Kinds of tokens in the paper → categories."""
_QUERY = "position of the query (first of its bin)"
_SUMMARY = ("sink_abs_rate", "bos_abs", "distance", "similarity")


@dataclass(frozen=True)
class Figure:
    """A figure before it is drawn."""

    panels: tuple[FigurePanel, ...]
    columns: int
    """Panels of a row."""
    words: str
    """What its values and bands are, for the notes."""
    share_y: bool = False
    """Whether all panels have the same vertical scale."""

    @property
    def records(self) -> list[Mapping[str, object]]:
        """The drawn numbers, one row each."""
        tables = [panel.table.assign(panel=panel.title) for panel in self.panels]
        joined = pd.concat(tables, ignore_index=True)
        columns = ["panel", *(name for name in joined if name != "panel")]
        rows = joined[columns].astype(object).where(joined[columns].notna(), None)
        return [{str(name): value for name, value in row.items()} for row in rows.to_dict("records")]


def make(name: str, runs: Runs, request: FigureRequest) -> Figure:
    """Compute the numbers of a figure of `KINDS`; the order of the runs is that of colours and panels."""
    request.check(name)
    return _FIGURES[name](runs, request)


def draw(figure: Figure, runs: Runs, path: Path) -> None:
    """Draw a figure from `make` of the same runs into a .png, .pdf or .svg file; raise a `RunError` if it fails."""
    notes = figure_notes(runs, [panel.table for panel in figure.panels], figure.words)
    draw_panels(figure.panels, [run.name for run in runs], figure.columns, notes, path, figure.share_y)


def write(figure: Figure, runs: Runs, paths: Sequence[Path]) -> list[Path]:
    """Draw a figure into .png, .pdf or .svg files, and write its numbers beside the first one; return all files."""
    for path in paths:
        check_figure_path(path)
    numbers = paths[0].with_suffix(".csv")
    _check_own(numbers)
    for path in paths:
        draw(figure, runs, path)
    try:
        replace_file(numbers, f"{records_csv(figure.records)}\n".encode())
    except OSError as error:
        raise RunError(f"{numbers} cannot be written: {error.strerror or error}") from error
    return [*paths, numbers]


def _check_own(path: Path) -> None:
    """Raise a `UsageError` if a .csv exists that is not of a figure."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            is_ours = file.readline().startswith("panel,run,id,")
    except OSError:  # does not exist, or writing it reports why
        return
    if not is_ours:
        raise UsageError(
            f"{path} exists and is not of a figure, and the drawn numbers go there; choose another --output"
        )


def _lines(runs: Runs, measure: str, band: Band, layers: Sequence[int], by_position: bool = False) -> pd.DataFrame:
    return pd.concat([run.line(measure, band, layers, by_position) for run in runs], ignore_index=True)


def _bos(runs: Runs, request: FigureRequest) -> Figure:
    measures = (request.measure_of("bos"),)
    return _by_position(runs, measures, request.band_of("bos"), request.layers or (-1,), 3, share_y=True)


def _position(runs: Runs, request: FigureRequest) -> Figure:
    measures, band = ("bos_abs", "entropy"), request.band_of("position")
    if len(runs) > 1:
        layers = request.layers or _spaced([run.layers(measures[0], ()) for run in runs])
        return _by_position(runs, measures, band, layers, max(2, len(layers)))
    panels = []
    for measure in measures:
        table, percent = _lines(runs, measure, band, request.layers, by_position=True), MEASURES[measure].in_percent
        panels.append(FigurePanel(measure, table, "position", label_of(measure), "layer", _QUERY, percent))
    words = f"{runs[0].name}; colour: {OVER[band]}. {described_bins(measures, [panel.table for panel in panels])}"
    return Figure(tuple(panels), 2, words)


def _by_position(
    runs: Runs, measures: Sequence[str], band: Band, layers: Sequence[int], columns: int, share_y: bool = False
) -> Figure:
    """Return a figure of lines over positions, with a panel for each measure and layer."""
    panels = []
    for measure, layer in product(measures, layers):
        table = _lines(runs, measure, band, (layer,), by_position=True)
        drawn = sorted(table["layer"].unique())
        where = f"layer {drawn[0]}" if len(drawn) == 1 else "last layer" if layer == -1 else f"layer {layer}"
        title, unit, percent = f"{measure}, {where}", unit_of(measure), MEASURES[measure].in_percent
        panels.append(FigurePanel(title, table, "position", unit, "", _QUERY, percent, doubling=True))
    words = f"{line_words(band)}. {described_bins(measures, [panel.table for panel in panels])}"
    return Figure(tuple(panels), columns, words, share_y)


def _spaced(by_run: Sequence[list[int]]) -> tuple[int, ...]:
    """Return the first and the middle layer that all runs have, and each run's last one."""
    common = sorted(set.intersection(*map(set, by_run)))
    last = by_run[0][-1] if len({layers[-1] for layers in by_run}) == 1 else -1
    return tuple(dict.fromkeys([*common[:1], *common[len(common) // 2 :][:1], last]))


def _categories(runs: Runs, request: FigureRequest) -> Figure:
    band = request.band_of("categories")
    kind = "mass" if request.paper else "mass_abs"
    groups = {title: [f"{kind}_{name}" for name in names] for title, names in _FOUR.items()}
    assert sum(map(len, groups.values())) == len(CATEGORIES)
    by_run = [of_groups(run, groups, band, request.layers, request.paper) for run in runs]
    panels = []
    for title in groups:
        tables = []
        for run, values in zip(runs, by_run, strict=True):
            sums = values.rename(columns={title: "value"})[["layer", "value", "n"]]
            tables.append(run.labelled(spread_of(sums, ["layer"]), f"{kind}: {title}"))
        table, label = pd.concat(tables, ignore_index=True), "softmax" if request.paper else "%"
        panels.append(FigurePanel(title, table, "layer", label, percent=not request.paper))
    value = "share of |weights| of the continuation's tokens on each kind of tokens"
    if request.paper:
        value = (
            "softmax over the four kinds of tokens of a head's mean weight of the continuation's tokens on them, as in "
            "the paper; four shares that sum to 1 cannot leave 0.175 to 0.475"
        )
    return Figure(tuple(panels), 2, f"{line_words(band)}. Value: {value}")


def _entropy(runs: Runs, request: FigureRequest) -> Figure:
    measures = ("entropy_shifted",) if request.paper else ("entropy_shifted", "entropy")
    figure = _by_layer("entropy", runs, request, measures, 2, share_y=True)
    trap = ". The shift lifts every weight near 0 as soon as one is negative"
    return Figure(figure.panels, 2, figure.words + trap, share_y=True)


def _negative(runs: Runs, request: FigureRequest) -> Figure:
    figure = _by_layer("negative", runs, request, (request.measure_of("negative"),), 1, reference=0.5)
    return Figure(figure.panels, 1, f"{figure.words}. Dotted: 50 %, as of random signs")


def _summary(runs: Runs, request: FigureRequest) -> Figure:
    """Return the panels whose measures every run has."""
    measures = [measure for measure in _SUMMARY if all(run.has(measure) for run in runs)]
    return _by_layer("summary", runs, request, measures or _SUMMARY, 2)


def _by_layer(
    name: str,
    runs: Runs,
    request: FigureRequest,
    measures: Sequence[str],
    columns: int,
    share_y: bool = False,
    reference: float | None = None,
) -> Figure:
    """Return a figure of lines over layers, with a panel for each measure."""
    band = request.band_of(name)
    panels = []
    for measure in measures:
        table, percent = _lines(runs, measure, band, request.layers), MEASURES[measure].in_percent
        panels.append(FigurePanel(measure, table, "layer", unit_of(measure), percent=percent, reference=reference))
    return Figure(tuple(panels), columns, f"{line_words(band)}. {described(measures)}", share_y)


def _rank(runs: Runs, request: FigureRequest) -> Figure:
    measure = request.measure_of("rank")
    first, *others = runs
    ranks = _lines(runs, measure, "samples", request.layers)
    panels = [FigurePanel(f"{measure}, median over heads", ranks, "layer", measure)]
    words = "Line: mean over documents of the median over heads; band: ± 1 standard deviation over documents"
    if others:
        shares = [run.labelled(share_above(first, run, measure, request.layers), measure) for run in others]
        title, table = f"documents above {short_name(first.name)}", pd.concat(shares, ignore_index=True)
        panels.append(FigurePanel(title, table, "layer", "%", percent=True, reference=0.5))
        words += "; right: share of documents whose median is above that of the first run, band: ± 1 standard error"
    return Figure(tuple(panels), 2, f"{words}. {described([measure])}")


def _heatmap(runs: Runs, request: FigureRequest) -> Figure:
    measure = request.measure_of("heatmap")
    panels = []
    for run in runs:
        values = run.by_head(measure)
        chosen = values[values["layer"].isin(run.layers(measure, request.layers))].reset_index(drop=True)
        label, percent = label_of(measure), MEASURES[measure].in_percent
        panels.append(
            FigurePanel(short_name(run.name), run.labelled(chosen, measure), "head", label, "layer", percent=percent)
        )
    words = f"Colour: mean over documents of each head, one scale for all runs. {described([measure])}"
    return Figure(tuple(panels), 2 if len(panels) == 4 else 3, words)


_FIGURES: Mapping[str, Callable[[Runs, FigureRequest], Figure]] = {
    "bos": _bos,
    "categories": _categories,
    "entropy": _entropy,
    "negative": _negative,
    "rank": _rank,
    "position": _position,
    "heatmap": _heatmap,
    "summary": _summary,
}


def run_figures(runs: Sequence[Run], names: Sequence[str]) -> list[RunFigure]:
    """Return the figures that all runs have the measures of; the names are unique."""
    analysed = [AnalysedRun(name, run) for name, run in zip(names, runs, strict=True)]
    figures = []
    for name, kind in KINDS.items():
        try:
            figure = make(name, analysed, FigureRequest())
        except UsageError:  # a run lacks its measure
            continue
        measure = f" ({FigureRequest().measure_of(name)})" if kind.measures else ""
        words = f"{kind.words[:1].upper()}{kind.words[1:]}{measure}: {', '.join(names)}."
        figures.append(RunFigure(name, words, partial(draw, figure, analysed)))
    return figures
