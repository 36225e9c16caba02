"""Figures of finished analyses: the paper's, and what others plot.

In: runs, a figure's name and its options. Out: the figure as .png, .pdf or .svg, and beside it a .csv of the drawn
numbers, with shares as fractions, and a caption for LaTeX. Every number is a group-by of the run's tables
(`figure_runs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from evalkit.attention.figure_runs import AnalysedRun, over_seeds, run_differences, share_above, spread_of
from evalkit.attention.groups import KINDS, MEASURES, Band, FigureRequest
from evalkit.attention.results import SAMPLE
from evalkit.errors import RunError, UsageError
from evalkit.escape import in_latex
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
_LEAST_REACHED = 0.05
"""Share of the documents that reach the last drawn position of single tokens."""
_SUMMARY = ("sink_abs_rate", "bos_abs", "distance", "similarity")
_OVER = {"heads": "mean over heads of the mean over documents", "samples": "mean over documents of the mean over heads"}
_MOST_NAMED = 3
_CAPTION = "% By evalkit figure"
"""First line of a caption's file."""


@dataclass(frozen=True)
class Figure:
    """A figure before it is drawn."""

    panels: Sequence[FigurePanel]
    columns: int
    words: str
    """What its values and bands are, for the notes."""
    share_y: bool = False
    about: str = ""
    """What it shows."""
    request: FigureRequest = field(default_factory=FigureRequest)


def make(name: str, runs: Runs, request: FigureRequest) -> Figure:
    """Compute the numbers of a figure of `KINDS`; the order of the runs is that of colours and panels."""
    request.check(name)
    if request.band and _have_seeds(runs):
        raise UsageError(f"--band {request.band}: the band of several seeds is over the seeds; leave it out")
    return replace(_made(name, runs, request), about=_described([KINDS[name].words]), request=request)


def _made(name: str, runs: Runs, request: FigureRequest) -> Figure:
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
            return _rank(runs, request.measure_of(name), layers, request.paper)
        case _:
            return _heatmap(runs, request.measure_of(name), layers)


def draw(figure: Figure, runs: Runs, path: Path) -> None:
    """Draw a figure from `make` of the same runs into a .png, .pdf or .svg file; raise a `RunError` if it fails."""
    drawn = pd.concat([panel.table for panel in figure.panels])
    if drawn["measure"].str.startswith("bos_negative").all() and not drawn["value"].any():
        raise UsageError("no run has negative weights on BOS")
    names, notes = legend_texts(run.model for run in runs), figure_notes(figure, runs) if figure.request.notes else ""
    draw_panels(figure.panels, names, figure.columns, notes, path, figure.share_y, figure.request.size)


def write(figure: Figure, runs: Runs, paths: Sequence[Path]) -> list[Path]:
    """Draw into .png, .pdf or .svg files, and write numbers and caption beside the first one; return all files."""
    for path in paths:
        check_figure_path(path)
    numbers, caption = paths[0].with_suffix(".csv"), paths[0].with_name(f"{paths[0].stem}-caption.tex")
    for path, start in ((numbers, "panel,run,id,"), (caption, _CAPTION)):
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as file:
                if not file.readline().startswith(start):
                    raise UsageError(f"{path} exists and is not of a figure; choose another --output")
    for path in paths:
        draw(figure, runs, path)
    titled = [panel.table.assign(panel=panel.title) for panel in figure.panels]
    joined = pd.concat(titled, ignore_index=True).astype(object)
    joined.insert(0, "panel", joined.pop("panel"))
    records: Any = joined.where(joined.notna(), None).to_dict("records")
    words = in_latex(" ".join(f"{figure.about}. {figure_notes(figure, runs)}".split()))
    for path, text in ((numbers, records_csv(records)), (caption, f"{_CAPTION}\n\\caption{{{words}}}")):
        try:
            replace_file(path, f"{text}\n".encode())
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
    return [*paths, numbers, caption]


def run_figures(runs: Sequence[Run], names: Sequence[str], models: Sequence[str]) -> list[RunFigure]:
    """Return the figures that all runs have the measures of; the names are unique, and seeds share a model."""
    analysed = [AnalysedRun(name, run, (), model) for name, run, model in zip(names, runs, models, strict=True)]
    figures = []
    for name, kind in KINDS.items():
        try:
            figure = make(name, analysed, FigureRequest(notes=True))
        except UsageError:  # a run lacks its measure
            continue
        measure = f" ({FigureRequest().measure_of(name)})" if kind.measures else ""
        words = f"{figure.about}{measure}: {', '.join(names)}."
        figures.append(RunFigure(name, words, partial(draw, figure, analysed)))
    return figures


def _by_layer(
    runs: Runs, measures: Sequence[str], band: Band, layers: Sequence[int], columns: int, more: str = "",
    share_y: bool = False, reference: float | None = None,
) -> Figure:  # fmt: skip
    tables = {measure: over_seeds(runs, [run.line(measure, band, layers) for run in runs]) for measure in measures}
    panels = [_panel(measure, table, "layer", reference=reference) for measure, table in tables.items()]
    words = _described(MEASURES[measure].words for measure in measures)
    return Figure(panels, columns, f"{_line_words(runs, band)}. {words}{more}", share_y)


def _by_position(
    runs: Runs, measures: Sequence[str], band: Band, layers: Sequence[int], columns: int, share_y: bool = False
) -> Figure:
    panels = []
    for measure, layer in product(measures, layers):
        lines = [run.line(measure, band, (layer,), ("layer", "position")) for run in runs]
        if MEASURES[measure].of_tokens:
            counts = [_LEAST_REACHED * len(run.samples) for run in runs]
            lines = [line[line["n"] >= least] for line, least in zip(lines, counts, strict=True)]
        table = over_seeds(runs, lines)
        drawn = sorted(table["layer"].unique())
        where = f", layer {drawn[0]}" if len(drawn) == 1 else ", last layer" if layer == -1 else f", layer {layer}"
        title = MEASURES[measure].title + where * (len(measures) * len(layers) > 1)
        panels.append(_panel(measure, table, "position", title))
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
    panels = [_panel(measure, table, "position", y="layer") for measure, table in tables.items()]
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
    label = "Softmax of weights" if paper else "Share of |weights|, %"
    lines = {f"{title[0].upper()}{title[1:]}": over_seeds(runs, members) for title, members in tables.items()}
    panels = [FigurePanel(title, table, "layer", label, percent=not paper) for title, table in lines.items()]
    value = "share of |weights| of the continuation's tokens on each kind of tokens"
    if paper:
        value = (
            "softmax over the four kinds of tokens of a head's mean weight of the continuation's tokens on them, as in "
            "the paper; four shares that sum to 1 cannot leave 0.175 to 0.475"
        )
    return Figure(panels, 2, f"{_line_words(runs, band)}. Value: {value}")


def _rank(runs: Runs, measure: str, layers: Sequence[int], paper: bool) -> Figure:
    ranks = over_seeds(runs, [run.line(measure, "samples", layers) for run in runs])
    panels = [_panel(measure, ranks, "layer", f"{MEASURES[measure].title}, median over heads")]
    words = _line_words(runs, "samples", "mean over documents of the median over heads")
    first, others = runs[0].model, [run for run in runs if run.model != runs[0].model]
    if others:
        pairs = [(base, run) for base in runs if base.model == first for run in others]
        above = [run.labelled(share_above(base, run, measure, layers), measure) for base, run in pairs]
        title = f"Documents above {short_name(first)}"
        panels.append(FigurePanel(title, over_seeds(runs, above), "layer", "%", percent=True, reference=0.5))
        pair = "mean over pairs of seeds, band: ± 1 standard deviation over the pairs"
        band = pair if _have_seeds(runs) else "band: ± 1 standard error"
        share = f"share of documents whose median is above that of the first model, {band}"
        panels, words = (panels[1:], f"Line: {share}") if paper else (panels, f"{words}; right: {share}")
    return Figure(panels, 2, f"{words}. {_described([MEASURES[measure].words])}")


def _heatmap(runs: Runs, measure: str, layers: Sequence[int]) -> Figure:
    panels = []
    for run in runs:
        table = run.labelled(run.values(measure, "heads", layers), measure).assign(run=run.name)
        panels.append(_panel(measure, table, "head", short_name(run.name), y="layer"))
    uneven = any(panel.table.groupby("layer").size().nunique() > 1 for panel in panels)
    words = f"one scale for all runs{'; cells are wider in layers with fewer heads' * uneven}"
    words = f"Colour: mean over documents of each head, {words}. {_described([MEASURES[measure].words])}"
    return Figure(panels, 2 if len(panels) == 4 else 3, words)


def _panel(measure: str, table: pd.DataFrame, x: str, title: str = "", y: str = "", **more: Any) -> FigurePanel:
    """Return a panel of lines with their unit, or with `y` a map, labelled with the measure's title and unit."""
    info, x_label = MEASURES[measure], x.capitalize()
    label = ", ".join(filter(None, (info.title, info.printed_unit))) if y else info.printed_unit
    if x == "position":
        x_label = f"Position of the query{'' if info.of_tokens else ' (first of its bin)'}"
        more["ticks"] = "round" if info.of_tokens else "doubling"
    return FigurePanel(title or info.title, table, x, label, y, x_label, percent=info.in_percent, **more)


def _have_seeds(runs: Runs) -> bool:
    return len({run.model for run in runs}) < len(runs)


def _line_words(runs: Runs, band: Band, value: str = "") -> str:
    over, value = "heads" if band == "heads" else "documents", value or _OVER[band]
    if _have_seeds(runs):
        over, value = "seeds", f"mean over seeds of the {value}"
    return f"Line: {value}; band: ± 1 standard deviation over {over}"


def _described(words: Iterable[str]) -> str:
    joined = "; ".join(words)
    return f"{joined[:1].upper()}{joined[1:]}"


def _described_bins(measures: Sequence[str], panels: Sequence[FigurePanel]) -> str:
    # The rest of a description is about whole sequences
    about = _described(MEASURES[measure].words.partition(",")[0] for measure in measures)
    bins = pd.concat([panel.table for panel in panels]).groupby("position")["n"].min()
    many = f"{bins.iloc[0]:,} to {bins.iloc[-1]:,} documents"
    if MEASURES[measures[0]].of_tokens:
        return f"{about}, to the last position that {_LEAST_REACHED:.0%} of the documents reach ({many})"
    few = f"; bins have {many}" if bins.iloc[0] != bins.iloc[-1] else ""
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
    for title, table in ((panel.title, panel.table) for panel in figure.panels if panel.x != "position"):
        if (most := int(table.groupby("id")["n"].max().min())) < least:
            few[title] = most
    listed = "; ".join(f"{title}: {count:,} documents, to which it applies" for title, count in few.items())
    about = f"{figure.words}. Weights are those of the effective maps."
    shares = pd.concat([panel.table for panel in figure.panels if panel.percent and not panel.y] or [pd.DataFrame()])
    if len(shares) and ((shares["value"] - shares["spread"] < 0) | (shares["value"] + shares["spread"] > 1)).any():
        about += " Bands are cut off at 0 and 100 %."
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
