"""Rows of an analysis. In: the measures of a sequence, layer by layer. Out: an Arrow table for the journal."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from evalkit.benchmarks.attention.documents import AnalysedSequence
from evalkit.runs.columns import schema_of

Values = Mapping[tuple[str, int | None], NDArray[np.floating]]
"""(measure, first position of its bin, or None) → [heads] values."""


FINISHED = ""
"""Measure of a row that every sequence has, also one that no measure applies to; not in the final tables."""


class AttentionRow(NamedTuple):
    """A measure of one head on one sequence."""

    subtask: str
    doc_id: int
    choice: int
    cluster: int
    """`doc_id` of the subtask's first document with the same source."""
    sequence: int
    """CRC-32 of the token ids: runs with another tokenizer have another one."""
    tokens: int
    """Length of the sequence."""
    truncated: int
    """Context tokens truncated to fit the window."""
    layer: int
    head: int
    measure: str
    position: int | None
    """First position of the queries' bin; None for the whole sequence."""
    value: float


def rows_of(found: Iterable[tuple[AnalysedSequence, Mapping[int, Values]]]) -> pa.Table:
    """Return the rows of some sequences.

    Args:
        found: sequences, and layer → its measures.
    """
    found = list(found)
    tables = [_layer(sequence, 0, {(FINISHED, None): np.zeros(1)}) for sequence, _ in found]
    tables += [
        _layer(sequence, layer, values) for sequence, by_layer in found for layer, values in by_layer.items() if values
    ]
    return pa.concat_tables(tables)


def _layer(sequence: AnalysedSequence, layer: int, values: Values) -> pa.Table:
    names, positions = zip(*values, strict=True)
    # Rounded as in the final table: the journal's compression halves
    table = np.stack([np.asarray(one, np.float32) for one in values.values()]).astype(np.float64)
    measures, heads = table.shape
    count = measures * heads
    columns = {
        "subtask": pa.repeat(sequence.subtask, count),
        "doc_id": pa.repeat(pa.scalar(sequence.doc_id, pa.int64()), count),
        "choice": pa.repeat(pa.scalar(sequence.choice, pa.int64()), count),
        "cluster": pa.repeat(pa.scalar(sequence.cluster, pa.int64()), count),
        "sequence": pa.repeat(pa.scalar(zlib.crc32(sequence.tokens.tobytes()), pa.int64()), count),
        "tokens": pa.repeat(pa.scalar(len(sequence.tokens), pa.int64()), count),
        "truncated": pa.repeat(pa.scalar(sequence.truncated, pa.int64()), count),
        "layer": pa.repeat(pa.scalar(layer, pa.int64()), count),
        "head": pa.array(np.tile(np.arange(heads), measures)),
        "measure": pa.array(names).take(pa.array(np.repeat(np.arange(measures), heads))),
        "position": pa.array(positions, pa.int64()).take(pa.array(np.repeat(np.arange(measures), heads))),
        "value": pa.array(table.reshape(-1)),
    }
    return pa.Table.from_arrays([columns[name] for name in AttentionRow._fields], schema=schema_of(AttentionRow))
