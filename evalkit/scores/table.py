"""The score table: one row for each (task, document, choice), and how a batch's results become rows of it.

Everything that needs a model stands before this table and writes it; everything that decides, compares or prints
only reads it. No torch here: tables are read without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.multiple_choice.prompts import CONTINUATION, EncodedQuestion, TokenSequence
from evalkit.benchmarks.multiple_choice.templates import SEGMENTS
from evalkit.scoring.pack import Item

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.scoring.forward import Scores

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


def question_item(index: int, encoded: EncodedQuestion, scored: frozenset[int]) -> Item:
    """What is to be scored of a question: its conditional sequences, then the unconditional ones.

    Args:
        index: the question's number, by which its scores are known again.
        encoded: the question.
        scored: indices into `SEGMENTS` of the segments to score. Of unconditional sequences only the continuation
            is scored, whatever this says.
    """
    wanted = [np.isin(sequence.segments, list(scored)) for sequence in encoded.sequences]
    wanted += [sequence.segments == CONTINUATION for sequence in encoded.unconditional]
    tokens = tuple(sequence.tokens for sequence in encoded.sequences + encoded.unconditional)
    return Item(index, encoded.question.label, encoded.question.subtask, tokens, tuple(wanted))


def question_rows(encoded: EncodedQuestion, scores: Sequence[Scores], scored: frozenset[int]) -> Iterator[ScoreRow]:
    """The table's rows of one question.

    Args:
        encoded: the question.
        scores: of its item's sequences.
        scored: indices of the segments that the template scores.
    """
    question = encoded.question
    count = len(encoded.sequences)
    for choice, sequence in enumerate(encoded.sequences):
        sums, counts = _segment_sums(sequence, scores[choice].logprobs, scored)
        alone = None
        if encoded.unconditional:
            unconditional = scores[count + choice].logprobs
            alone = _segment_sums(encoded.unconditional[choice], unconditional, frozenset({CONTINUATION}))
        option = question.choices[choice]
        place = (question.task, question.subtask, question.doc_id, choice, count, question.gold)
        sizes = (len(option), len(option.encode("utf-8")), sequence.truncated, sequence.straddles)
        yield ScoreRow._make((*place, *sums, *counts, alone[0][CONTINUATION] if alone else None, *sizes))


def _segment_sums(
    sequence: TokenSequence, scores: NDArray[np.float32], scored: frozenset[int]
) -> tuple[list[float | None], list[int]]:
    """(sum of log-probabilities, number of tokens) of each segment; the first token has nothing to predict it."""
    segments = sequence.segments[1:]
    wanted = np.isin(segments, list(scored))
    # float64, so that the sum of thousands of float32 values loses nothing
    weights = np.where(wanted, scores[1:].astype(np.float64), 0.0)
    sums = np.bincount(segments, weights=weights, minlength=len(SEGMENTS))
    counts = np.bincount(segments, minlength=len(SEGMENTS))
    return [float(sums[s]) if s in scored else None for s in range(len(SEGMENTS))], counts.tolist()
