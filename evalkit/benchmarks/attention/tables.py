"""Tables of an analysis: the journal's rows → one row for each head, and means over heads and over documents.

attention.parquet             task, subtask, doc_id, choice, layer, head, measure, position, value
attention_documents.parquet   the same over heads, with the sequence's length: mean and median
attention_heads.parquet       the same over documents: n and mean
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.groups import MEASURES, described_layers, layer_of
from evalkit.benchmarks.attention.results import attention_layers, with_values
from evalkit.benchmarks.attention.rows import FINISHED, AttentionRow
from evalkit.benchmarks.outcomes import Comparable, Measure
from evalkit.errors import ScoringError, UnknownNameError, UsageError
from evalkit.runs.folder import Run
from evalkit.runs.score_table import CLUSTER
from evalkit.stats.estimates import Floats

if TYPE_CHECKING:
    from evalkit.runs.finished_rows import FinishedRows
    from evalkit.runs.writing import RunWriter


ALL, DOCUMENTS, HEADS = "attention.parquet", "attention_documents.parquet", "attention_heads.parquet"
SAMPLE = ["task", "subtask", "doc_id"]
"""Key columns of a document."""
DOCUMENT = [
    "task",
    "subtask",
    "doc_id",
    "choice",
    "cluster",
    "sequence",
    "tokens",
    "truncated",
    "layer",
    "measure",
    "position",
]
"""Key columns of the table over heads."""
HEAD = ["task", "layer", "head", "measure", "position"]
"""Key columns of the table over documents."""
_SEQUENCE = ["subtask", "doc_id", "choice", "tokens", "truncated"]
_NUMBERS = {
    "layer": "int16",
    "head": "int16",
    "choice": "int16",
    "doc_id": "int32",
    "cluster": "int32",
    "tokens": "int32",
    "truncated": "int32",
    "position": "Int32",
}
_WORD = pa.dictionary(pa.int32(), pa.string())
_SCHEMA = pa.schema(
    [
        ("task", _WORD),
        ("subtask", _WORD),
        ("doc_id", pa.int32()),
        ("choice", pa.int16()),
        ("layer", pa.int16()),
        ("head", pa.int16()),
        ("measure", _WORD),
        ("position", pa.int32()),
        ("value", pa.float32()),
    ]
)


def write_tables(
    subtasks: Mapping[str, Sequence[str]], finished: FinishedRows, writer: RunWriter
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Write the three tables; return the one over heads, and one row for each sequence.

    Args:
        subtasks: task → its subtasks.
        finished: the journal's rows.
        writer: writes into the run folder.
    """
    words = {"task": list(subtasks), "subtask": [*dict.fromkeys(chain(*subtasks.values()))], "measure": [*MEASURES]}
    kinds = _NUMBERS | {name: pd.CategoricalDtype(known) for name, known in words.items()}
    documents: list[pd.DataFrame] = []
    heads: list[pd.DataFrame] = []
    sequences: list[pd.DataFrame] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for task in subtasks:
            sums: list[pd.DataFrame] = []
            for every in finished.batches(task):
                marks = pc.equal(every["measure"], FINISHED)
                sequences.append(every.filter(marks).select(_SEQUENCE).to_pandas().assign(task=task))
                batch = every.filter(pc.invert(marks))
                if not batch.num_rows:
                    continue
                rows = batch.to_pandas().assign(task=task)
                documents.append(_typed(_over_heads(rows), kinds))
                sums.append(_sums(rows))
                yield _row_batch(task, batch)
            if sums:
                heads.append(_typed(_means(sums), kinds))

    writer.save_batches(ALL, _SCHEMA, batches())
    if not documents:
        raise ScoringError(
            f"{writer.folder}: no requested measure applies to any document: bos and negative need sequences that "
            "begin with BOS, sink needs 64 tokens, similarity several heads; name others with --measures"
        )
    found = pd.concat(documents, ignore_index=True)
    writer.save_table(DOCUMENTS, found)
    writer.save_table(HEADS, pd.concat(heads, ignore_index=True))
    return found, pd.concat(sequences, ignore_index=True)


def documents_of(over_heads: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each document: its key, its cluster, and the sums of tokens and checksums of its sequences."""
    sequences = over_heads.drop_duplicates([*SAMPLE, "choice"])
    keys = [*SAMPLE, "cluster"]
    return sequences.groupby(keys, observed=True, sort=False)[["tokens", "sequence"]].sum().reset_index()


def _over_heads(rows: pd.DataFrame) -> pd.DataFrame:
    grouped = rows.groupby(DOCUMENT, sort=False, dropna=False)["value"]
    return grouped.agg(["mean", "median"]).reset_index()


def _sums(rows: pd.DataFrame) -> pd.DataFrame:
    """Return sums over documents; a document with several continuations counts once, with their mean."""
    if rows["choice"].nunique() > 1:
        keys = [*HEAD, "subtask", "doc_id"]
        rows = rows.groupby(keys, sort=False, dropna=False)["value"].mean().reset_index()
    return rows.groupby(HEAD, sort=False, dropna=False)["value"].agg(["count", "sum"]).reset_index()


def _means(sums: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the means over documents from the sums of batches."""
    whole = pd.concat(sums, ignore_index=True).groupby(HEAD, sort=False, dropna=False)[["count", "sum"]].sum()
    found = whole.assign(n=whole["count"], mean=whole["sum"] / whole["count"])[["n", "mean"]].reset_index()
    return found.sort_values(["task", "measure", "position", "layer", "head"], ignore_index=True)


def _typed(table: pd.DataFrame, kinds: Mapping[str, Any]) -> pd.DataFrame:
    """Return a table with small types, so that millions of rows fit into memory."""
    return table.astype({name: kind for name, kind in kinds.items() if name in table})


def _row_batch(task: str, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert rows of the journal to those of the table."""
    columns: dict[str, Any] = {name: batch[name] for name in AttentionRow._fields}
    columns["task"] = pa.repeat(task, batch.num_rows)
    arrays = [
        (columns[field.name].dictionary_encode() if field.type == _WORD else columns[field.name]).cast(field.type)
        for field in _SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


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
