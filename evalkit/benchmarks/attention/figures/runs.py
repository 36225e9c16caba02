"""Runs of figures, and the means that figures draw. In: finished analyses. Out: tables of means and deviations.

Documents of all tasks are pooled: each counts once, whatever the sizes of the tasks, and with several continuations by
their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import pandas as pd

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.figures.kinds import Band
from evalkit.benchmarks.attention.groups import MEASURES, layer_of
from evalkit.benchmarks.attention.results import attention_layers, with_values
from evalkit.benchmarks.attention.tables import DOCUMENT, DOCUMENTS, HEAD, HEADS, SAMPLE, documents_of
from evalkit.errors import UnknownNameError, UsageError
from evalkit.runs.folder import Run


class AnalysedRun:
    """A finished analysis as a line or a panel of a figure. Tables are read on first use.

    Args:
        name: in legends; unique.
        run: of the benchmark of attention.
        tasks: tasks whose documents are drawn; empty: all.

    Raises:
        UsageError: the run is of another benchmark.
        UnknownNameError: it has no such task.
    """

    def __init__(self, name: str, run: Run, tasks: Sequence[str] = ()) -> None:
        if run.kind != ATTENTION:
            raise UsageError(
                f"run {run.folder.name} is of benchmark {run.kind}; figures are of runs of evalkit attention"
            )
        known = tuple(run.manifest["documents"])
        for task in tasks:
            if task not in known:
                raise UnknownNameError(f"task of run {run.folder.name}", task, known)
        self.name, self.run = name, run
        self.tasks = tuple(task for task in known if not tasks or task in tasks)

    @cached_property
    def samples(self) -> pd.DataFrame:
        """One row for each document, see `documents_of`."""
        return documents_of(self._documents)

    def has(self, measure: str) -> bool:
        """Return whether the run has a measure."""
        return bool((self._heads["measure"] == measure).any())

    def has_samples_of(self, other: AnalysedRun) -> bool:
        """Return whether another run has the same documents, with the same tokens."""
        mine, theirs = (run.samples.astype({"task": str, "subtask": str}) for run in (self, other))
        return mine.sort_values(SAMPLE, ignore_index=True).equals(theirs.sort_values(SAMPLE, ignore_index=True))

    def layers(self, measure: str, chosen: Sequence[int]) -> list[int]:
        """Return layers that have a measure: all of them, or the chosen ones, from -1 for the last one backwards.

        Raises:
            UsageError: the measure is missing, or a layer is.
        """
        known = sorted(int(layer) for layer in self._rows(self._heads, measure, None)["layer"].unique())
        every = attention_layers(self.run)
        found = {given: layer_of(given, every) for given in chosen}
        for given, layer in found.items():
            if layer not in known:
                raise UsageError(
                    f"--layers {given}: run {self.run.folder.name} has {measure} of layers {known[0]} to {known[-1]}"
                )
        return list(dict.fromkeys(layer for layer in found.values() if layer is not None)) or known

    def by_head(self, measure: str, by_position: bool = False) -> pd.DataFrame:
        """Return the means over documents: layer, head, value, n, and position if by position."""
        rows = self._rows(self._heads, measure, by_position)
        keys = ["layer", *_position(by_position), "head"]
        sums = rows.assign(value=rows["mean"] * rows["n"]).groupby(keys, observed=True)[["value", "n"]].sum()
        return sums.assign(value=sums["value"] / sums["n"]).reset_index()

    def by_sample(self, measure: str, by_position: bool = False) -> pd.DataFrame:
        """Return the mean over heads, of a rank the median, of each document: layer, `SAMPLE`, value, and position."""
        rows = with_values(self._rows(self._documents, measure, by_position))
        keys = ["layer", *_position(by_position), *SAMPLE]
        return rows.groupby(keys, observed=True)["value"].mean().reset_index()

    def line(self, measure: str, band: Band, layers: Sequence[int] = (), by_position: bool = False) -> pd.DataFrame:
        """Return the values of a line, see `spread_of`, by layer or by layer and position.

        Args:
            measure: its name.
            band: what the deviation is over.
            layers: see `layers`.
            by_position: whether by position of the query too.
        """
        values = self.by_head(measure, by_position) if band == "heads" else self.by_sample(measure, by_position)
        chosen = values[values["layer"].isin(self.layers(measure, layers))]
        return self.labelled(spread_of(chosen, ["layer", *_position(by_position)]), measure)

    def labelled(self, values: pd.DataFrame, measure: str) -> pd.DataFrame:
        """Return a table with the run's name and id, and the measure, in its first columns."""
        return pd.DataFrame({"run": self.name, "id": self.run.manifest["id"], "measure": measure}, values.index).join(
            values
        )

    @cached_property
    def _heads(self) -> pd.DataFrame:
        return self._of_tasks(self.run.table(HEADS, [*HEAD, "n", "mean"]))

    @cached_property
    def _documents(self) -> pd.DataFrame:
        return self._of_tasks(self.run.table(DOCUMENTS, [*DOCUMENT, "mean", "median"]))

    def _of_tasks(self, table: pd.DataFrame) -> pd.DataFrame:
        return table[table["task"].isin(self.tasks)]

    def _rows(self, table: pd.DataFrame, measure: str, by_position: bool | None) -> pd.DataFrame:
        """Return the rows of a measure, of whole sequences or by position; None: whichever the run has.

        Raises:
            UsageError: there are none.
        """
        found = table[table["measure"] == measure]
        if by_position is not None:
            found = found[found["position"].notna() == by_position]
        if found.empty:
            raise UsageError(self._missing(measure))
        return found.astype({"position": "int64"}) if by_position else found

    def _missing(self, measure: str) -> str:
        specification, group = self.run.manifest["specification"], MEASURES[measure].group
        if group in specification["measures"]:
            return (
                f"run {self.run.folder.name} has no {measure} of any document, though it was requested: its documents "
                "are too short, have no BOS, or its layers have one head"
            )
        return f"run {self.run.folder.name} has no {measure}; compute it with evalkit attention … --measures {group}"


def spread_of(values: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return the mean of each group, its standard deviation (`spread`; NaN of one value), and the documents behind it.

    Args:
        values: from `by_head`, whose `n` counts documents, or `by_sample`.
        keys: columns of the groups.
    """
    grouped = values.groupby(list(keys), observed=True)
    count = grouped["n"].max() if "n" in values else grouped.size()
    found = {"value": grouped["value"].mean(), "spread": grouped["value"].std(), "n": count}
    return pd.DataFrame(found).reset_index()


def _position(by_position: bool) -> list[str]:
    return ["position"] if by_position else []


def of_groups(
    run: AnalysedRun, groups: Mapping[str, Sequence[str]], band: Band, layers: Sequence[int], softmax: bool
) -> pd.DataFrame:
    """Return the sums of groups of measures, of each head or of each document: layer, n, and a column for each group.

    Args:
        run: has all of these measures.
        groups: title → names of measures.
        band: whether heads or documents are the rows.
        layers: see `AnalysedRun.layers`.
        softmax: whether the sums of a row are replaced by their softmax.
    """
    key = ["layer", "head"] if band == "heads" else ["layer", *SAMPLE]
    first = next(iter(groups.values()))[0]
    chosen = run.layers(first, layers)
    sums: dict[str, pd.Series] = {}
    for title, measures in groups.items():
        tables = [run.by_head(one) if band == "heads" else run.by_sample(one).assign(n=1) for one in measures]
        rows = pd.concat(tables).groupby(key, observed=True)
        sums[title] = rows["value"].sum()
        count = rows["n"].max()
    wide = pd.DataFrame(sums)
    if softmax:
        powers = wide.sub(wide.max(axis=1), axis=0).map(math.exp)
        wide = powers.div(powers.sum(axis=1), axis=0)
    if band == "samples":
        count = count.groupby(level="layer").transform("size")
    found = wide.assign(n=count).reset_index()
    return found[found["layer"].isin(chosen)]


def share_above(first: AnalysedRun, other: AnalysedRun, measure: str, layers: Sequence[int]) -> pd.DataFrame:
    """Return the share of documents with a larger value than in the first run, and its standard error, by layer.

    Raises:
        UsageError: the runs have other documents, of other lengths, or no layer in common.
    """
    if not first.has_samples_of(other):
        raise UsageError(
            f"runs {first.run.folder.name} and {other.run.folder.name} have other documents, or other "
            "tokens, so their ranks cannot be paired; analyse the same sample with the same tokenizer"
        )
    pairs = first.by_sample(measure).merge(other.by_sample(measure), on=["layer", *SAMPLE], suffixes=("", "_other"))
    chosen = {*first.layers(measure, layers)} & {*other.layers(measure, layers)}
    pairs = pairs[pairs["layer"].isin(chosen)]
    if pairs.empty:
        raise UsageError(
            f"runs {first.run.folder.name} and {other.run.folder.name} have {measure} of no layer in common; analyse "
            "the same layers with evalkit attention … --layers"
        )
    above = pairs.assign(above=pairs["value_other"] > pairs["value"]).groupby("layer")["above"]
    share, n = above.mean(), above.size()
    return pd.DataFrame({"value": share, "spread": np.sqrt(share * (1 - share) / n), "n": n}).reset_index()
