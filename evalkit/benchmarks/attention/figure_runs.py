"""Numbers of figures: means and deviations of finished analyses, and how their runs differ.

Documents of all tasks are pooled: each counts once, whatever the sizes of the tasks, and with several continuations by
their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pandas as pd

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.groups import MEASURES, Band, layer_of
from evalkit.benchmarks.attention.results import DOCUMENT, DOCUMENTS, HEAD, HEADS, SAMPLE, documents_of, with_values
from evalkit.benchmarks.differences import differences
from evalkit.errors import UnknownNameError, UsageError
from evalkit.escape import printable
from evalkit.reporting.figures import short_name
from evalkit.runs.folder import Run

_COMPARED = {"questions": "suite of the documents", "num_fewshot": "solved examples", "tagger": "tagger"}
"""Key of the specification → its name. Traits of every run are compared besides."""


class AnalysedRun:
    """A finished analysis as a line or a panel of a figure, with all documents or those of some tasks.

    Tables are read on first use. Raises a `UsageError` for a run of another benchmark, or for a task that it lacks.
    """

    def __init__(self, name: str, run: Run, tasks: Sequence[str] = ()) -> None:
        self._label = f"run {run.folder.name}"
        if run.kind != ATTENTION:
            raise UsageError(f"{self._label} is of benchmark {run.kind}; figures are of runs of evalkit attention")
        known = tuple(run.manifest["documents"])
        if unknown := [task for task in tasks if task not in known]:
            raise UnknownNameError(f"task of {self._label}", unknown[0], known)
        self.name, self.run = name, run
        self.tasks = tuple(task for task in known if not tasks or task in tasks)

    @cached_property
    def samples(self) -> pd.DataFrame:
        """One row for each document, as `documents_of`, in the order of their keys."""
        samples = documents_of(self._documents).astype({"task": str, "subtask": str})
        return samples.sort_values(SAMPLE, ignore_index=True)

    @cached_property
    def _documents(self) -> pd.DataFrame:
        table = self.run.table(DOCUMENTS, [*DOCUMENT, "mean", "median"])
        return table[table["task"].isin(self.tasks)]

    @cached_property
    def _heads(self) -> pd.DataFrame:
        table = self.run.table(HEADS, [*HEAD, "n", "mean"])
        return table[table["task"].isin(self.tasks)]

    def has(self, measure: str) -> bool:
        return bool((self._heads["measure"] == measure).any())

    def layers(self, measure: str, chosen: Sequence[int] = ()) -> list[int]:
        """Layers that have a measure: all, or the chosen ones, from -1 for the last one backwards."""
        known = sorted(int(layer) for layer in self._rows(self._heads, measure)["layer"].unique())
        meant = {number: layer_of(number, self.run.manifest["attention_layers"]) for number in chosen}
        if unknown := [number for number, layer in meant.items() if layer not in known]:
            raise UsageError(f"--layers {unknown[0]}: {self._label} has {measure} of layers {known[0]} to {known[-1]}")
        return [*dict.fromkeys(layer for layer in meant.values() if layer is not None)] or known

    def values(
        self, measure: str, band: Band, layers: Sequence[int] = (), keys: Sequence[str] = ("layer",)
    ) -> pd.DataFrame:
        """Return the values of a measure in the chosen layers, by layer or by layer and position of the query.

        With the band "heads" of each head: head, value (mean over documents) and n (documents). With "samples" of each
        document: `SAMPLE` and value (mean over heads, of a rank the median).
        """
        rows = self._rows(self._documents if band == "samples" else self._heads, measure, "position" in keys)
        rows = rows[rows["layer"].isin(self.layers(measure, layers))]
        if band == "samples":
            return with_values(rows).groupby([*keys, *SAMPLE], observed=True)["value"].mean().reset_index()
        rows = rows.assign(value=rows["mean"] * rows["n"])
        sums = rows.groupby([*keys, "head"], observed=True)[["value", "n"]].sum()
        return sums.assign(value=sums["value"] / sums["n"]).reset_index()

    def line(
        self, measure: str, band: Band, layers: Sequence[int] = (), keys: Sequence[str] = ("layer",)
    ) -> pd.DataFrame:
        return self.labelled(spread_of(self.values(measure, band, layers, keys), keys), measure)

    def labelled(self, values: pd.DataFrame, measure: str) -> pd.DataFrame:
        """Return a table with the run's name and id, and the measure, in its first columns."""
        about = {"run": self.name, "id": self.run.manifest["id"], "measure": measure}
        return pd.DataFrame(about, values.index).join(values)

    def _rows(self, table: pd.DataFrame, measure: str, by_position: bool | None = None) -> pd.DataFrame:
        rows = table[table["measure"] == measure]
        if by_position is not None:
            rows = rows[rows["position"].notna() == by_position]
            rows = rows.astype({"position": "int64"} if by_position else {})
        if rows.empty:
            group = MEASURES[measure].group
            raise UsageError(
                f"{self._label} has no {measure}; compute it with evalkit attention … --measures {group}, on documents "
                "to which it applies"
            )
        return rows


def spread_of(values: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Mean of each group of `AnalysedRun.values`, standard deviation (`spread`), and documents behind it (`n`)."""
    grouped = values.groupby(list(keys), observed=True)
    count = grouped["n"].max() if "n" in values else grouped.size()
    return pd.DataFrame({"value": grouped["value"].mean(), "spread": grouped["value"].std(), "n": count}).reset_index()


def share_above(first: AnalysedRun, other: AnalysedRun, measure: str, layers: Sequence[int]) -> pd.DataFrame:
    """Return the share of documents with a larger value than in the first run, and its standard error, by layer."""
    both = f"runs {first.run.folder.name} and {other.run.folder.name} have"
    if not first.samples.equals(other.samples):
        raise UsageError(
            f"{both} other documents, or other tokens, so their ranks cannot be paired; analyse the same sample with "
            "the same tokenizer"
        )
    mine, theirs = (run.values(measure, "samples", layers) for run in (first, other))
    pairs = mine.merge(theirs, on=["layer", *SAMPLE], suffixes=("", "_other"))
    if pairs.empty:
        raise UsageError(f"{both} {measure} of no layer in common; analyse the same with evalkit attention … --layers")
    above = pairs.assign(above=pairs["value_other"] > pairs["value"]).groupby("layer")["above"]
    share, n = above.mean(), above.size()
    return pd.DataFrame({"value": share, "spread": np.sqrt(share * (1 - share) / n), "n": n}).reset_index()


def run_differences(runs: Sequence[AnalysedRun]) -> list[str]:
    """Return a sentence if runs differ from the first one in what changes numbers, besides the model."""
    first, *others = runs
    values_of: dict[str, list[str]] = {}
    for other in others:
        for name, mine, theirs in _differing(first, other):
            values_of.setdefault(name, [f"{mine} ({short_name(first.name)})"])
            values_of[name].append(f"{theirs} ({short_name(other.name)})")
    listed = "; ".join(f"{name}: {', '.join(values)}" for name, values in values_of.items())
    return [printable(f"The runs differ in more than their models: {listed}.")] if listed else []


def _differing(first: AnalysedRun, other: AnalysedRun) -> list[tuple[str, str, str]]:
    """Return (what, the first run's value, the other's) of each difference."""
    differing = [
        (mine.name, mine.value, theirs.value) for mine, theirs in differences(first.run, other.run) if mine.refused
    ]
    specifications = [run.run.manifest["specification"] for run in (first, other)]
    for key, name in _COMPARED.items():
        mine, theirs = ("none" if about.get(key) is None else str(about[key]) for about in specifications)
        differing += [(name, mine, theirs)] if mine != theirs else []
    if first.tasks != other.tasks:
        differing.append(("tasks", " ".join(first.tasks), " ".join(other.tasks)))
    if not differing and not first.samples.equals(other.samples):
        mine, theirs = (f"{int(run.samples['tokens'].sum()):,} tokens" for run in (first, other))
        differing.append(("documents", mine, theirs))
    return differing
