"""Report of an analysis: a finished run → a `Report` with a line for each layer."""

from __future__ import annotations

from typing import Any

from evalkit.analysis.groups import MASS, MEASURES
from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.results_report import run_content
from evalkit.brief import counted
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.runs.batch_devices import mixture
from evalkit.runs.folder import Run

_EQUAL = 1e-4
"""Largest difference of two measures that are shown once."""


def attention_report(run: Run) -> Report:
    """Return the measures of each layer, and of all layers in the last line."""
    stored = run.stored
    lines = [(str(one["layer"]), one["measures"]) for one in stored["layers"]] + [("all", stored["measures"])]
    names = [name for name in stored["measures"] if not _repeats(name, lines)]
    masses = [name for name in names if MEASURES[name].group == MASS]
    split = {ATTENTION: [name for name in names if name not in masses], MASS: masses}
    tables = tuple(_table(title, members, lines) for title, members in split.items() if members)
    records = [
        {"layer": layer, "measure": name, **value} for layer, measures in lines for name, value in measures.items()
    ]
    return Report(tables, notes=tuple(_notes(run, names)), content=run_content(run), records=records)


def _repeats(name: str, lines: list[tuple[str, Any]]) -> bool:
    """Return whether a measure equals that of |weights| in every line: no weight is negative."""
    other = MEASURES[name].unsigned
    pairs = [(measures.get(name), measures.get(other)) for _, measures in lines]
    return bool(other) and all(a == b or (a and b and abs(a["value"] - b["value"]) < _EQUAL) for a, b in pairs)


def _table(title: str, names: list[str], lines: list[tuple[str, Any]]) -> Table:
    rows = [[layer, *(_cell(name, measures.get(name)) for name in names)] for layer, measures in lines]
    return simple_table(title, ["layer", *names], rows, ruled={len(lines) - 1})


def _cell(name: str, found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    return percent(found["value"]) if MEASURES[name].in_percent else fixed(found["value"], 2)


def _notes(run: Run, names: list[str]) -> list[str]:
    manifest, specification = run.manifest, run.manifest["specification"]
    tasks = run.stored["tasks"]
    hidden = [name for name in run.stored["measures"] if name not in names]
    total = sum(task["n"] for task in tasks)
    documents = f"{total:,} document{'s' * (total != 1)} of {counted(len(tasks), 'task')}"
    read = f"{specification['continuation']} continuation" if "continuation" in specification else "whole text"
    notes = [
        f"{manifest['model']}, {specification['dtype']}, {run.template} prompts, {documents}, seed "
        f"{specification['seed']}, {read}",
        "means over documents of the mean over heads (rank: median); shares in %",
        *([f"left out, equal without negative weights: {', '.join(hidden)}"] if hidden else []),
        *(f"{name}: {MEASURES[name].words}" for name in names),
    ]
    few = {name: found["n"] for name, found in run.stored["measures"].items() if found["n"] < total}
    notes += [f"{', '.join(n for n in few if few[n] == count)}: of {counted(count, 'document')}, to which they apply"
              for count in dict.fromkeys(few.values())]  # fmt: skip
    measured = {MEASURES[name].group for name in run.stored["measures"]}
    if absent := [group for group in specification["measures"] if group not in measured]:
        notes.append(f"apply to no document: {', '.join(absent)}")
    if "tagger" in specification:
        notes.append(f"categories are of English words, by {specification['tagger']}")
    if cut := sum(task["truncated"] for task in tasks):
        notes.append(f"{counted(cut, 'document')} truncated to the context window")
    return [*notes, *mixture(manifest)]
