"""The score table: one row for each (task, document, choice).

Code that needs a model writes this table; code that decides, compares or prints only reads it, without torch. An
outcome is right or wrong under a rule (`rules.py`), or continuous (`continuous.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from evalkit.data.requests import is_macro

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.stats.estimates import Codes, Floats

Segment = Literal["special", "instruction", "context", "continuation", "end"]
SEGMENTS: tuple[str, ...] = get_args(Segment)
"""All segments, in the order of the score table's columns."""
SPECIAL, INSTRUCTION, CONTEXT, CONTINUATION, END = range(len(SEGMENTS))
"""Codes of the segments: their indices."""

PROMPT = "prompt"
"""Column of a table of several prompts (`--vary`): the name of the prompt. The run's own prompt comes first."""
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
    greedy: float | None = None
    """1 if every token of the continuation is the argmax, 0 if not; None for a document with choices."""


COLUMNS = (*ScoreRow._fields, CLUSTER)
"""Columns of the score table."""

OPTIONAL = {"greedy": float("nan")}
"""Columns that tables of earlier runs lack, with their values."""

UNCOUNTED = (*(f"n_{segment}" for segment in SEGMENTS), "truncated", "straddles")
"""Columns of token counts, which are unknown (NaN) in imported logs."""


def sources_of(documents: pd.DataFrame) -> tuple[Codes | None, Codes | None]:
    """Return [n] numbers of the documents' sources and of their subjects, as `stats.estimates.mean` takes them.

    None where no source has two documents, and where there is one subject. Sources are numbered within subjects.
    """
    import numpy as np

    subjects, names = documents["subtask"].factorize()
    alone = CLUSTER not in documents or (documents[CLUSTER] == documents["doc_id"]).all()
    sources = None if alone else documents.groupby(["subtask", CLUSTER], sort=False).ngroup()
    clusters = None if sources is None else np.asarray(sources, np.int64)
    return clusters, np.asarray(subjects, np.int64) if len(names) > 1 else None


def weighted(values: Floats, documents: pd.DataFrame) -> Floats:
    """Return [..., n] values of a task's documents whose mean over them is that of the task.

    They are the values themselves, except where each subject counts the same (`is_macro`): with n documents in s
    subjects, those of a subject with m documents are multiplied by n / (s m). The stratified error of the mean is then
    that of the mean over subjects, too.
    """
    if not is_macro(str(documents["task"].iloc[0])):
        return values
    subjects = documents["subtask"]
    sizes = subjects.map(subjects.value_counts()).to_numpy(float)
    return values * (len(subjects) / (subjects.nunique() * sizes))


def score_table(rows: Sequence[ScoreRow], clusters: Mapping[tuple[str, int], int]) -> pd.DataFrame:
    """Build the score table in the order of the rows; `clusters`: (subtask, document) → cluster, by default its own."""
    import pandas as pd

    table = pd.DataFrame(rows, columns=list(ScoreRow._fields))
    table[CLUSTER] = [clusters.get((row.subtask, row.doc_id), row.doc_id) for row in rows]
    numbers = [column for column in COLUMNS if column.startswith("ll_") or column in OPTIONAL]
    return table[list(COLUMNS)].astype(dict.fromkeys(numbers, "float64"))


def uncounted(table: pd.DataFrame) -> pd.DataFrame:
    """Return a score table without token counts: those of an imported log are not known."""
    return table.assign(**dict.fromkeys(UNCOUNTED, float("nan")))


def unsized(table: pd.DataFrame, tasks: Collection[str]) -> pd.DataFrame:
    """Return a score table without the lengths of some tasks' options: not every log says what precedes an option."""
    unknown = table["task"].isin(tasks)
    sizes = ("chars", "bytes")
    return table.assign(**{name: table[name].mask(unknown) for name in sizes}) if unknown.any() else table


def why_unsized(table: pd.DataFrame) -> str | None:
    """Return, as the object of "needs", the lengths of answer options that a table lacks; None if it has all."""
    unknown = table["bytes"].isna()
    if not unknown.any():
        return None
    tasks = ", ".join(table["task"][unknown].unique())
    return f"the options' lengths, which the log of {tasks} lacks; import it with its results_<time>.json beside it"
