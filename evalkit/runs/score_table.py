"""The score table: one row for each (task, document, choice).

In: `ScoreRow`s and clusters. Out: a DataFrame. Code that needs a model writes this table; code that decides, compares
or prints only reads it, without torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    import pandas as pd

Segment = Literal["special", "instruction", "context", "continuation", "end"]
"""Kind of a segment."""
SEGMENTS: tuple[str, ...] = get_args(Segment)
"""All segments, in the order of the score table's columns."""

CLUSTER = "cluster"
"""Last column of the table: the id of the first document of the subtask with the same source. It comes from the
documents and not from scoring, so it is not in the journal."""


class ScoreRow(NamedTuple):
    """Scores of one choice.

    Log-likelihoods are natural logarithms, None where the template does not score the segment. Token counts exclude the
    first token of a sequence (BOS), which nothing precedes. In the table of an imported log, token counts are
    NaN, and so are the options' lengths where the log does not say them."""

    task: str
    subtask: str
    doc_id: int
    choice: int
    choices: int
    """Number of choices of the document."""
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
    """Log-likelihood of the continuation without the context, but with BOS, instruction and markers; None unless
    requested (rule `pmi`)."""
    chars: int
    """Characters of the answer option, as lm-eval counts them (without the space before it)."""
    bytes: int
    """UTF-8 bytes of the answer option."""
    truncated: int
    """Context tokens truncated on the left to fit the context window."""
    straddles: int
    """Tokens that span a boundary between segments."""


UNCOUNTED = (*(f"n_{segment}" for segment in SEGMENTS), "truncated", "straddles")
"""Columns of token counts, which are unknown (NaN) in imported logs."""


SIZES = ("chars", "bytes")
"""Columns of the options' lengths, which are unknown (NaN) in logs that do not say what precedes an option."""


def uncounted(table: pd.DataFrame) -> pd.DataFrame:
    """Return a score table without token counts: those of an imported log are not known."""
    return table.assign(**dict.fromkeys(UNCOUNTED, float("nan")))


def unsized(table: pd.DataFrame, tasks: Collection[str]) -> pd.DataFrame:
    """Return a score table without the lengths of the answer options of some tasks, which are not known."""
    unknown = table["task"].isin(tasks)
    return table.assign(**{name: table[name].mask(unknown) for name in SIZES}) if unknown.any() else table


def why_unsized(table: pd.DataFrame) -> str | None:
    """Return, as the object of "needs", the lengths of answer options that a table lacks; None if it has all."""
    unknown = table["bytes"].isna()
    if not unknown.any():
        return None
    tasks = ", ".join(table["task"][unknown].unique())
    return (
        f"the lengths of the answer options, and the imported log of {tasks} lacks target_delimiter, which is in its "
        "results file; import it again with results_<time>.json beside it"
    )


def score_table(rows: Sequence[ScoreRow], clusters: Mapping[tuple[str, int], int]) -> pd.DataFrame:
    """Build the score table in its stored form, in the order of the rows.

    `clusters`: (subtask, document) → cluster; a document without an entry is its own cluster.
    """
    import pandas as pd

    table = pd.DataFrame(rows, columns=list(ScoreRow._fields))
    likelihoods = [column for column in ScoreRow._fields if column.startswith("ll_")]
    table = table.astype(dict.fromkeys(likelihoods, "float64"))
    table[CLUSTER] = [clusters.get((row.subtask, row.doc_id), row.doc_id) for row in rows]
    return table
