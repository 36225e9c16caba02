"""Numbers of figures: means and deviations of finished analyses, and how their runs differ.

Documents of all tasks are pooled: each counts once, whatever the sizes of the tasks, and with several continuations by
their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.groups import MEASURES, Band, layer_of
from evalkit.benchmarks.attention.tables import DOCUMENT, DOCUMENTS, HEAD, HEADS, SAMPLE, documents_of, with_values
from evalkit.benchmarks.registry import differences
from evalkit.errors import UnknownNameError, UsageError
from evalkit.escape import printable
from evalkit.reporting.figures import short_name
from evalkit.runs.folder import Run

_COMPARED = {"questions": "suite of the documents", "num_fewshot": "solved examples", "tagger": "tagger"}
"""Key of the specification → its name. Traits of every run are compared besides."""


class AnalysedRun:
    """A finished analysis as a line or a panel of a figure, with all documents or those of some tasks.

    Tables are read on first use.

    Raises:
        UsageError: the run is of another benchmark.
        UnknownNameError: it has no such task.
    """

    def __init__(self, name: str, run: Run, tasks: Sequence[str] = ()) -> None:
        self._label = f"run {run.folder.name}"
        if run.kind != ATTENTION:
            raise UsageError(f"{self._label} is of benchmark {run.kind}; figures are of runs of evalkit attention")
        known = tuple(run.manifest["documents"])
        for task in tasks:
            if task not in known:
                raise UnknownNameError(f"task of {self._label}", task, known)
        self.name, self.run = name, run
        self.tasks = tuple(task for task in known if not tasks or task in tasks)

    @cached_property
    def samples(self) -> pd.DataFrame:
        """One row for each document, see `documents_of`, in the order of their keys."""
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
        """Return whether the run has a measure."""
        return bool((self._heads["measure"] == measure).any())

    def layers(self, measure: str, chosen: Sequence[int]) -> list[int]:
        """Return layers that have a measure: all of them, or the chosen ones, from -1 for the last one backwards."""
        known = sorted(int(layer) for layer in self._rows(self._heads, measure)["layer"].unique())
        layers: dict[int, None] = {}
        for number in chosen:
            layer = layer_of(number, self.run.manifest["attention_layers"])
            if layer is None or layer not in known:
                raise UsageError(f"--layers {number}: {self._label} has {measure} of layers {known[0]} to {known[-1]}")
            layers[layer] = None
        return list(layers) or known

    def values(self, measure: str, band: Band, position: Sequence[str] = ()) -> pd.DataFrame:
        """Return the values of a measure by layer: of each head or of each document.

        Args:
            measure: the measure.
            band: "heads": layer, head, value (mean over documents) and n (documents); "samples": layer, `SAMPLE` and
                value (mean over heads, of a rank the median).
            position: ("position",) for values by position of the query, which is a further column.
        """
        if band == "samples":
            rows = with_values(self._rows(self._documents, measure, bool(position)))
            return rows.groupby(["layer", *position, *SAMPLE], observed=True)["value"].mean().reset_index()
        rows = self._rows(self._heads, measure, bool(position))
        rows = rows.assign(value=rows["mean"] * rows["n"])
        sums = rows.groupby(["layer", *position, "head"], observed=True)[["value", "n"]].sum()
        return sums.assign(value=sums["value"] / sums["n"]).reset_index()

    def line(self, measure: str, band: Band, layers: Sequence[int] = (), position: Sequence[str] = ()) -> pd.DataFrame:
        """Return the values of a line, see `spread_of`, by layer or by layer and position of the query."""
        values = self.values(measure, band, position)
        chosen = values[values["layer"].isin(self.layers(measure, layers))]
        return self.labelled(spread_of(chosen, ["layer", *position]), measure)

    def sums(self, groups: Mapping[str, Sequence[str]], band: Band, softmax: bool) -> pd.DataFrame:
        """Return the sums of groups of measures, of each head or document: layer, n, and a column for each group.

        With `softmax`, the sums of a row are replaced by their softmax.
        """
        key = ["layer", "head"] if band == "heads" else ["layer", *SAMPLE]
        sums: dict[str, pd.Series] = {}
        for title, measures in groups.items():
            rows = pd.concat([self.values(measure, band) for measure in measures]).groupby(key, observed=True)
            sums[title] = rows["value"].sum()
        wide = pd.DataFrame(sums)
        if softmax:
            powers = wide.sub(wide.max(axis=1), axis=0).map(math.exp)
            wide = powers.div(powers.sum(axis=1), axis=0)
        count = rows["n"].max() if band == "heads" else rows["value"].size().groupby(level="layer").transform("size")
        return wide.assign(n=count).reset_index()

    def labelled(self, values: pd.DataFrame, measure: str) -> pd.DataFrame:
        """Return a table with the run's name and id, and the measure, in its first columns."""
        about = {"run": self.name, "id": self.run.manifest["id"], "measure": measure}
        return pd.DataFrame(about, values.index).join(values)

    def _rows(self, table: pd.DataFrame, measure: str, by_position: bool | None = None) -> pd.DataFrame:
        """Return the rows of a measure, of whole sequences or by position; None: whichever the run has."""
        rows = table[table["measure"] == measure]
        if by_position is not None:
            rows = rows[rows["position"].notna() == by_position]
        if not rows.empty:
            return rows.astype({"position": "int64"}) if by_position else rows
        group = MEASURES[measure].group
        if group not in self.run.manifest["specification"]["measures"]:
            raise UsageError(f"{self._label} has no {measure}; compute it with evalkit attention … --measures {group}")
        raise UsageError(
            f"{self._label} has no {measure} of any document, though it was requested: its documents are too short, "
            "have no BOS, or its layers have one head"
        )


def spread_of(values: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return the mean of each group, its standard deviation (`spread`; NaN of one value), and the documents behind it.

    The values are those of `AnalysedRun.values`; `n` of heads counts documents.
    """
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
    mine, theirs = (run.values(measure, "samples") for run in (first, other))
    pairs = mine.merge(theirs, on=["layer", *SAMPLE], suffixes=("", "_other"))
    pairs = pairs[pairs["layer"].isin({*first.layers(measure, layers)} & {*other.layers(measure, layers)})]
    if pairs.empty:
        raise UsageError(
            f"{both} {measure} of no layer in common; analyse the same layers with evalkit attention … --layers"
        )
    above = pairs.assign(above=pairs["value_other"] > pairs["value"]).groupby("layer")["above"]
    share, n = above.mean(), above.size()
    return pd.DataFrame({"value": share, "spread": np.sqrt(share * (1 - share) / n), "n": n}).reset_index()


def run_differences(runs: Sequence[AnalysedRun]) -> list[str]:
    """Return a sentence if runs differ in what changes their numbers besides the model; compared with the first run."""
    first, *others = runs
    values_of: dict[str, list[str]] = {}
    for other in others:
        for name, mine, theirs in _differing(first, other):
            values_of.setdefault(name, [mine]).append(f"{theirs} ({short_name(other.name)})")
    if not values_of:
        return []
    listed = "; ".join(
        f"{name}: {mine} ({short_name(first.name)}), {', '.join(theirs)}" for name, (mine, *theirs) in values_of.items()
    )
    return [printable(f"The runs differ in more than their models: {listed}.")]


def _differing(first: AnalysedRun, other: AnalysedRun) -> list[tuple[str, str, str]]:
    """Return (what, the first run's value, the other's) of each difference."""
    differing = [(a.name, a.value, b.value) for a, b in differences(first.run, other.run) if a.refused]
    mine, theirs = (run.run.manifest["specification"] for run in (first, other))
    compared = [(words, mine.get(key), theirs.get(key)) for key, words in _COMPARED.items()]
    compared.append(("tasks", first.tasks, other.tasks))
    differing += [(words, _shown(a), _shown(b)) for words, a, b in compared if a != b]
    if not differing and not first.samples.equals(other.samples):
        counts = [f"{int(run.samples['tokens'].sum()):,} tokens" for run in (first, other)]
        differing.append(("documents", counts[0], counts[1]))
    return differing


def _shown(value: Any) -> str:
    return "none" if value is None else " ".join(value) if isinstance(value, tuple) else str(value)
