"""Results of perplexity runs. In: the journal's rows, or finished runs. Out: tables and results.json, reports, figures.

documents.parquet   one row for each document
positions.parquet   one row for each document and bin of positions
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from evalkit.benchmarks.outcomes import Metric, average_metric, run_content
from evalkit.errors import RunError
from evalkit.escape import counted
from evalkit.longcontext.perplexity import SCALE
from evalkit.longcontext.perplexity.windows import WIDTH, position_rows
from evalkit.reporting import figures
from evalkit.reporting.decimals import fixed
from evalkit.reporting.numbers import METRICS, UNKNOWN
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.runs.folder import Run
from evalkit.runs.journal import FinishedRows
from evalkit.runs.notes import direction_mark, model_line, notes_below, notes_of_runs
from evalkit.runs.traits import extension_words
from evalkit.runs.writing import RunWriter
from evalkit.stats.estimates import CONFIDENCE, Estimate, Floats, error_of_mean, known_error, mean, t_quantile

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.generated import DocumentPlan

DOCUMENTS, POSITIONS = "documents.parquet", "positions.parquet"
DOCUMENT_COLUMNS = ("task", "document", "place", "bytes", "words", "tokens", "windows", "nats", "bits_per_byte")
POSITION_COLUMNS = ("task", "document", "position", "tokens", "bytes", "nats")
_TABLE_BINS, _FIGURE_BINS = 16, 32
"""Most bins of positions in reports, and points of a line."""
_SPACES = re.compile(r"\s+")
_MOST_NATS = 700
_BITS = f"bits/byte{direction_mark(False)}"
_SUMS = ("documents", "bytes", "tokens", _BITS, "± SE", "per byte", "per word", "per token")
_WIDTH, _HEIGHT = 6.4, 3.6
"""Inches of the figure, without its notes."""


class PositionBin(NamedTuple):
    first: int
    last: int
    """Positions of the bin, both included."""
    documents: int
    tokens: int
    bytes: int
    nats: float
    bits_per_byte: float | None
    """None if the tokens have no bytes."""
    stderr: float | None
    """None of one document."""
    freedom: float | None


def finish(plan: DocumentPlan, finished: FinishedRows, writer: RunWriter) -> None:
    import pandas as pd

    documents, positions = [], []
    for task, members in plan.tasks.items():
        rows = position_rows(finished.table(task))
        sums = rows.groupby("document").agg(
            tokens=("tokens", "sum"), scored=("bytes", "sum"), windows=("window", "nunique"), nats=("nats", "sum")
        )
        about = {
            "task": task,
            "document": [document.number for document in members],
            "place": [document.place for document in members],
            "bytes": [len(document.content) for document in members],
            # As lm-eval counts them: the parts between white space, empty ones at the ends too
            "words": [len(_SPACES.split(document.text)) for document in members],
        }
        table = pd.DataFrame(about).join(sums, on="document")
        if (lacking := table["scored"] != table["bytes"]).any():
            # Happens only if lines of the journal were removed while it was read
            lost = table["place"][lacking.argmax()]
            raise RunError(f"the journal of {writer.folder} lacks a part of {lost}; delete the folder")
        table["bits_per_byte"] = table["nats"] / math.log(2) / table["bytes"]
        documents.append(table[list(DOCUMENT_COLUMNS)])
        binned = rows.groupby(["document", "position"])[["tokens", "bytes", "nats"]].sum().reset_index()
        positions.append(binned.assign(task=task)[list(POSITION_COLUMNS)])
    table, by_bin = pd.concat(documents, ignore_index=True), pd.concat(positions, ignore_index=True)
    writer.save_table(DOCUMENTS, table)
    writer.save_table(POSITIONS, by_bin)
    tasks = [
        {"task": task, **summary(rows), "seconds": round(finished.seconds.get(str(task), 0.0), 3)}
        for task, rows in table.groupby("task", sort=False)
    ]
    [bins] = position_bins([by_bin])
    writer.save_results(
        {"tasks": tasks, "averages": [], "whole": summary(table), "positions": [bin._asdict() for bin in bins]}
    )


def summary(documents: pd.DataFrame) -> dict[str, Any]:
    """Return sums over documents, lm-eval's perplexities, and the mean that `evalkit compare` compares."""
    size, words, tokens, nats = (documents[name].sum() for name in ("bytes", "words", "tokens", "nats"))
    whole = _bits_per_byte(documents)
    return {
        "n": len(documents),
        "bytes": int(size),
        "words": int(words),
        "tokens": int(tokens),
        "windows": int(documents["windows"].sum()),
        "nats": float(nats),
        **SCALE.stored(whole.value, known_error(whole.stderr)),
        "byte_perplexity": math.exp(nats / size),
        # None beyond the range of floats, as for the one "word" of a text without spaces
        "word_perplexity": math.exp(nats / words) if nats / words < _MOST_NATS else None,
        "token_perplexity": math.exp(nats / tokens) if nats / tokens < _MOST_NATS else None,
        "document_bits_per_byte": float(documents["bits_per_byte"].mean()),
        "document_stderr": error_of_mean(documents["bits_per_byte"].to_numpy(np.float64)),
    }


def ratio(values: Floats, weights: Floats) -> Estimate:
    """Estimate the ratio of two sums over documents, [documents] each; its variance is NaN of one document.

    All is NaN where the weights are 0.
    """
    total = float(weights.sum())
    if not total:
        return Estimate(math.nan, math.nan, math.nan)
    value = float(values.sum()) / total
    residuals = mean((values - value * weights) * len(values) / total)
    return Estimate(value, residuals.variance, residuals.freedom)


def _bits_per_byte(documents: pd.DataFrame) -> Estimate:
    return ratio(documents["nats"].to_numpy(float) / math.log(2), documents["bytes"].to_numpy(float))


def position_bins(tables: Sequence[pd.DataFrame], most: int = _TABLE_BINS) -> list[list[PositionBin]]:
    """Return the bins of all documents of each table of positions.

    All have the same width: `WIDTH` times a power of two, so that the longest window has at most `most` bins.
    """
    width = WIDTH
    while max(table["position"].max() for table in tables) > most * width:
        width *= 2
    return [
        [_bin(int(number) * width + 1, width, documents) for number, documents in _by_bin(table, width)]
        for table in tables
    ]


def _by_bin(table: pd.DataFrame, width: int) -> Any:
    """Return the sums over each document's tokens, grouped by the number of their bin."""
    keys = [((table["position"] - 1) // width).rename("bin"), table["task"], table["document"]]
    return table.groupby(keys)[["tokens", "bytes", "nats"]].sum().groupby(level="bin")


def _bin(first: int, width: int, documents: pd.DataFrame) -> PositionBin:
    tokens, size, nats = documents["tokens"].sum(), documents["bytes"].sum(), documents["nats"].sum()
    bits = _bits_per_byte(documents)
    numbers = _known(bits.value), known_error(bits.stderr), _known(bits.freedom)
    return PositionBin(first, first + width - 1, len(documents), int(tokens), int(size), float(nats), *numbers)


def _known(number: float) -> float | None:
    return None if math.isnan(number) else number


def headline(run: Run, rule: str | None = None) -> tuple[Metric, str]:
    """Return bits per byte over all documents."""
    whole = run.stored["whole"]
    shown = METRICS.with_error(whole["value"], whole["stderr"])
    return average_metric({"name": "Average"} | whole), f"{shown} bits per byte"


def perplexity_report(run: Run, rule: str | None = None, detail: bool = False) -> Report:
    lines, ruled = [(task["task"], task) for task in run.stored["tasks"]], set[int]()
    if len(lines) > 1:
        ruled = {len(lines)}
        lines.append(("all", run.stored["whole"]))
    rows = [_sums(name, values) for name, values in lines]
    tables = (simple_table("perplexity", ["task", *_SUMS], rows, ruled=ruled), _positions({"": run}))
    records = [{"task": name} | dict(values) for name, values in lines]
    notes = notes_below(run.manifest, _lines(run), [False])
    return Report(tables, notes=notes, content=run_content(run), records=records)


def methods_report(runs: Mapping[str, Run]) -> Report:
    """Return a report on the same documents under several methods of context extension, each with its run."""
    rows = [_sums(name, run.stored["whole"]) for name, run in runs.items()]
    tables = (simple_table("methods", ["method", *_SUMS], rows), _positions(runs))
    records = [{"method": name, "folder": str(run.folder)} | dict(run.stored["whole"]) for name, run in runs.items()]
    notes = (
        *_lines(next(iter(runs.values()))),
        "± SE: of each method alone; evalkit compare pairs two of these runs by document",
        *(f"{name}: {extension_words(run.manifest['specification'])}" for name, run in runs.items()),
        *(f"{name}: {run.folder}" for name, run in runs.items()),
        *notes_of_runs(((name, run.manifest) for name, run in runs.items()), [False]),
    )
    content = {"methods": [{"method": name} | run_content(run) for name, run in runs.items()]}
    return Report(tables, notes=notes, content=content, records=records)


def _sums(name: str, values: Mapping[str, Any]) -> list[str]:
    counts = [f"{values[count]:,}" for count in ("n", "bytes", "tokens")]
    perplexities = [fixed(values[f"{unit}_perplexity"], 3) for unit in ("byte", "word", "token")]
    return [name, *counts, *METRICS.columns(values["value"], values["stderr"]), *perplexities]


def _positions(runs: Mapping[str, Run]) -> Table:
    """Return bits per byte by position: of one run with more columns, of several a column each."""
    by_run = position_bins([run.table(POSITIONS) for run in runs.values()])
    longest = max(by_run, key=len)
    trained = min((window for run in runs.values() if (window := _trained_window(run))), default=math.inf)
    rows = [[f"{bin.first:,}–{bin.last:,}" + "*" * (bin.first > trained)] for bin in longest]
    if len(runs) == 1:
        headers = ["positions", "documents", "tokens", _BITS, "± SE", "nats/token"]
        for row, bin in zip(rows, longest, strict=True):
            value = METRICS.columns(bin.bits_per_byte, bin.stderr)
            row += [f"{bin.documents:,}", f"{bin.tokens:,}", *value, fixed(bin.nats / bin.tokens, 3)]
    else:
        headers = ["positions", "tokens", *(name + direction_mark(False) for name in runs)]
        values = [{bin.first: METRICS.value(bin.bits_per_byte) for bin in bins} for bins in by_run]
        for row, bin in zip(rows, longest, strict=True):
            row += [f"{bin.tokens:,}", *(of_run.get(bin.first, UNKNOWN) for of_run in values)]
    return simple_table("positions", headers, rows)


def _lines(run: Run) -> Iterator[str]:
    manifest, specification, whole = run.manifest, run.manifest["specification"], run.stored["whole"]
    window, stride = (manifest.get("facts") or {}).get("window"), specification["windows"]["stride"]
    size = "" if window is None else f" of at most {window:,} tokens"
    kind = f"each after the first scores {stride:,}" if stride else "disjoint, as lm-eval's"
    yield model_line(run, f"{counted(whole['windows'], 'window')}{size}", kind)
    yield (
        "bits/byte: over all bytes of the documents, so comparable between tokenizers; ± SE: of the ratio, over "
        "documents; perplexities per byte, word and token as lm-eval's"
    )
    if whole["n"] == 1:
        yield "one document: its tokens are not independent, so there is no standard error"
    yield "position: tokens before the scored one in its window, with the prefix"
    if trained := _exceeded_window(run):
        yield f"*: past the {trained:,} tokens of the window of training"
    if (manifest.get("loaded") or {}).get("adds_tokens"):  # of a run before scoring version 4
        yield "the tokenizer adds tokens, such as BOS, to each document; as in lm-eval they are scored too"


def _trained_window(run: Run) -> int | None:
    """Return the context window that a run's model was trained on, in tokens, if known."""
    extension = run.manifest["specification"]["context_extension"]
    window: int | None = (extension or {}).get("original") or (run.manifest.get("loaded") or {}).get("window")
    return window


def _exceeded_window(run: Run) -> int | None:
    window = _trained_window(run)
    return window if window and run.stored["positions"][-1]["first"] > window else None


def run_figures(runs: Sequence[Run], names: Sequence[str], models: Sequence[str]) -> list[figures.RunFigure]:
    """Return a figure for each group of runs on the same documents; their order is that of colours."""
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        specification = run.manifest["specification"]
        groups.setdefault(json.dumps([specification["documents"], specification["limit"]]), []).append(index)
    drawn = []
    for indices in groups.values():
        members, named = [runs[index] for index in indices], [names[index] for index in indices]
        name = f"bits-per-byte-{members[0].manifest['id']}" if len(groups) > 1 else "bits-per-byte"
        words = f"Bits per byte by position in the context window: {', '.join(named)}."
        drawn.append(figures.RunFigure(name, words, partial(draw_positions, members, named)))
    return drawn


def draw_positions(runs: Sequence[Run], names: Sequence[str], path: Path) -> None:
    """Draw bits per byte by position into a .png, .pdf or .svg file, a line with a 95 % band for each run."""
    import pandas as pd

    lines = figures.wrapped(_figure_notes(runs), _WIDTH)
    figure = figures.new_figure(_WIDTH, _HEIGHT + figures.notes_height(lines))
    panel = figure.subplots()
    by_run = position_bins([run.table(POSITIONS) for run in runs], _FIGURE_BINS)
    for number, (name, bins) in enumerate(zip(names, by_run, strict=True)):
        kept = pd.DataFrame(bins).astype(float).dropna(subset="bits_per_byte")
        middles, values = (kept["first"] + kept["last"]) / 2, kept["bits_per_byte"]
        # NaN of one document
        halves = kept["stderr"] * kept["freedom"].map(partial(t_quantile, (1 + CONFIDENCE) / 2))
        style: dict[str, Any] = {"linewidth": 1.5, "markersize": 3.5} | figures.line_look(number)
        panel.plot(middles, values, label=figures.short_name(name), **style)
        band: dict[str, Any] = {"where": ~np.isnan(halves), "color": style["color"], "alpha": 0.15, "lw": 0}
        panel.fill_between(middles, np.maximum(values - halves, 0.0), values + halves, **band)
    for window in sorted({window for run in runs if (window := _exceeded_window(run))}):
        panel.axvline(window, color=figures.GREY, linewidth=0.9, linestyle=":", zorder=1)
        panel.annotate(f"{window:,}", (window, 1), xycoords=("data", "axes fraction"), xytext=(3, -9),
                       textcoords="offset points", fontsize=7, color=figures.GREY)  # fmt: skip
    panel.set_xlim(left=0)
    panel.set_xlabel("position in the window, in tokens", fontsize=9)
    panel.set_ylabel("bits per byte", fontsize=9)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figures.style_axes(panel, "y")
    for text in panel.legend(fontsize=8, frameon=False).get_texts():
        text.set(**figures.PLAIN)
    figures.write_notes(figure, lines)
    figures.save_figure(figure, path)


def _figure_notes(runs: Sequence[Run]) -> str:
    whole, texts = runs[0].stored["whole"], ", ".join(runs[0].manifest["documents"])
    sentences = [f"{texts}: {counted(whole['n'], 'document')}, {whole['bytes']:,} bytes."]
    if whole["n"] == 1:
        sentences.append("One document, so there are no bands.")
    else:
        sentences.append("Bands: 95 % intervals over documents, none where one document remains.")
        sentences += ["They are of each line alone; a paired comparison is sharper."] if len(runs) > 1 else []
    sentences += ["Dotted: the window of training."] if any(map(_exceeded_window, runs)) else []
    return " ".join(sentences)
