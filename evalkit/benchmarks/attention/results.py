"""Reading of a finished analysis: its printed report, and its documents for comparison."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import pandas as pd

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.groups import MASS, MEASURES, described_layers, layer_of
from evalkit.benchmarks.attention.tables import DOCUMENT, DOCUMENTS, SAMPLE, documents_of, with_values
from evalkit.benchmarks.outcomes import Comparable, Measure, run_content
from evalkit.errors import UnknownNameError, UsageError
from evalkit.escape import counted
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.runs.folder import Run
from evalkit.runs.score_table import CLUSTER
from evalkit.runs.traits import mixture
from evalkit.stats.estimates import Floats

_EQUAL = 1e-4
"""Largest difference of two measures that are shown once."""
_EVERY = "all"
_NUMBER = re.compile(r"-?\d{1,6}")


def attention_report(run: Run, rule: str | None = None, detail: bool = False) -> Report:
    """Return the measures of each layer, and of all layers in the last line; other arguments change nothing."""
    stored = run.stored
    lines = [(str(layer["layer"]), layer["measures"]) for layer in stored["layers"]] + [("all", stored["measures"])]
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
    def cell(name: str, measured: dict[str, Any] | None) -> str:
        if measured is None:
            return "–"
        return percent(measured["value"]) if MEASURES[name].in_percent else fixed(measured["value"], 2)

    rows = [[layer, *(cell(name, measures.get(name)) for name in names)] for layer, measures in lines]
    return simple_table(title, ["layer", *names], rows, ruled={len(lines) - 1})


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
    few = {name: measured["n"] for name, measured in run.stored["measures"].items() if measured["n"] < total}
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


class AttentionDocuments(Comparable):
    """Measures of the documents of an analysis."""

    checked = ("sequence",)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.groups = {"Average": tuple(run.manifest["documents"])}
        self.group_sizes = {"Average": len(run.manifest["documents"])}
        self._by_layer = lru_cache(maxsize=None)(self._read_by_layer)

    @cached_property
    def documents(self) -> pd.DataFrame:
        """One row for each document; of several continuations, `sequence` is the sum of theirs."""
        documents = documents_of(self._table)
        documents[["task", "subtask"]] = documents[["task", "subtask"]].astype(str)
        return documents.rename(columns={"cluster": CLUSTER})

    @cached_property
    def rules(self) -> Sequence[str]:
        """The measures that the run has."""
        known = set(self._table["measure"].unique())
        return tuple(name for name in MEASURES if name in known)

    def by_rule(self, rule: str) -> Floats:
        """Return [documents] values of a measure, or [documents, layers] of "MEASURE@all"."""
        name, given, layers = self._parsed(rule)
        by_layer = self._by_layer(name)
        if absent := by_layer.index[by_layer.isna().any(axis=1)].tolist():
            _, subtask, doc_id = absent[0]
            raise UsageError(
                f"run {self.run.folder.name} has no {name} of {len(absent)} documents, such as {subtask} document "
                f"{doc_id}, which is too short; compare by another measure"
            )
        values: Floats = (by_layer if given == _EVERY else by_layer[layers].mean(axis=1)).to_numpy(float)
        return values

    def measure(self, rule: str) -> Measure:
        """Return what a rule measures; neither direction is better."""
        name, given, layers = self._parsed(rule)
        info = MEASURES[name]
        averaged = "" if given else described_layers(layers, self.run.manifest["attention_layers"])
        where = f"mean over {averaged}" if averaged else "by layer" if given == _EVERY else f"layer {layers[0]}"
        words = f"{info.words}; {where}{'; in %' if info.in_percent else ''}"
        every = tuple(layers) if given == _EVERY else ()
        return Measure(words, True, rule, info.bounds, None, every, averaged=averaged)

    @cached_property
    def _table(self) -> pd.DataFrame:
        table = self.run.table(DOCUMENTS, [*DOCUMENT, "mean", "median"])
        return with_values(table[table["position"].isna()])

    def _read_by_layer(self, name: str) -> pd.DataFrame:
        """Return the values of a measure; one row for each document, as in `documents`, and one column for a layer."""
        rows = self._table[self._table["measure"] == name].astype({"task": str, "subtask": str})
        wide = rows.pivot_table(index=SAMPLE, columns="layer", values="value", aggfunc="mean", sort=False)
        by_layer = wide.reindex(pd.MultiIndex.from_frame(self.documents[SAMPLE]))
        by_layer.columns = [int(layer) for layer in by_layer.columns]
        return by_layer

    def _parsed(self, rule: str) -> tuple[str, str, list[int]]:
        """Return the measure of a rule, the layer as it is given ("all", or "" for the mean), and the layers read."""
        name, at, given = rule.partition("@")
        if name == ATTENTION:
            raise UsageError(
                f"run {self.run.folder.name} is an analysis of attention, which has several measures: name one with "
                f"--rule: {', '.join(self.rules)}; with @LAYER, such as rank@-1, for one layer, with @all for each"
            )
        if name not in self.rules:
            raise UnknownNameError(f"measure of run {self.run.folder.name}", name, self.rules)
        measured = [int(layer) for layer in self._by_layer(name).columns]
        if not at or given == _EVERY:
            return name, given, measured
        known = self.run.manifest["attention_layers"]
        layer = layer_of(int(given), known) if _NUMBER.fullmatch(given) else None
        if layer is None or layer not in measured:
            raise UsageError(
                f"--rule {rule}: run {self.run.folder.name} has {name} of layers {min(measured)} to {max(measured)}"
            )
        return name, given, [layer]
