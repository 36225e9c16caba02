"""Tables and results of an analysis. In: the journal's rows. Out: three tables, and the content of results.json.

attention.parquet             task, subtask, doc_id, choice, layer, head, measure, position, value
attention_documents.parquet   the same over heads, with the sequence's length: mean and median
attention_heads.parquet       the same over documents: n and mean
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from evalkit.benchmarks.attention.groups import FINISHED, MEASURES, AttentionRow
from evalkit.errors import RunError, ScoringError
from evalkit.stats.estimates import mean

if TYPE_CHECKING:
    from evalkit.benchmarks.attention.plan import AttentionPlan
    from evalkit.runs.journal import FinishedRows
    from evalkit.runs.writing import RunWriter


ALL, DOCUMENTS, HEADS = "attention.parquet", "attention_documents.parquet", "attention_heads.parquet"
SAMPLE = ["task", "subtask", "doc_id"]
"""Key columns of a document."""
_OF_SEQUENCE = ["choice", "cluster", "sequence", "tokens", "truncated"]
DOCUMENT = [*SAMPLE, *_OF_SEQUENCE, "layer", "measure", "position"]
"""Key columns of the table over heads."""
HEAD = ["task", "layer", "head", "measure", "position"]
"""Key columns of the table over documents."""
_SEQUENCE = ["subtask", "doc_id", "choice", "tokens", "truncated"]
_NUMBERS = {
    **dict.fromkeys(("layer", "head", "choice"), "int16"),
    **dict.fromkeys(("doc_id", "cluster", "tokens", "truncated"), "int32"),
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


def finish(plan: AttentionPlan, finished: FinishedRows, writer: RunWriter) -> None:
    """Write the tables and the results."""
    if any(key not in finished for key in plan.work):
        # Happens only if lines of the journal were removed while it was read
        raise RunError(
            f"the journal of {writer.folder} lacks some documents; delete the folder and run the command again"
        )
    documents, sequences = write_tables(plan.subtasks, finished, writer)
    writer.save_results(results_of(documents, sequences, finished.seconds))


def write_tables(
    subtasks: Mapping[str, Sequence[str]], finished: FinishedRows, writer: RunWriter
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Write the three tables of task → its subtasks; return the one over heads, and one row for each sequence."""
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
                grouped = rows.groupby(DOCUMENT, sort=False, dropna=False)["value"]
                documents.append(_typed(grouped.agg(["mean", "median"]).reset_index(), kinds))
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
    over_heads = pd.concat(documents, ignore_index=True)
    writer.save_table(DOCUMENTS, over_heads)
    writer.save_table(HEADS, pd.concat(heads, ignore_index=True))
    return over_heads, pd.concat(sequences, ignore_index=True)


def _sums(rows: pd.DataFrame) -> pd.DataFrame:
    """Return sums over documents; a document with several continuations counts once, with their mean."""
    if rows["choice"].nunique() > 1:
        keys = [*HEAD, "subtask", "doc_id"]
        rows = rows.groupby(keys, sort=False, dropna=False)["value"].mean().reset_index()
    return rows.groupby(HEAD, sort=False, dropna=False)["value"].agg(["count", "sum"]).reset_index()


def _means(sums: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the means over documents from the sums of batches."""
    whole = pd.concat(sums, ignore_index=True).groupby(HEAD, sort=False, dropna=False)[["count", "sum"]].sum()
    means = whole.assign(n=whole["count"], mean=whole["sum"] / whole["count"])[["n", "mean"]].reset_index()
    return means.sort_values(["task", "measure", "position", "layer", "head"], ignore_index=True)


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


def documents_of(over_heads: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each document: its key, its cluster, and the sums of tokens and checksums of its sequences."""
    sequences = over_heads.drop_duplicates([*SAMPLE, "choice"])
    keys = [*SAMPLE, "cluster"]
    return sequences.groupby(keys, observed=True, sort=False)[["tokens", "sequence"]].sum().reset_index()


def results_of(documents: pd.DataFrame, sequences: pd.DataFrame, seconds: dict[str, float]) -> dict[str, Any]:
    """Return the content of results.json.

    A value is a mean over documents of each document's mean over heads (of a rank: median), of all measured layers or
    of one; the standard error is that over documents, clustered by their sources, with the tasks as strata.

    Args:
        documents: the table over heads.
        sequences: from `write_tables`.
        seconds: task → seconds spent on it.
    """
    whole = with_values(documents[documents["position"].isna()])
    tasks = []
    for task in sequences["task"].unique():
        members = sequences[sequences["task"] == task]
        about = {
            "task": task,
            "n": len(members.drop_duplicates(["subtask", "doc_id"])),
            "truncated": int((members["truncated"] > 0).sum()),
            "tokens": int(members["tokens"].sum()),
            "seconds": round(seconds.get(task, 0.0), 3),
            "measures": _values(whole[whole["task"] == task]),
        }
        tasks.append(about)
    layers = [
        {"layer": int(layer), "measures": _values(whole[whole["layer"] == layer])}
        for layer in sorted(whole["layer"].unique())
    ]
    return {"tasks": tasks, "averages": [], "layers": layers, "measures": _values(whole)}


def with_values(documents: pd.DataFrame) -> pd.DataFrame:
    """Add a column `value`: the mean over heads, or the median of measures that are summarised by it."""
    medians = [name for name, info in MEASURES.items() if info.median]
    chosen = documents["mean"].where(~documents["measure"].isin(medians), documents["median"])
    return documents.assign(value=chosen)


def _values(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return measure → number of documents, mean and its standard error, in evalkit's order."""
    keys = ["measure", "task", "subtask", "doc_id", "cluster"]
    by_document = rows.groupby(keys, observed=True, sort=False)["value"].mean().reset_index()
    values = {}
    for name in by_document["measure"].unique():
        measured = by_document[by_document["measure"] == name]
        clusters = measured.groupby(["task", "subtask", "cluster"], observed=True, sort=False).ngroup().to_numpy()
        tasks = measured.groupby("task", observed=True, sort=False).ngroup().to_numpy()
        estimate = mean(measured["value"].to_numpy(np.float64), clusters, tasks)
        error = None if isnan(estimate.variance) else estimate.stderr
        values[str(name)] = {"n": len(measured), "value": estimate.value, "stderr": error}
    return {name: values[name] for name in MEASURES if name in values}
