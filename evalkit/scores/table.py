"""The score table: one row for each (task, document, choice).

Everything that needs a model stands before this table and writes it; everything that decides, compares or prints
only reads it. No torch here: tables are read without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    import pandas as pd

Segment = Literal["special", "instruction", "context", "continuation", "end"]
"""A kind of segment."""
SEGMENTS: tuple[str, ...] = get_args(Segment)
"""All of them, in the order of the score table's columns."""

CLUSTER = "cluster"
"""The table's last column: the first document of the subtask that this one shares a source with. It comes from the
documents and not from scoring, so no journal holds it, and tables written before it was kept are made anew from
theirs."""


class ScoreRow(NamedTuple):
    """One choice's scores. Log-likelihoods are natural logarithms; None where the template does not score that
    segment. Token counts are of tokens that something precedes, so BOS is in none of them."""

    task: str
    subtask: str
    doc_id: int
    choice: int
    choices: int
    """How many choices the document has."""
    gold: int
    ll_special: float | None
    ll_instruction: float | None
    ll_context: float | None
    ll_continuation: float | None
    ll_end: float | None
    n_special: int
    n_instruction: int
    n_context: int
    n_continuation: int
    n_end: int
    ll_unconditional: float | None
    """Log-likelihood of the continuation without the context, where that was asked for."""
    chars: int
    """Characters of the answer option, as lm-eval counts them (without the space before it)."""
    bytes: int
    """UTF-8 bytes of the answer option."""
    truncated: int
    """Context tokens cut on the left to fit the model's window."""
    straddles: int
    """Tokens that reach over a boundary of segments."""


def score_table(rows: Sequence[ScoreRow], clusters: Mapping[tuple[str, int], int]) -> pd.DataFrame:
    """The score table as it is stored.

    Args:
        rows: in the table's order.
        clusters: of each (subtask, document); a document that is not in it is its own.
    """
    import pandas as pd

    table = pd.DataFrame(rows, columns=list(ScoreRow._fields))
    likelihoods = [column for column in ScoreRow._fields if column.startswith("ll_")]
    table = table.astype(dict.fromkeys(likelihoods, "float64"))
    table[CLUSTER] = [clusters.get((row.subtask, row.doc_id), row.doc_id) for row in rows]
    return table
