"""Documents of a finished analysis, for paired comparison: a measure of each document, by layer or over layers.

A rule is a measure ("rank": the mean over layers), a measure of a layer ("rank@-1": of the last one), or of every layer
("rank@all").
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache

import pandas as pd

from evalkit.analysis.groups import MEASURES
from evalkit.analysis.layer_numbers import described_layers, layer_of
from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.results import attention_layers, with_values
from evalkit.benchmarks.attention.tables import DOCUMENT, DOCUMENTS, SAMPLE, documents_of
from evalkit.benchmarks.outcomes import Comparable, Measure
from evalkit.errors import UnknownNameError, UsageError
from evalkit.runs.folder import Run
from evalkit.scores.table import CLUSTER
from evalkit.stats.estimates import Floats

_EVERY = "all"
_NUMBER = re.compile(r"-?\d{1,6}")


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
        found = documents_of(self._table)
        found[["task", "subtask"]] = found[["task", "subtask"]].astype(str)
        return found.rename(columns={"cluster": CLUSTER})

    @cached_property
    def rules(self) -> Sequence[str]:
        """The measures that the run has."""
        known = set(self._table["measure"].unique())
        return tuple(name for name in MEASURES if name in known)

    def by_rule(self, rule: str) -> Floats:
        """Return [documents] values of a measure, or [documents, layers] of "MEASURE@all"."""
        name, layer = self._parsed(rule)
        by_layer = self._by_layer(name)
        if absent := by_layer.index[by_layer.isna().any(axis=1)].tolist():
            _, subtask, doc_id = absent[0]
            raise UsageError(
                f"run {self.run.folder.name} has no {name} of {len(absent)} documents, such as {subtask} document "
                f"{doc_id}, which is too short; compare by another measure"
            )
        if layer == _EVERY:
            every: Floats = by_layer.to_numpy(float)
            return every
        found: Floats = (by_layer.mean(axis=1) if layer is None else by_layer[layer]).to_numpy(float)
        return found

    def measure(self, rule: str) -> Measure:
        """Return what a rule measures; neither direction is better."""
        name, layer = self._parsed(rule)
        info = MEASURES[name]
        averaged = described_layers(list(map(int, self._by_layer(name).columns)), self._layers) if layer is None else ""
        where = f"mean over {averaged}" if averaged else "by layer" if layer == _EVERY else f"layer {layer}"
        unit = "; in %" if info.in_percent else ""
        layers = tuple(map(int, self._by_layer(name).columns)) if layer == _EVERY else ()
        return Measure(f"{info.words}; {where}{unit}", True, rule, info.bounds, None, layers, averaged=averaged)

    @cached_property
    def _table(self) -> pd.DataFrame:
        table = self.run.table(DOCUMENTS, [*DOCUMENT, "mean", "median"])
        return with_values(table[table["position"].isna()])

    def _read_by_layer(self, name: str) -> pd.DataFrame:
        """Return the values of a measure; one row for each document, as in `documents`, and one column for a layer."""
        rows = self._table[self._table["measure"] == name].astype({"task": str, "subtask": str})
        wide = rows.pivot_table(index=SAMPLE, columns="layer", values="value", aggfunc="mean", sort=False)
        found = wide.reindex(pd.MultiIndex.from_frame(self.documents[SAMPLE]))
        found.columns = [int(layer) for layer in found.columns]
        return found

    @property
    def _layers(self) -> list[int]:
        """The model's layers with attention."""
        return attention_layers(self.run)

    def _parsed(self, rule: str) -> tuple[str, int | str | None]:
        """Return the measure and the layer of a rule: a number, "all", or None for the mean over layers.

        Raises:
            UsageError: no measure is named, or the run does not have that layer.
            UnknownNameError: the run does not have that measure.
        """
        name, at, given = rule.partition("@")
        if name == ATTENTION:
            raise UsageError(
                f"run {self.run.folder.name} is an analysis of attention, which has several measures: name one with "
                f"--rule: {', '.join(self.rules)}; with @LAYER, such as rank@-1, for one layer, with @all for each"
            )
        if name not in self.rules:
            raise UnknownNameError(f"measure of run {self.run.folder.name}", name, self.rules)
        if not at or given == _EVERY:
            return name, given or None
        layers = [int(layer) for layer in self._by_layer(name).columns]
        layer = layer_of(int(given), self._layers) if _NUMBER.fullmatch(given) else None
        if layer not in layers:
            raise UsageError(
                f"--rule {rule}: run {self.run.folder.name} has {name} of layers {min(layers)} to {max(layers)}"
            )
        return name, layer
