"""Figures of finished analyses: the paper's, and what others plot.

In: runs, a figure's name and its options. Out: the figure as .png, .pdf or .svg, and beside it a .csv of the drawn
numbers, with shares as fractions. Every number is a group-by of the run's tables (`figure_runs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from evalkit.benchmarks.attention.figure_runs import AnalysedRun, over_seeds, run_differences, share_above, spread_of
from evalkit.benchmarks.attention.groups import KINDS, MEASURES, Band, FigureRequest
from evalkit.benchmarks.attention.results import SAMPLE
from evalkit.errors import RunError, UsageError
from evalkit.paths import replace_file
from evalkit.reporting.figures import FigurePanel, RunFigure, check_figure_path, draw_panels, legend_texts, short_name
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
_MOST_NAMED = 3


@dataclass(frozen=True)
class Figure:
    """A figure before it is drawn."""

    panels: Sequence[FigurePanel]
    columns: int
    words: str
    """What its values and bands are, for the notes."""
    share_y: bool = False


def make(name: str, runs: Runs, request: FigureRequest) -> Figure:
    """Compute the numbers of a figure of `KINDS`; the order of the runs is that of colours and panels."""
    request.check(name)
    if request.band and _have_seeds(runs):
        raise UsageError(f"--band {request.band}: the band of several seeds is over the seeds; leave it out")
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
            measures = [measure for measure in _SUMMARY if all(measure in run.measures for run in runs)]
            return _by_layer(runs, measures or _SUMMARY, band, layers, 2)
        case "rank":
            return _rank(runs, request.measure_of(name), layers)
        case _:
            return _heatmap(runs, request.measure_of(name), layers)


def draw(figure: Figure, runs: Runs, path: Path) -> None:
    """Draw a figure from `make` of the same runs into a .png, .pdf or .svg file; raise a `RunError` if it fails."""
    drawn = pd.concat([panel.table for panel in figure.panels])
    if drawn["measure"].str.startswith("bos_negative").all() and not drawn["value"].any():
        raise UsageError("no run has negative weights on BOS")
    names, notes = legend_texts(run.model for run in runs), figure_notes(figure, runs)
    draw_panels(figure.panels, names, figure.columns, notes, path, figure.share_y)


def write(figure: Figure, runs: Runs, paths: Sequence[Path]) -> list[Path]:
    """Draw a figure into .png, .pdf or .svg files, and write its numbers beside the first one; return all files."""
    for path in paths:
        check_figure_path(path)
    numbers = paths[0].with_suffix(".csv")
    if numbers.is_file():
        with numbers.open(encoding="utf-8", errors="replace") as file:
            if not file.readline().startswith("panel,run,id,"):
                raise UsageError(f"{numbers} exists and is not of a figure; choose another --output")
    for path in paths:
        draw(figure, runs, path)
    titled = [panel.table.assign(panel=panel.title) for panel in figure.panels]
    joined = pd.concat(titled, ignore_index=True).astype(object)
    joined.insert(0, "panel", joined.pop("panel"))
    records: Any = joined.where(joined.notna(), None).to_dict("records")
    try:
        replace_file(numbers, f"{records_csv(records)}\n".encode())
    except OSError as error:
        raise RunError(f"{numbers} cannot be written: {error.strerror or error}") from error
    return [*paths, numbers]


def run_figures(runs: Sequence[Run], names: Sequence[str], models: Sequence[str]) -> list[RunFigure]:
    """Return the figures that all runs have the measures of; the names are unique, and seeds share a model."""
    analysed = [AnalysedRun(name, run, (), model) for name, run, model in zip(names, runs, models, strict=True)]
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


def _by_layer(
    runs: Runs, measures: Sequence[str], band: Band, layers: Sequence[int], columns: int, more: str = "",
    share_y: bool = False, reference: float | None = None,
) -> Figure:  # fmt: skip
    tables = {measure: over_seeds(runs, [run.line(measure, band, layers) for run in runs]) for measure in measures}
    panels = [_panel(measure, table, "layer", reference=reference) for measure, table in tables.items()]
    return Figure(panels, columns, f"{_line_words(runs, band)}. {_described(measures)}{more}", share_y)


def _by_position(
    runs: Runs, measures: Sequence[str], band: Band, layers: Sequence[int], columns: int, share_y: bool = False
) -> Figure:
    panels = []
    for measure, layer in product(measures, layers):
        table = over_seeds(runs, [run.line(measure, band, (layer,), ("layer", "position")) for run in runs])
        drawn = sorted(table["layer"].unique())
        where = f"layer {drawn[0]}" if len(drawn) == 1 else "last layer" if layer == -1 else f"layer {layer}"
        panels.append(_panel(measure, table, "position", f"{measure}, {where}", x_label=_QUERY, doubling=True))
    return Figure(panels, columns, f"{_line_words(runs, band)}. {_described_bins(measures, panels)}", share_y)


def _position(runs: Runs, band: Band, layers: Sequence[int]) -> Figure:
    """Lines of some layers of several runs, or maps of all layers of one."""
    measures = ("bos_abs", "entropy")
    if len(runs) > 1:
        # The first and the middle layer that all runs have, and each run's last one
        by_run = [run.layers(measures[0]) for run in runs]
        common = sorted(set.intersection(*map(set, by_run)))
        last = by_run[0][-1] if len({known[-1] for known in by_run}) == 1 else -1
        spaced = dict.fromkeys([*common[:1], *common[len(common) // 2 :][:1], last])
        layers = layers or tuple(spaced)
        return _by_position(runs, measures, band, layers, max(2, len(layers)))
    tables = {measure: runs[0].line(measure, band, layers, ("layer", "position")) for measure in measures}
    panels = [_panel(measure, table, "position", y="layer", x_label=_QUERY) for measure, table in tables.items()]
    return Figure(panels, 2, f"{runs[0].name}; colour: {_OVER[band]}. {_described_bins(measures, panels)}")


def _categories(runs: Runs, band: Band, layers: Sequence[int], paper: bool) -> Figure:
    kind = "mass" if paper else "mass_abs"
    keys = ["layer", "head"] if band == "heads" else ["layer", *SAMPLE]
    tables: dict[str, list[pd.DataFrame]] = {title: [] for title in _FOUR}
    for run in runs:
        sums = pd.DataFrame()
        for title, names in _FOUR.items():
            values = pd.concat([run.values(f"{kind}_{name}", band, layers) for name in names])
            sums[title] = (grouped := values.groupby(keys, observed=True))["value"].sum()
        if paper:  # softmax over the four kinds
            powers = sums.sub(sums.max(axis=1), axis=0).map(math.exp)
            sums = powers.div(powers.sum(axis=1), axis=0)
        if band == "heads":
            sums["n"] = grouped["n"].max()
        for title, members in tables.items():
            spread = spread_of(sums.rename(columns={title: "value"}), ["layer"])
            members.append(run.labelled(spread, f"{kind}: {title}"))
    label = "softmax" if paper else "%"
    lines = {title: over_seeds(runs, members) for title, members in tables.items()}
    panels = [FigurePanel(title, table, "layer", label, percent=not paper) for title, table in lines.items()]
    value = "share of |weights| of the continuation's tokens on each kind of tokens"
    if paper:
        value = (
            "softmax over the four kinds of tokens of a head's mean weight of the continuation's tokens on them, as in "
            "the paper; four shares that sum to 1 cannot leave 0.175 to 0.475"
        )
    return Figure(panels, 2, f"{_line_words(runs, band)}. Value: {value}")


def _rank(runs: Runs, measure: str, layers: Sequence[int]) -> Figure:
    ranks = over_seeds(runs, [run.line(measure, "samples", layers) for run in runs])
    panels = [FigurePanel(f"{measure}, median over heads", ranks, "layer", measure)]
    words = _line_words(runs, "samples", "mean over documents of the median over heads")
    first, others = runs[0].model, [run for run in runs if run.model != runs[0].model]
    if others:
        pairs = [(base, run) for base in runs if base.model == first for run in others]
        above = [run.labelled(share_above(base, run, measure, layers), measure) for base, run in pairs]
        title = f"documents above {short_name(first)}"
        panels.append(FigurePanel(title, over_seeds(runs, above), "layer", "%", percent=True, reference=0.5))
        pair = "mean over pairs of seeds, band: ± 1 standard deviation over the pairs"
        band = pair if _have_seeds(runs) else "band: ± 1 standard error"
        words += f"; right: share of documents whose median is above that of the first model, {band}"
    return Figure(panels, 2, f"{words}. {_described([measure])}")


def _heatmap(runs: Runs, measure: str, layers: Sequence[int]) -> Figure:
    panels = []
    for run in runs:
        table = run.labelled(run.values(measure, "heads", layers), measure).assign(run=run.name)
        panels.append(_panel(measure, table, "head", short_name(run.name), y="layer"))
    uneven = any(panel.table.groupby("layer").size().nunique() > 1 for panel in panels)
    words = "; cells are wider in layers with fewer heads" * uneven
    words = f"Colour: mean over documents of each head, one scale for all runs{words}. {_described([measure])}"
    return Figure(panels, 2 if len(panels) == 4 else 3, words)


def _panel(measure: str, table: pd.DataFrame, x: str, title: str = "", y: str = "", **more: Any) -> FigurePanel:
    """Return a panel of lines, or with `y` a map, whose values are labelled with their unit or what they are."""
    info = MEASURES[measure]
    unit = "%" if info.in_percent else info.unit or measure
    label = f"{measure}, {unit}" if y and unit != measure else unit
    return FigurePanel(title or measure, table, x, label, y, percent=info.in_percent, **more)


def _have_seeds(runs: Runs) -> bool:
    return len({run.model for run in runs}) < len(runs)


def _line_words(runs: Runs, band: Band, value: str = "") -> str:
    over, value = "heads" if band == "heads" else "documents", value or _OVER[band]
    if _have_seeds(runs):
        over, value = "seeds", f"mean over seeds of the {value}"
    return f"Line: {value}; band: ± 1 standard deviation over {over}"


def _described(measures: Sequence[str]) -> str:
    return "; ".join(f"{measure}: {MEASURES[measure].words}" for measure in measures)


def _described_bins(measures: Sequence[str], panels: Sequence[FigurePanel]) -> str:
    # The rest of a description is about whole sequences
    about = "; ".join(f"{measure}: {MEASURES[measure].words.partition(',')[0]}" for measure in measures)
    bins = pd.concat([panel.table for panel in panels]).groupby("position")["n"].min()
    few = f"; bins have {bins.iloc[0]:,} to {bins.iloc[-1]:,} documents" if bins.iloc[0] != bins.iloc[-1] else ""
    return f"{about}; mean over the positions 1, 2–3, 4–7, … of a document{few}"


def figure_notes(figure: Figure, runs: Runs) -> str:
    tables = [panel.table for panel in figure.panels]
    layers = sorted({int(layer) for table in tables for layer in table["layer"].unique()})
    drawn = f"Layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))} (from 0)"
    if len(layers) > 2 and layers[-1] - layers[0] == len(layers) - 1:
        drawn = f"Layers {layers[0]} to {layers[-1]} (from 0)"
    # A value that all runs have, or each run's in their order
    facts = [
        " | ".join(values[:1] if len({*values}) == 1 else values) for values in zip(*map(_facts, runs), strict=True)
    ]
    # Measures that apply to some documents only, such as those of sinks to 64 tokens or more
    few: dict[str, int] = {}
    least = min(len(run.samples) for run in runs)
    for table in tables:
        if "n" in table and "position" not in table and (most := int(table.groupby("id")["n"].max().min())) < least:
            few |= dict.fromkeys(table["measure"].unique(), most)
    listed = "; ".join(f"{name}: {count:,} documents, to which it applies" for name, count in few.items())
    about = f"{figure.words}. Weights are those of the effective maps."
    return "\n".join(
        [about, f"{', '.join([drawn, *facts])}.", *([f"{listed}."] if listed else []), *run_differences(runs)]
    )


def _facts(analysed: AnalysedRun) -> tuple[str, ...]:
    specification, tasks = analysed.run.manifest["specification"], analysed.tasks
    count = len(analysed.samples)
    listed = ", ".join(tasks) if len(tasks) <= _MOST_NAMED else f"{len(tasks)} tasks"
    read = {"gold": "gold continuation", "all": "every continuation"}
    return (
        f"{count:,} document{'s' * (count > 1)} of {listed}",
        read.get(specification.get("continuation"), "whole text"),
        f"sample seed {specification['seed']}",
        f"{analysed.run.template} prompts",
        str(specification["dtype"]),
    )
