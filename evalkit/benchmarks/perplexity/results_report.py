"""Reports of perplexity runs: finished runs → a `Report` of one run, or of several methods of context extension."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evalkit.benchmarks.outcomes import LOWER_IS_BETTER, LOWER_NOTE, run_content
from evalkit.benchmarks.perplexity.results import MOST, POSITION_COLUMNS, POSITIONS, PositionBin, position_bins
from evalkit.escape import counted
from evalkit.models.context.extension import Extension
from evalkit.reporting.decimals import fixed
from evalkit.reporting.figures import (
    GREY,
    PLAIN,
    RunFigure,
    dashes,
    line_look,
    new_figure,
    notes_height,
    save_figure,
    short_name,
    style_axes,
    wrapped,
    write_notes,
)
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.runs.batch_devices import mixture
from evalkit.runs.folder import Run
from evalkit.stats.estimates import CONFIDENCE, t_quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_BITS = f"bits/byte{LOWER_IS_BETTER}"
_SUMS = ("documents", "bytes", "tokens", _BITS, "± SE", "per byte", "per word", "per token")
_PLACES = 4


def headline(run: Run, rule: str | None = None) -> tuple[float | None, str]:
    """Return bits per byte over all documents; as the sort key negative, since lower is better."""
    whole = run.stored["whole"]
    value, error = _value(whole["bits_per_byte"], whole["stderr"])
    shown = value if whole["stderr"] is None else f"{value} {error}"
    return -whole["bits_per_byte"], f"{shown} bits per byte"


def perplexity_report(run: Run, rule: str | None = None, detail: bool = False) -> Report:
    """Return bits per byte and perplexities by task, and bits per byte by position; other arguments change nothing."""
    stored = run.stored
    lines = [(task["task"], task) for task in stored["tasks"]]
    ruled = {len(lines)} if len(lines) > 1 else ()
    lines += [("all", stored["whole"])] if len(lines) > 1 else []
    rows = [[name, *_sums(values)] for name, values in lines]
    headers = ["task", *_SUMS]
    tables = (simple_table("perplexity", headers, rows, ruled=ruled), _positions({"": run}))
    records = [{"task": name} | dict(values) for name, values in lines]
    return Report(tables, notes=tuple(_notes(run)), content=run_content(run), records=records)


def methods_report(runs: Mapping[str, Run]) -> Report:
    """Return a report on the same documents under several methods of context extension, each with its run."""
    rows = [[name, *_sums(run.stored["whole"])] for name, run in runs.items()]
    tables = (simple_table("methods", ["method", *_SUMS], rows), _positions(runs))
    records = [{"method": name, "folder": str(run.folder)} | dict(run.stored["whole"]) for name, run in runs.items()]
    extensions = [f"{name}: {_extension(run)}" for name, run in runs.items()]
    folders = [f"{name}: {run.folder}" for name, run in runs.items()]
    first = next(iter(runs.values()))
    content = {"methods": [{"method": name} | run_content(run) for name, run in runs.items()]}
    paired = "± SE: of each method alone; evalkit compare pairs two of these runs by document"
    notes = (*_notes(first, model_only=True), paired, *extensions, *folders)
    return Report(tables, notes=notes, content=content, records=records)


def _position_bins(runs: Iterable[Run], most: int) -> list[list[PositionBin]]:
    return position_bins([run.table(POSITIONS, POSITION_COLUMNS) for run in runs], most)


def _original_window(run: Run) -> int | None:
    """Return the context window that a run's model was trained on, in tokens, if known."""
    extension = run.manifest["specification"]["context_extension"]
    window: int | None = (extension or {}).get("original") or (run.manifest.get("loaded") or {}).get("window")
    return window


def _sums(values: Mapping[str, Any]) -> list[str]:
    counts = [f"{values[name]:,}" for name in ("n", "bytes", "tokens")]
    perplexities = [fixed(values[f"{unit}_perplexity"], 3) for unit in ("byte", "word", "token")]
    return [*counts, *_value(values["bits_per_byte"], values["stderr"]), *perplexities]


def _positions(runs: Mapping[str, Run]) -> Table:
    """Return bits per byte by position: of one run with more columns, of several a column each."""
    by_run = _position_bins(runs.values(), MOST)
    longest = max(by_run, key=len)
    trained = min((window for run in runs.values() if (window := _original_window(run))), default=math.inf)
    names = [f"{bin.first:,}–{bin.last:,}" + "*" * (bin.first > trained) for bin in longest]
    if len(runs) == 1:
        headers = ["positions", "documents", "tokens", _BITS, "± SE", "nats/token"]
        counts = [[f"{bin.documents:,}", f"{bin.tokens:,}", *_value(bin.bits_per_byte, bin.stderr)] for bin in longest]
        rows = [[*row, fixed(bin.nats / bin.tokens, 3)] for row, bin in zip(counts, longest, strict=True)]
    else:
        headers = ["positions", "tokens", *(f"{name}{LOWER_IS_BETTER}" for name in runs)]
        values = [{bin.first: fixed(bin.bits_per_byte, _PLACES) for bin in bins} for bins in by_run]
        rows = [[f"{bin.tokens:,}", *(of_run.get(bin.first, "–") for of_run in values)] for bin in longest]
    return simple_table("positions", headers, [[name, *row] for name, row in zip(names, rows, strict=True)])


def _value(bits: float | None, stderr: float | None) -> tuple[str, str]:
    return fixed(bits, _PLACES), "–" if stderr is None else f"± {fixed(stderr, _PLACES)}"


def _notes(run: Run, model_only: bool = False) -> Iterator[str]:
    manifest, specification, whole = run.manifest, run.manifest["specification"], run.stored["whole"]
    loaded = manifest.get("loaded") or {}
    yield f"{manifest['model']}, {specification['dtype']}, {_windows(run)}"
    if not model_only:
        yield _extension(run)
    yield (
        "bits/byte: over all bytes of the documents, so comparable between tokenizers; ± SE: of the ratio, over "
        "documents; perplexities per byte, word and token as lm-eval's"
    )
    if whole["n"] == 1:
        yield "one document: its tokens are not independent, so there is no standard error"
    yield "position: tokens before the scored one in its window, with the prefix"
    if window := _marked(run):
        yield f"*: past the {window:,} tokens of the window of training"
    if loaded.get("adds_tokens"):
        yield "the tokenizer adds tokens, such as BOS, to each document; as in lm-eval they are scored too"
    yield LOWER_NOTE
    yield from mixture(manifest)


def _windows(run: Run) -> str:
    """Describe how documents were cut."""
    window = (run.manifest.get("facts") or {}).get("window")
    stride = run.manifest["specification"]["windows"]["stride"]
    size = "" if window is None else f" of at most {window:,} tokens"
    kind = f"each after the first scores {stride:,}" if stride else "disjoint, as lm-eval's"
    return f"{counted(run.stored['whole']['windows'], 'window')}{size}, {kind}"


def _extension(run: Run) -> str:
    extension = run.manifest["specification"]["context_extension"]
    return Extension(**extension).describe() if extension else "no context extension"


_MOST = 32
"""Points of a line."""
_WIDTH, _HEIGHT = 6.4, 3.6
"""Inches of the figure, without its notes."""


def run_figures(runs: Sequence[Run], names: Sequence[str]) -> list[RunFigure]:
    """Return a figure for each group of runs on the same documents; their order is that of colours."""
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        specification = run.manifest["specification"]
        groups.setdefault(json.dumps([specification["documents"], specification["limit"]]), []).append(place)
    figures = []
    for places in groups.values():
        members, named = [runs[place] for place in places], [names[place] for place in places]
        name = f"bits-per-byte-{members[0].manifest['id']}" if len(groups) > 1 else "bits-per-byte"
        words = f"Bits per byte by position in the context window: {', '.join(named)}."
        figures.append(RunFigure(name, words, partial(draw_positions, members, named)))
    return figures


def draw_positions(runs: Sequence[Run], names: Sequence[str], path: Path) -> None:
    """Draw bits per byte by position into a .png, .pdf or .svg file, a line with a 95 % band for each run."""
    lines = wrapped(_figure_notes(runs), _WIDTH)
    figure = new_figure(_WIDTH, _HEIGHT + notes_height(lines))
    panel = figure.subplots()
    for number, (name, bins) in enumerate(zip(names, _position_bins(runs, _MOST), strict=True)):
        _draw(panel, number, short_name(name), bins)
    for window in sorted({window for run in runs if (window := _marked(run))}):
        panel.axvline(window, color=GREY, linewidth=0.9, linestyle=":", zorder=1)
        panel.annotate(f"{window:,}", (window, 1), xycoords=("data", "axes fraction"), xytext=(3, -9),
                       textcoords="offset points", fontsize=7, color=GREY)  # fmt: skip
    panel.set_xlim(left=0)
    panel.set_xlabel("position in the window, in tokens", fontsize=9)
    panel.set_ylabel("bits per byte", fontsize=9)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    style_axes(panel, "y")
    for text in panel.legend(fontsize=8, frameon=False).get_texts():
        text.set(**PLAIN)
    write_notes(figure, lines)
    save_figure(figure, path)


def _draw(panel: Axes, number: int, name: str, bins: Sequence[PositionBin]) -> None:
    kept = [bin for bin in bins if bin.bits_per_byte is not None]
    middles = np.array([(bin.first + bin.last) / 2 for bin in kept])
    values = np.array([bin.bits_per_byte for bin in kept], float)
    look = line_look(number)
    panel.plot(middles, values, label=name, linewidth=1.5, markersize=3.5, linestyle=dashes(number), **look)
    halves = np.array([_half(bin) for bin in kept])
    known = ~np.isnan(halves)
    low = np.maximum(values - halves, 0.0)
    panel.fill_between(middles, low, values + halves, where=known, color=look["color"], alpha=0.15, lw=0)


def _half(bin: PositionBin) -> float:
    """Return half of the width of a bin's 95 % interval; NaN of one document."""
    if bin.stderr is None or bin.freedom is None:
        return math.nan
    return t_quantile((1 + CONFIDENCE) / 2, bin.freedom) * bin.stderr


def _marked(run: Run) -> int | None:
    """Return the window of training, if positions are past it."""
    window = _original_window(run)
    return window if window and run.stored["positions"][-1]["first"] > window else None


def _figure_notes(runs: Sequence[Run]) -> str:
    """Return what the documents, the bands and the dotted line are."""
    whole, texts = runs[0].stored["whole"], ", ".join(runs[0].manifest["documents"])
    sentences = [f"{texts}: {counted(whole['n'], 'document')}, {whole['bytes']:,} bytes."]
    if whole["n"] == 1:
        sentences.append("One document, so there are no bands.")
    else:
        sentences.append("Bands: 95 % intervals over documents, none where one document remains.")
        sentences += ["They are of each line alone; a paired comparison is sharper."] if len(runs) > 1 else []
    sentences += ["Dotted: the window of training."] if any(map(_marked, runs)) else []
    return " ".join(sentences)
