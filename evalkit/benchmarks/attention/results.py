"""Results of an analysis: the means over heads of each document → results.json."""

from __future__ import annotations

from math import isnan
from typing import Any

import numpy as np
import pandas as pd

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.groups import MASS, MEASURES
from evalkit.benchmarks.outcomes import run_content
from evalkit.escape import counted
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.runs.batch_devices import mixture
from evalkit.runs.folder import Run
from evalkit.stats.estimates import mean


def results_of(documents: pd.DataFrame, sequences: pd.DataFrame, seconds: dict[str, float]) -> dict[str, Any]:
    """Return the content of results.json.

    A value is a mean over documents of each document's mean over heads (of a rank: median), of all measured layers or
    of one; the standard error is that over documents, clustered by their sources, with the tasks as strata.

    Args:
        documents: the table over heads, see `tables.py`.
        sequences: one row for each sequence, with its task, subtask, doc_id, tokens and truncated tokens.
        seconds: task → seconds spent on it.
    """
    whole = with_values(documents[documents["position"].isna()])
    tasks = []
    for task in sequences["task"].unique():
        rows, own = whole[whole["task"] == task], sequences[sequences["task"] == task]
        about = {
            "task": task,
            "n": len(own.drop_duplicates(["subtask", "doc_id"])),
            "truncated": int((own["truncated"] > 0).sum()),
            "tokens": int(own["tokens"].sum()),
            "seconds": round(seconds.get(task, 0.0), 3),
        }
        tasks.append(about | {"measures": _values(rows)})
    layers = [
        {"layer": int(layer), "measures": _values(whole[whole["layer"] == layer])}
        for layer in sorted(whole["layer"].unique())
    ]
    return {"tasks": tasks, "averages": [], "layers": layers, "measures": _values(whole)}


def attention_layers(run: Run) -> list[int]:
    """Return the layers with attention of a run's model, ascending."""
    return list(run.manifest["attention_layers"])


def with_values(documents: pd.DataFrame) -> pd.DataFrame:
    """Add a column `value`: the mean over heads, or the median of measures that are summarised by it."""
    medians = [name for name, info in MEASURES.items() if info.median]
    chosen = documents["mean"].where(~documents["measure"].isin(medians), documents["median"])
    return documents.assign(value=chosen)


def _values(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return measure → number of documents, mean and its standard error, in evalkit's order."""
    keys = ["measure", "task", "subtask", "doc_id", "cluster"]
    by_document = rows.groupby(keys, observed=True, sort=False)["value"].mean().reset_index()
    found = {}
    for name in by_document["measure"].unique():
        own = by_document[by_document["measure"] == name]
        clusters = own.groupby(["task", "subtask", "cluster"], observed=True, sort=False).ngroup().to_numpy()
        tasks = own.groupby("task", observed=True, sort=False).ngroup().to_numpy()
        estimate = mean(own["value"].to_numpy(np.float64), clusters, tasks)
        error = None if isnan(estimate.variance) else estimate.stderr
        found[str(name)] = {"n": len(own), "value": estimate.value, "stderr": error}
    return {name: found[name] for name in MEASURES if name in found}


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
