"""Runs of figures: the means that figures draw, and the notes below them.

In: finished analyses. Out: tables of means and deviations; labels and sentences. Documents of all tasks are pooled:
each counts once, whatever the sizes of the tasks, and with several continuations by their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.groups import MASS, MEASURES, Band, layer_of
from evalkit.benchmarks.attention.tables import DOCUMENT, DOCUMENTS, HEAD, HEADS, SAMPLE, documents_of, with_values
from evalkit.benchmarks.registry import differences
from evalkit.errors import UnknownNameError, UsageError
from evalkit.escape import printable
from evalkit.reporting.figures import short_name
from evalkit.runs.folder import Run

OVER = {"heads": "mean over heads of the mean over documents", "samples": "mean over documents of the mean over heads"}
_UNITS = {"entropy": "nats", "entropy_shifted": "nats", "distance": "tokens", "similarity": "cosine"}
_COMPARED = {"questions": "suite of the documents", "num_fewshot": "solved examples", "tagger": "tagger"}
"""Key of the specification → its name. Traits of every run are compared besides."""
_MOST_NAMED = 3
"""Most tasks that notes name."""


class AnalysedRun:
    """A finished analysis as a line or a panel of a figure, with all documents or those of some tasks.

    Tables are read on first use.

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
        """Return layers that have a measure: all of them, or the chosen ones, from -1 for the last one backwards."""
        known = sorted(int(layer) for layer in self._rows(self._heads, measure, None)["layer"].unique())
        layers: dict[int, None] = {}
        for given in chosen:
            layer = layer_of(given, self.run.manifest["attention_layers"])
            if layer is None or layer not in known:
                raise UsageError(
                    f"--layers {given}: run {self.run.folder.name} has {measure} of layers {known[0]} to {known[-1]}"
                )
            layers[layer] = None
        return list(layers) or known

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
        """Return the values of a line, see `spread_of`, by layer or by layer and position of the query."""
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
        """Return the rows of a measure, of whole sequences or by position; None: whichever the run has."""
        rows = table[table["measure"] == measure]
        if by_position is not None:
            rows = rows[rows["position"].notna() == by_position]
        if rows.empty:
            raise UsageError(self._missing(measure))
        return rows.astype({"position": "int64"}) if by_position else rows

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

    The values are those of `by_head`, whose `n` counts documents, or of `by_sample`.
    """
    grouped = values.groupby(list(keys), observed=True)
    count = grouped["n"].max() if "n" in values else grouped.size()
    return pd.DataFrame({"value": grouped["value"].mean(), "spread": grouped["value"].std(), "n": count}).reset_index()


def _position(by_position: bool) -> list[str]:
    return ["position"] if by_position else []


def of_groups(
    run: AnalysedRun, groups: Mapping[str, Sequence[str]], band: Band, layers: Sequence[int], softmax: bool
) -> pd.DataFrame:
    """Return the sums of groups of measures, of each head or of each document: layer, n, and a column for each group.

    With `softmax`, the sums of a row are replaced by their softmax.
    """
    key = ["layer", "head"] if band == "heads" else ["layer", *SAMPLE]
    first = next(iter(groups.values()))[0]
    chosen = run.layers(first, layers)
    sums: dict[str, pd.Series] = {}
    for title, measures in groups.items():
        tables = [
            run.by_head(measure) if band == "heads" else run.by_sample(measure).assign(n=1) for measure in measures
        ]
        rows = pd.concat(tables).groupby(key, observed=True)
        sums[title] = rows["value"].sum()
        count = rows["n"].max()
    wide = pd.DataFrame(sums)
    if softmax:
        powers = wide.sub(wide.max(axis=1), axis=0).map(math.exp)
        wide = powers.div(powers.sum(axis=1), axis=0)
    if band == "samples":
        count = count.groupby(level="layer").transform("size")
    wide = wide.assign(n=count).reset_index()
    return wide[wide["layer"].isin(chosen)]


def share_above(first: AnalysedRun, other: AnalysedRun, measure: str, layers: Sequence[int]) -> pd.DataFrame:
    """Return the share of documents with a larger value than in the first run, and its standard error, by layer."""
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


def unit_of(measure: str) -> str:
    """Return the unit of a measure's values, or what they are."""
    info = MEASURES[measure]
    return "%" if info.in_percent else _UNITS.get(measure, "weight" if info.group in ("bos", MASS, "sink") else measure)


def label_of(measure: str) -> str:
    """Return a measure's name with its unit."""
    unit = unit_of(measure)
    return measure if unit == measure else f"{measure}, {unit}"


def line_words(band: Band) -> str:
    """Return what a line and its band are."""
    over = "heads" if band == "heads" else "documents"
    return f"Line: {OVER[band]}; band: ± 1 standard deviation over {over}"


def described(measures: Sequence[str]) -> str:
    """Return the descriptions of measures."""
    return "; ".join(f"{measure}: {MEASURES[measure].words}" for measure in measures)


def described_bins(measures: Sequence[str], tables: Sequence[pd.DataFrame]) -> str:
    """Return the descriptions of measures by position, and how many documents the bins have."""
    # The rest of a description is about whole sequences
    about = "; ".join(f"{measure}: {MEASURES[measure].words.partition(',')[0]}" for measure in measures)
    bins = pd.concat(tables).groupby("position")["n"].min()
    few = f"; bins have {bins.iloc[0]:,} to {bins.iloc[-1]:,} documents" if bins.iloc[0] != bins.iloc[-1] else ""
    return f"{about}; mean over the positions 1, 2–3, 4–7, … of a document{few}"


def figure_notes(runs: Sequence[AnalysedRun], tables: Sequence[pd.DataFrame], words: str) -> str:
    """Return the notes below a figure: what its values and bands are, of what, and the differences between its runs."""
    layers = sorted({int(layer) for table in tables for layer in table["layer"].unique()})
    facts = [_layers(layers), *map(_shared, zip(*map(_facts, runs), strict=True))]
    about = f"{words}. Weights are those of the effective maps."
    return "\n".join([about, f"{', '.join(facts)}.", *_smaller_counts(runs, tables), *run_differences(runs)])


def _smaller_counts(runs: Sequence[AnalysedRun], tables: Sequence[pd.DataFrame]) -> list[str]:
    """Return a sentence for measures that apply to some documents only, such as those of sinks to 64 tokens or more."""
    counts: dict[str, int] = {}
    least = min(len(run.samples) for run in runs)
    for table in tables:
        if "n" in table and "position" not in table and (most := int(table.groupby("id")["n"].max().min())) < least:
            counts |= dict.fromkeys(table["measure"].unique(), most)
    return [
        f"{'; '.join(f'{name}: {count:,} documents, to which it applies' for name, count in counts.items())}."
    ] * bool(counts)


def run_differences(runs: Sequence[AnalysedRun]) -> list[str]:
    """Return a sentence if runs differ in what changes their numbers besides the model; compared with the first run."""
    values_of: dict[str, list[str]] = {}
    for other in runs[1:]:
        for name, mine, theirs in _differing(runs[0], other):
            values_of.setdefault(name, [mine]).append(f"{theirs} ({short_name(other.name)})")
    if not values_of:
        return []
    listed = "; ".join(
        f"{name}: {values[0]} ({short_name(runs[0].name)}), {', '.join(values[1:])}"
        for name, values in values_of.items()
    )
    return [printable(f"The runs differ in more than their models: {listed}.")]


def _layers(layers: Sequence[int]) -> str:
    if len(layers) > 2 and layers[-1] - layers[0] == len(layers) - 1:
        return f"Layers {layers[0]} to {layers[-1]} (from 0)"
    return f"Layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))} (from 0)"


def _differing(first: AnalysedRun, other: AnalysedRun) -> list[tuple[str, str, str]]:
    """Return (what, the first run's value, the other's) of each difference."""
    differing = [(a.name, a.value, b.value) for a, b in differences(first.run, other.run) if a.refused]
    mine, theirs = (run.run.manifest["specification"] for run in (first, other))
    differing += [
        (words, _shown(mine.get(key)), _shown(theirs.get(key)))
        for key, words in _COMPARED.items()
        if mine.get(key) != theirs.get(key)
    ]
    if first.tasks != other.tasks:
        differing.append(("tasks", _shown(first.tasks), _shown(other.tasks)))
    if not differing and not first.has_samples_of(other):
        counts = [f"{int(run.samples['tokens'].sum()):,} tokens" for run in (first, other)]
        differing.append(("documents", counts[0], counts[1]))
    return differing


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)


def _facts(analysed: AnalysedRun) -> tuple[str, ...]:
    """Return what notes say of one run, in a fixed order."""
    specification, tasks = analysed.run.manifest["specification"], analysed.tasks
    count = len(analysed.samples)
    listed = ", ".join(tasks) if len(tasks) <= _MOST_NAMED else f"{len(tasks)} tasks"
    read = "whole text"
    if "continuation" in specification:
        read = "gold continuation" if specification["continuation"] == "gold" else "every continuation"
    return (
        f"{count:,} document{'s' * (count > 1)} of {listed}",
        read,
        f"seed {specification['seed']}",
        f"{analysed.run.template} prompts",
        str(specification["dtype"]),
    )


def _shared(values: Sequence[str]) -> str:
    """Return a value that all runs have, or each run's in their order."""
    return values[0] if len({*values}) == 1 else " | ".join(values)
