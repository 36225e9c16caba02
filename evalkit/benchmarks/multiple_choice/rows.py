"""Documents as what the engine scores, and its scores as rows of the score table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.multiple_choice.prompts import CONTINUATION, EncodedQuestion, TokenSequence
from evalkit.scores.table import SEGMENTS, ScoreRow
from evalkit.scoring.pack import SequenceSet

if TYPE_CHECKING:
    from evalkit.scoring.forward import Scores


def question_item(index: int, encoded: EncodedQuestion, scored: frozenset[int]) -> SequenceSet:
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
    return SequenceSet(index, encoded.question.label, encoded.question.subtask, tokens, tuple(wanted))


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
