"""Results of an analysis: the means over heads of each document → results.json."""

from __future__ import annotations

from math import isnan
from typing import Any

import numpy as np
import pandas as pd

from evalkit.analysis.groups import MEASURES
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
