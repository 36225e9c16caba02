"""Reports of perplexity runs: finished runs → a `Report` of one run, or of several methods of context extension."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evalkit.benchmarks.perplexity.positions import PositionBin, by_position, width_of
from evalkit.benchmarks.perplexity.results import POSITION_COLUMNS, POSITIONS
from evalkit.benchmarks.results_report import LOWER_IS_BETTER, LOWER_NOTE, run_content
from evalkit.brief import counted
from evalkit.models.context import Extension
from evalkit.reporting.decimals import fixed
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.runs.batch_devices import mixture
from evalkit.runs.folder import Run

_BITS = f"bits/byte{LOWER_IS_BETTER}"
_SUMS = ("documents", "bytes", "tokens", _BITS, "± SE", "per byte", "per word", "per token")
_PLACES = 4


def perplexity_report(run: Run) -> Report:
    """Return bits per byte and perplexities by task, and bits per byte by position."""
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
    """Return a report on the same documents under several methods of context extension.

    Args:
        runs: method → its run.
    """
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


def value_text(values: Mapping[str, Any]) -> str:
    """Format bits per byte with their standard error, if known."""
    error = values["stderr"]
    return fixed(values["bits_per_byte"], _PLACES) + ("" if error is None else f" ± {fixed(error, _PLACES)}")


def position_bins(runs: Sequence[Run], most: int) -> list[list[PositionBin]]:
    """Return the bins of each run, of the same width: that of the longest window with at most so many bins."""
    tables = [run.table(POSITIONS, POSITION_COLUMNS) for run in runs]
    width = max(width_of(table, most) for table in tables)
    return [by_position(table, width) for table in tables]


def original_window(run: Run) -> int | None:
    """Return the context window that a run's model was trained on, in tokens, if known."""
    extension = run.manifest["specification"]["context_extension"]
    found: int | None = (extension or {}).get("original") or (run.manifest.get("loaded") or {}).get("window")
    return found


def _sums(values: Mapping[str, Any]) -> list[str]:
    counts = [f"{values[name]:,}" for name in ("n", "bytes", "tokens")]
    perplexities = [fixed(values[f"{unit}_perplexity"], 3) for unit in ("byte", "word", "token")]
    error = "–" if values["stderr"] is None else f"± {fixed(values['stderr'], _PLACES)}"
    return [*counts, fixed(values["bits_per_byte"], _PLACES), error, *perplexities]


def _positions(runs: Mapping[str, Run]) -> Table:
    """Return bits per byte by position: of one run with more columns, of several a column each."""
    found = position_bins(list(runs.values()), 16)
    longest = max(found, key=len)
    windows = [window for run in runs.values() if (window := original_window(run))]
    starts = {one.first: one for one in longest}
    names = [f"{one.first:,}–{one.last:,}" + "*" * bool(windows and one.first > min(windows)) for one in longest]
    if len(found) == 1:
        headers = ["positions", "documents", "tokens", _BITS, "± SE", "nats/token"]
        rows = [[name, *_bin_cells(one)] for name, one in zip(names, longest, strict=True)]
        return simple_table("positions", headers, rows)
    by_first = [{one.first: one for one in bins} for bins in found]
    rows = [
        [
            name,
            f"{starts[first].tokens:,}",
            *(fixed(own[first].bits_per_byte if first in own else None, _PLACES) for own in by_first),
        ]
        for name, first in zip(names, starts, strict=True)
    ]
    headers = ["positions", "tokens", *(f"{name}{LOWER_IS_BETTER}" for name in runs)]
    return simple_table("positions", headers, rows)


def _bin_cells(one: PositionBin) -> list[str]:
    error = "–" if one.stderr is None else f"± {fixed(one.stderr, _PLACES)}"
    value = fixed(one.bits_per_byte, _PLACES)
    return [f"{one.documents:,}", f"{one.tokens:,}", value, error, fixed(one.nats_per_token, 3)]


def _notes(run: Run, model_only: bool = False) -> Iterator[str]:
    manifest, specification, whole = run.manifest, run.manifest["specification"], run.stored["whole"]
    loaded = manifest.get("loaded") or {}
    yield f"{manifest['model']}, {specification['dtype']}, {windows_text(run)}"
    if not model_only:
        yield _extension(run)
    yield (
        "bits/byte: over all bytes of the documents, so comparable between tokenizers; ± SE: of the ratio, over "
        "documents; perplexities per byte, word and token as lm-eval's"
    )
    if whole["n"] == 1:
        yield "one document: its tokens are not independent, so there is no standard error"
    yield "position: tokens before the scored one in its window, with the prefix"
    windows = original_window(run)
    if windows and any(one["first"] > windows for one in run.stored["positions"]):
        yield f"*: past the {windows:,} tokens of the window of training"
    if loaded.get("adds_tokens"):
        yield "the tokenizer adds tokens, such as BOS, to each document; as in lm-eval they are scored too"
    yield LOWER_NOTE
    yield from mixture(manifest)


def windows_text(run: Run) -> str:
    """Describe how documents were cut."""
    window = (run.manifest.get("facts") or {}).get("window")
    stride = run.manifest["specification"]["windows"]["stride"]
    size = "" if window is None else f" of at most {window:,} tokens"
    kind = f"each after the first scores {stride:,}" if stride else "disjoint, as lm-eval's"
    return f"{counted(run.stored['whole']['windows'], 'window')}{size}, {kind}"


def _extension(run: Run) -> str:
    extension = run.manifest["specification"]["context_extension"]
    return Extension(**extension).describe() if extension else "no context extension"
