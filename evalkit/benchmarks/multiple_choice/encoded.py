"""Encoded questions: the token sequences of questions, with the segment of each token.

In: sequences of choices, one question after the other. Out: `EncodedQuestions`, which holds those of a whole task in
flat arrays: the 56,168 sequences of MMLU take 60 MB; of these, what the engine scores, and from its scores the rows of
the score table.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.runs.score_table import SEGMENTS, ScoreRow
from evalkit.scoring.pack import Sequences, offsets

if TYPE_CHECKING:
    from evalkit.scoring.forward import Scores

SPECIAL, INSTRUCTION, CONTEXT, CONTINUATION, END = range(len(SEGMENTS))
_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True)
class TokenSequence:
    """The tokens of one choice with their segments."""

    tokens: NDArray[np.int32]
    """[length] token ids."""
    segments: NDArray[np.int8]
    """[length] index into `SEGMENTS` of each token's segment."""
    truncated: int = 0
    """Number of context tokens truncated on the left to fit the context window."""
    straddles: int = 0
    """Number of tokens that straddle a segment boundary."""
    characters: NDArray[np.int32] | None = None
    """[length, 2] each token's characters in the rendered text, [start, end); -1 of tokens that are added as ids. None
    unless the prompter was asked for them."""

    def spans(self) -> list[tuple[str, int, int]]:
        """Return (segment, first token, one past the last token) of each segment, in order."""
        changes = np.flatnonzero(np.diff(self.segments)) + 1
        bounds = [0, *changes.tolist(), len(self.segments)]
        return [(SEGMENTS[self.segments[start]], start, end) for start, end in pairwise(bounds)]


@dataclass(frozen=True)
class EncodedQuestion:
    """A question with the sequences of its choices."""

    question: Question
    sequences: tuple[TokenSequence, ...]
    unconditional: tuple[TokenSequence, ...] = ()
    """The choices without the context, if a rule needs them (`pmi`)."""


@dataclass(frozen=True)
class EncodedQuestions:
    """The encoded questions of a task in flat arrays."""

    sequences: Sequences
    """For the engine; an item is a question: the sequences of its choices, then the unconditional ones."""
    segments: NDArray[np.int8]
    """[tokens] index into `SEGMENTS` of each token's segment."""
    cuts: NDArray[np.int32]
    """[sequences, 2] number of truncated and of straddling tokens."""

    @classmethod
    def of(cls, encoded: Iterable[EncodedQuestion], scored: frozenset[int]) -> EncodedQuestions:
        """Join the sequences of questions.

        `scored` has the indices into `SEGMENTS` of the segments to score. In unconditional sequences only the
        continuation is scored.
        """
        of_template, of_continuation = (
            np.isin(np.arange(len(SEGMENTS)), list(codes)) for codes in (scored, [CONTINUATION])
        )
        tokens, is_scored, segments, cuts = array("i"), bytearray(), array("b"), array("i")
        lengths, counts, labels, groups = array("q"), array("q"), [], []
        for member in encoded:
            counts.append(len(member.sequences) + len(member.unconditional))
            labels.append(member.question.label)
            groups.append(member.question.subtask)
            for sequences, scores in ((member.sequences, of_template), (member.unconditional, of_continuation)):
                for sequence in sequences:
                    tokens.frombytes(sequence.tokens.tobytes())
                    is_scored += scores[sequence.segments].tobytes()
                    segments.frombytes(sequence.segments.tobytes())
                    lengths.append(len(sequence.tokens))
                    cuts.extend((sequence.truncated, sequence.straddles))
        flat = Sequences(
            np.asarray(tokens), np.frombuffer(is_scored, np.bool_), offsets(lengths), offsets(counts), labels, groups
        )
        return cls(flat, np.asarray(segments), np.asarray(cuts).reshape(-1, 2))

    def without_text(self, index: int, question: Question) -> EncodedQuestion:
        """Return a question, given by its number, without texts and tokens, as `question_rows` needs it."""
        first, end = self.sequences.first[index : index + 2].tolist()
        bounds = self.sequences.starts[first : end + 1].tolist()
        sequences = tuple(
            TokenSequence(_NO_TOKENS, self.segments[start:stop], *cuts)
            for (start, stop), cuts in zip(pairwise(bounds), self.cuts[first:end].tolist(), strict=True)
        )
        count = len(question.contexts)
        question = replace(question, contexts=(), continuations=(), gaps=(), doc={})
        return EncodedQuestion(question, sequences[:count], sequences[count:])


def question_sequences(encoded: Iterable[EncodedQuestion], scored: frozenset[int]) -> Sequences:
    """Return the sequences of questions for the engine; see `EncodedQuestions.of`."""
    return EncodedQuestions.of(encoded, scored).sequences


def question_rows(encoded: EncodedQuestion, scores: Sequence[Scores], scored: frozenset[int]) -> Iterator[ScoreRow]:
    """Yield the score table's rows of one question, one for each choice.

    Args:
        encoded: the question.
        scores: scores of the question's sequences, in order.
        scored: indices of the segments that the template scores.
    """
    question, count = encoded.question, len(encoded.sequences)
    for choice, (sequence, option) in enumerate(zip(encoded.sequences, question.choices, strict=True)):
        sums, counts = _segment_sums(sequence, scores[choice].logprobs)
        alone = None
        if encoded.unconditional:
            alone = _segment_sums(encoded.unconditional[choice], scores[count + choice].logprobs)[0][CONTINUATION]
        document = (question.task, question.subtask, question.doc_id, choice, count, question.gold)
        likelihoods = [total if code in scored else None for code, total in enumerate(sums)]
        sizes = (len(option), len(option.encode("utf-8")), sequence.truncated, sequence.straddles)
        yield ScoreRow._make((*document, *likelihoods, *counts, alone, *sizes))


def _segment_sums(sequence: TokenSequence, scores: NDArray[np.float32]) -> tuple[list[float], list[int]]:
    """Return each segment's sum of log-probabilities and number of tokens; the first token is not predicted."""
    segments = sequence.segments[1:]
    # float64: a float32 sum of thousands of values would lose precision
    sums = np.bincount(segments, weights=scores[1:].astype(np.float64), minlength=len(SEGMENTS))
    return sums.tolist(), np.bincount(segments, minlength=len(SEGMENTS)).tolist()
