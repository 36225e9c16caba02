"""The score table: one row for each (task, document, choice), and how a batch's results become rows of it.

Everything that needs a model stands before this table and writes it; everything that decides, compares or prints
only reads it. No torch here: tables are read without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalkit.prompts import CONTINUATION, EncodedQuestion, TokenSequence
from evalkit.templates import SEGMENTS


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


def question_rows(
    encoded: EncodedQuestion,
    scores: list[NDArray[np.float32]],
    unconditional: list[NDArray[np.float32]],
    scored: frozenset[int],
) -> Iterator[ScoreRow]:
    """The table's rows of one question.

    Args:
        encoded: the question.
        scores: for each choice, [length] log-probability of each token; NaN where not scored.
        unconditional: the same for the sequences without context; empty where not asked for.
        scored: indices of the segments that the template scores.
    """
    question = encoded.question
    for choice, sequence in enumerate(encoded.sequences):
        sums, counts = _segment_sums(sequence, scores[choice], scored)
        alone = None
        if unconditional:
            alone = _segment_sums(encoded.unconditional[choice], unconditional[choice], frozenset({CONTINUATION}))
        option = question.choices[choice]
        place = (question.task, question.subtask, question.doc_id, choice, len(encoded.sequences), question.gold)
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
