"""Encoded questions: the token sequences of questions, with the segment of each token.

In: sequences of choices, one question after the other. Out: `EncodedQuestions`, which holds those of a whole task in
flat arrays: the 56,168 sequences of MMLU take 45 MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.scores.table import SEGMENTS
from evalkit.scoring.sequences import SequenceArrays, offsets

SPECIAL, INSTRUCTION, CONTEXT, CONTINUATION, END = range(len(SEGMENTS))

_JOINED = 1024
"""Questions whose arrays are joined at a time."""


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
        spans, start = [], 0
        for code, run in groupby(self.segments.tolist()):
            end = start + len(list(run))
            spans.append((SEGMENTS[code], start, end))
            start = end
        return spans


@dataclass(frozen=True)
class EncodedQuestion:
    """A question with the sequences of its choices."""

    question: Question
    sequences: tuple[TokenSequence, ...]
    unconditional: tuple[TokenSequence, ...] = ()
    """The choices without the context, if a rule needs them (`pmi`)."""

    def without_text(self) -> EncodedQuestion:
        """Return it without prompts and tokens, as the rows of the score table need it."""
        question = replace(self.question, contexts=(), continuations=(), gaps=(), doc={})
        sequences = tuple(replace(one, tokens=_NO_TOKENS) for one in self.sequences)
        alone = tuple(replace(one, tokens=_NO_TOKENS) for one in self.unconditional)
        return EncodedQuestion(question, sequences, alone)


_NO_TOKENS = np.zeros(0, np.int32)


class EncodedQuestions(Sequence[EncodedQuestion]):
    """Encoded questions in flat arrays.

    Args:
        questions: the questions.
        arrays: the sequences of each: those of its choices, then the unconditional ones.
        segments: [tokens] index into `SEGMENTS` of each token's segment.
        cuts: [sequences, 2] number of truncated and of straddling tokens.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        arrays: SequenceArrays,
        segments: NDArray[np.int8],
        cuts: NDArray[np.int32],
    ) -> None:
        self.questions = questions
        self.arrays = arrays
        self.segments = segments
        self.cuts = cuts

    @classmethod
    def of(cls, questions: Sequence[Question], encoded: Iterable[EncodedQuestion]) -> EncodedQuestions:
        """Join the sequences of questions, which are in the same order."""
        parts = list(map(_joined, _in_parts(encoded))) or [_NOTHING]
        tokens, segments, lengths, counts, cuts = (np.concatenate(part) for part in zip(*parts, strict=True))
        return cls(questions, SequenceArrays(tokens, offsets(lengths), offsets(counts)), segments, cuts)

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        question, first = self.questions[index], self.arrays.first
        sequences = [self._sequence(number) for number in range(int(first[index]), int(first[index + 1]))]
        count = len(question.contexts)
        return EncodedQuestion(question, tuple(sequences[:count]), tuple(sequences[count:]))

    def _sequence(self, number: int) -> TokenSequence:
        part = slice(int(self.arrays.starts[number]), int(self.arrays.starts[number + 1]))
        truncated, straddles = self.cuts[number].tolist()
        return TokenSequence(self.arrays.tokens[part], self.segments[part], truncated, straddles)


def _in_parts(encoded: Iterable[EncodedQuestion]) -> Iterator[list[EncodedQuestion]]:
    rest = iter(encoded)
    while part := list(islice(rest, _JOINED)):
        yield part


_NOTHING: tuple[NDArray[Any], ...] = (
    np.empty(0, np.int32),
    np.empty(0, np.int8),
    np.empty(0, np.int64),
    np.empty(0, np.int64),
    np.empty((0, 2), np.int32),
)
"""What `_joined` returns for no question."""


def _joined(part: Sequence[EncodedQuestion]) -> tuple[NDArray[Any], ...]:
    """Return tokens, segments, lengths of sequences, sequences of each question, and cuts."""
    sequences = [one for question in part for one in question.sequences + question.unconditional]
    return (
        np.concatenate([one.tokens for one in sequences]),
        np.concatenate([one.segments for one in sequences]),
        np.array([len(one.tokens) for one in sequences]),
        np.array([len(one.sequences) + len(one.unconditional) for one in part]),
        np.array([(one.truncated, one.straddles) for one in sequences], np.int32),
    )
