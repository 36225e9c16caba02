"""Tables of an analysis: the journal's rows → one row for each head, and means over heads and over documents.

attention.parquet             task, subtask, doc_id, choice, layer, head, measure, position, value
attention_documents.parquet   the same over heads, with the sequence's length: mean and median
attention_heads.parquet       the same over documents: n and mean
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from evalkit.analysis.groups import MEASURES
from evalkit.benchmarks.attention.rows import FINISHED, AttentionRow
from evalkit.errors import ScoringError

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
