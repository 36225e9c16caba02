"""Figures of finished analyses: the paper's, and what others plot.

In: runs, a figure's name and its options. Out: the figure as .png, .pdf or .svg, and beside it a .csv of the drawn
numbers, with shares as fractions. Every number is a group-by of the run's tables (`figure_runs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import pandas as pd

from evalkit.benchmarks.attention.figure_runs import AnalysedRun, run_differences, share_above, spread_of
from evalkit.benchmarks.attention.groups import KINDS, MASS, MEASURES, Band, FigureRequest
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
_OVER = {"heads": "mean over heads of the mean over documents", "samples": "mean over documents of the mean over heads"}
_UNITS = {"entropy": "nats", "entropy_shifted": "nats", "distance": "tokens", "similarity": "cosine"}
_MOST_NAMED = 3
"""Most tasks that notes name."""


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


def make(name: str, runs: Runs, request: FigureRequest) -> Figure:
    """Compute the numbers of a figure of `KINDS`; the order of the runs is that of colours and panels."""
    request.check(name)
    band, layers = request.band_of(name), request.layers
    match name:
        case "bos":
            return _by_position(runs, [request.measure_of(name)], band, layers or (-1,), 3, share_y=True)
        case "position":
            return _position(runs, band, layers)
        case "categories":
            return _categories(runs, band, layers, request.paper)
        case "entropy":
            trap = ". The shift lifts every weight near 0 as soon as one is negative"
            measures = ["entropy_shifted", "entropy"][: 1 if request.paper else 2]
            return _by_layer(runs, measures, band, layers, 2, trap, share_y=True)
        case "negative":
            dotted = ". Dotted: 50 %, as of random signs"
            return _by_layer(runs, [request.measure_of(name)], band, layers, 1, dotted, reference=0.5)
        case "summary":
            measures = [measure for measure in _SUMMARY if all(run.has(measure) for run in runs)]
            return _by_layer(runs, measures or _SUMMARY, band, layers, 2)
        case "rank":
            return _rank(runs, request.measure_of(name), layers)
        case _:
            return _heatmap(runs, request.measure_of(name), layers)


def draw(figure: Figure, runs: Runs, path: Path) -> None:
    """Draw a figure from `make` of the same runs into a .png, .pdf or .svg file; raise a `RunError` if it fails."""
    draw_panels(
        figure.panels, [run.name for run in runs], figure.columns, figure_notes(figure, runs), path, figure.share_y
    )


def write(figure: Figure, runs: Runs, paths: Sequence[Path]) -> list[Path]:
    """Draw a figure into .png, .pdf or .svg files, and write its numbers beside the first one; return all files."""
    for path in paths:
        check_figure_path(path)
    numbers = paths[0].with_suffix(".csv")
    if numbers.is_file():
        with numbers.open(encoding="utf-8", errors="replace") as file:
            if not file.readline().startswith("panel,run,id,"):
                raise UsageError(
                    f"{numbers} exists and is not of a figure, and the drawn numbers go there; choose another --output"
                )
    for path in paths:
        draw(figure, runs, path)
    try:
        replace_file(numbers, f"{records_csv(_records(figure))}\n".encode())
    except OSError as error:
        raise RunError(f"{numbers} cannot be written: {error.strerror or error}") from error
    return [*paths, numbers]


def _records(figure: Figure) -> list[Mapping[str, object]]:
    """Return the drawn numbers, one row each."""
    tables = [panel.table.assign(panel=panel.title) for panel in figure.panels]
    joined = pd.concat(tables, ignore_index=True)
    columns = ["panel", *(name for name in joined if name != "panel")]
    rows = joined[columns].astype(object).where(joined[columns].notna(), None)
    return [{str(name): value for name, value in row.items()} for row in rows.to_dict("records")]


def _by_layer(
    runs: Runs,
    measures: Sequence[str],
    band: Band,
    layers: Sequence[int],
    columns: int,
    more: str = "",
    share_y: bool = False,
    reference: float | None = None,
) -> Figure:
    """Return a figure of lines over layers, with a panel for each measure."""
    panels = []
    for measure in measures:
        table, percent = _lines(runs, measure, band, layers), MEASURES[measure].in_percent
        panels.append(FigurePanel(measure, table, "layer", _unit(measure), percent=percent, reference=reference))
    return Figure(tuple(panels), columns, f"{_line_words(band)}. {_described(measures)}{more}", share_y)


def _by_position(
    runs: Runs, measures: Sequence[str], band: Band, layers: Sequence[int], columns: int, share_y: bool = False
) -> Figure:
    """Return a figure of lines over positions, with a panel for each measure and layer."""
    panels = []
    for measure, layer in product(measures, layers):
        table = _lines(runs, measure, band, (layer,), ("position",))
        drawn = sorted(table["layer"].unique())
        where = f"layer {drawn[0]}" if len(drawn) == 1 else "last layer" if layer == -1 else f"layer {layer}"
        title, percent = f"{measure}, {where}", MEASURES[measure].in_percent
        panels.append(FigurePanel(title, table, "position", _unit(measure), "", _QUERY, percent, doubling=True))
    return Figure(tuple(panels), columns, f"{_line_words(band)}. {_described_bins(measures, panels)}", share_y)


def _position(runs: Runs, band: Band, layers: Sequence[int]) -> Figure:
    """Return lines of some layers of several runs, or a map of all layers of one."""
    measures = ("bos_abs", "entropy")
    if len(runs) > 1:
        layers = layers or _spaced([run.layers(measures[0], ()) for run in runs])
        return _by_position(runs, measures, band, layers, max(2, len(layers)))
    panels = []
    for measure in measures:
        table, percent = _lines(runs, measure, band, layers, ("position",)), MEASURES[measure].in_percent
        panels.append(FigurePanel(measure, table, "position", _label(measure), "layer", _QUERY, percent))
    words = f"{runs[0].name}; colour: {_OVER[band]}. {_described_bins(measures, panels)}"
    return Figure(tuple(panels), 2, words)


def _spaced(by_run: Sequence[list[int]]) -> tuple[int, ...]:
    """Return the first and the middle layer that all runs have, and each run's last one."""
    common = sorted(set.intersection(*map(set, by_run)))
    last = by_run[0][-1] if len({layers[-1] for layers in by_run}) == 1 else -1
    return tuple(dict.fromkeys([*common[:1], *common[len(common) // 2 :][:1], last]))


def _categories(runs: Runs, band: Band, layers: Sequence[int], paper: bool) -> Figure:
    kind = "mass" if paper else "mass_abs"
    groups = {title: [f"{kind}_{name}" for name in names] for title, names in _FOUR.items()}
    tables: dict[str, list[pd.DataFrame]] = {title: [] for title in groups}
    for run in runs:
        chosen = run.layers(f"{kind}_bos", layers)
        sums = run.sums(groups, band, softmax=paper)
        sums = sums[sums["layer"].isin(chosen)]
        for title, members in tables.items():
            values = sums.rename(columns={title: "value"})[["layer", "value", "n"]]
            members.append(run.labelled(spread_of(values, ["layer"]), f"{kind}: {title}"))
    label = "softmax" if paper else "%"
    panels = [
        FigurePanel(title, pd.concat(members, ignore_index=True), "layer", label, percent=not paper)
        for title, members in tables.items()
    ]
    value = "share of |weights| of the continuation's tokens on each kind of tokens"
    if paper:
        value = (
            "softmax over the four kinds of tokens of a head's mean weight of the continuation's tokens on them, as in "
            "the paper; four shares that sum to 1 cannot leave 0.175 to 0.475"
        )
    return Figure(tuple(panels), 2, f"{_line_words(band)}. Value: {value}")


def _rank(runs: Runs, measure: str, layers: Sequence[int]) -> Figure:
    first, *others = runs
    ranks = _lines(runs, measure, "samples", layers)
    panels = [FigurePanel(f"{measure}, median over heads", ranks, "layer", measure)]
    words = "Line: mean over documents of the median over heads; band: ± 1 standard deviation over documents"
    if others:
        shares = [run.labelled(share_above(first, run, measure, layers), measure) for run in others]
        title, table = f"documents above {short_name(first.name)}", pd.concat(shares, ignore_index=True)
        panels.append(FigurePanel(title, table, "layer", "%", percent=True, reference=0.5))
        words += "; right: share of documents whose median is above that of the first run, band: ± 1 standard error"
    return Figure(tuple(panels), 2, f"{words}. {_described([measure])}")


def _heatmap(runs: Runs, measure: str, layers: Sequence[int]) -> Figure:
    panels = []
    for run in runs:
        values = run.values(measure, "heads")
        chosen = values[values["layer"].isin(run.layers(measure, layers))].reset_index(drop=True)
        table, percent = run.labelled(chosen, measure), MEASURES[measure].in_percent
        panels.append(FigurePanel(short_name(run.name), table, "head", _label(measure), "layer", percent=percent))
    words = f"Colour: mean over documents of each head, one scale for all runs. {_described([measure])}"
    return Figure(tuple(panels), 2 if len(panels) == 4 else 3, words)


def _lines(runs: Runs, measure: str, band: Band, layers: Sequence[int], position: Sequence[str] = ()) -> pd.DataFrame:
    return pd.concat([run.line(measure, band, layers, position) for run in runs], ignore_index=True)


def _unit(measure: str) -> str:
    """Return the unit of a measure's values, or what they are."""
    info = MEASURES[measure]
    return "%" if info.in_percent else _UNITS.get(measure, "weight" if info.group in ("bos", MASS, "sink") else measure)


def _label(measure: str) -> str:
    unit = _unit(measure)
    return measure if unit == measure else f"{measure}, {unit}"


def _line_words(band: Band) -> str:
    over = "heads" if band == "heads" else "documents"
    return f"Line: {_OVER[band]}; band: ± 1 standard deviation over {over}"


def _described(measures: Sequence[str]) -> str:
    return "; ".join(f"{measure}: {MEASURES[measure].words}" for measure in measures)


def _described_bins(measures: Sequence[str], panels: Sequence[FigurePanel]) -> str:
    """Return the descriptions of measures by position, and how many documents the bins have."""
    # The rest of a description is about whole sequences
    about = "; ".join(f"{measure}: {MEASURES[measure].words.partition(',')[0]}" for measure in measures)
    bins = pd.concat([panel.table for panel in panels]).groupby("position")["n"].min()
    few = f"; bins have {bins.iloc[0]:,} to {bins.iloc[-1]:,} documents" if bins.iloc[0] != bins.iloc[-1] else ""
    return f"{about}; mean over the positions 1, 2–3, 4–7, … of a document{few}"


def figure_notes(figure: Figure, runs: Runs) -> str:
    """Return the notes below a figure: what its values and bands are, of what, and the differences between its runs."""
    layers = sorted({int(layer) for panel in figure.panels for layer in panel.table["layer"].unique()})
    drawn = f"Layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))} (from 0)"
    if len(layers) > 2 and layers[-1] - layers[0] == len(layers) - 1:
        drawn = f"Layers {layers[0]} to {layers[-1]} (from 0)"
    by_fact = zip(*map(_facts, runs), strict=True)
    # A value that all runs have, or each run's in their order
    facts = [" | ".join(values[:1] if len({*values}) == 1 else values) for values in by_fact]
    about = f"{figure.words}. Weights are those of the effective maps."
    return "\n".join([about, f"{', '.join([drawn, *facts])}.", *_smaller_counts(figure, runs), *run_differences(runs)])


def _smaller_counts(figure: Figure, runs: Runs) -> list[str]:
    """Return a sentence for measures that apply to some documents only, such as those of sinks to 64 tokens or more."""
    counts: dict[str, int] = {}
    least = min(len(run.samples) for run in runs)
    for table in (panel.table for panel in figure.panels):
        if "n" in table and "position" not in table and (most := int(table.groupby("id")["n"].max().min())) < least:
            counts |= dict.fromkeys(table["measure"].unique(), most)
    listed = "; ".join(f"{name}: {count:,} documents, to which it applies" for name, count in counts.items())
    return [f"{listed}."] if listed else []


def _facts(analysed: AnalysedRun) -> tuple[str, ...]:
    """Return what notes say of one run, in a fixed order."""
    specification, tasks = analysed.run.manifest["specification"], analysed.tasks
    count = len(analysed.samples)
    listed = ", ".join(tasks) if len(tasks) <= _MOST_NAMED else f"{len(tasks)} tasks"
    read = {"gold": "gold continuation", "all": "every continuation"}
    return (
        f"{count:,} document{'s' * (count > 1)} of {listed}",
        read.get(specification.get("continuation"), "whole text"),
        f"seed {specification['seed']}",
        f"{analysed.run.template} prompts",
        str(specification["dtype"]),
    )


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
