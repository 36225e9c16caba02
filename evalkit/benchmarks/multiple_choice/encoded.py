"""Encoded questions: the token sequences of questions, with the segment of each token.

In: sequences of choices, one question after the other. Out: `EncodedQuestions`, which holds those of a whole task in
flat arrays: the 56,168 sequences of MMLU take 45 MB; of these, what the engine scores, and from its scores the rows of
the score table.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.errors import RunError
from evalkit.runs.score_table import CLUSTER, SEGMENTS, ScoreRow
from evalkit.scoring.sequences import Places, Sequences, offsets

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from evalkit.scoring.head import Scores

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

    def without_text(self) -> EncodedQuestion:
        """Return it without prompts and tokens, as the rows of the score table need it."""
        question = replace(self.question, contexts=(), continuations=(), gaps=(), doc={})
        both = (tuple(replace(one, tokens=_NO_TOKENS) for one in part) for part in (self.sequences, self.unconditional))
        return EncodedQuestion(question, *both)


@dataclass(frozen=True)
class EncodedQuestions:
    """The encoded questions of a task in flat arrays."""

    questions: Sequence[Question]
    tokens: NDArray[np.int32]
    """[tokens] ids of all sequences; of each question those of its choices, then the unconditional ones."""
    starts: Places
    """[sequences + 1] first token of each sequence, and the end of the last."""
    first: Places
    """[questions + 1] first sequence of each question, and the end of the last."""
    segments: NDArray[np.int8]
    """[tokens] index into `SEGMENTS` of each token's segment."""
    cuts: NDArray[np.int32]
    """[sequences, 2] number of truncated and of straddling tokens."""

    @classmethod
    def of(cls, questions: Sequence[Question], encoded: Iterable[EncodedQuestion]) -> EncodedQuestions:
        """Join the sequences of questions, which are in the same order."""
        tokens, segments, cuts = array("i"), array("b"), array("i")
        lengths, counts = array("q"), array("q")
        for one in encoded:
            sequences = one.sequences + one.unconditional
            counts.append(len(sequences))
            for sequence in sequences:
                tokens.frombytes(sequence.tokens.tobytes())
                segments.frombytes(sequence.segments.tobytes())
                lengths.append(len(sequence.tokens))
                cuts.extend((sequence.truncated, sequence.straddles))
        starts, first = offsets(lengths), offsets(counts)
        return cls(questions, np.asarray(tokens), starts, first, np.asarray(segments), np.asarray(cuts).reshape(-1, 2))

    def __getitem__(self, index: int) -> EncodedQuestion:
        """Return an encoded question by its number."""
        question, (first, end) = self.questions[index], self.first[index : index + 2].tolist()
        sequences = []
        for number in range(first, end):
            part = slice(*self.starts[number : number + 2].tolist())
            sequences.append(TokenSequence(self.tokens[part], self.segments[part], *self.cuts[number].tolist()))
        count = len(question.contexts)
        return EncodedQuestion(question, tuple(sequences[:count]), tuple(sequences[count:]))

    def sequences(self, scored: frozenset[int]) -> Sequences:
        """Return the sequences for the engine; an item is a question.

        `scored` has the indices into `SEGMENTS` of the segments to score. In unconditional sequences only the
        continuation is scored.
        """
        is_scored = np.isin(np.arange(len(SEGMENTS)), list(scored))[self.segments]
        choices = np.array([len(question.contexts) for question in self.questions])
        counts = np.diff(self.first)
        is_alone = np.arange(len(self.starts) - 1) >= np.repeat(self.first[:-1] + choices, counts)
        alone = np.repeat(is_alone, np.diff(self.starts))
        is_scored[alone] = self.segments[alone] == CONTINUATION
        labels = [question.label for question in self.questions]
        groups = [question.subtask for question in self.questions]
        return Sequences(self.tokens, is_scored, self.starts, self.first, labels, groups)


def question_sequences(encoded: Sequence[EncodedQuestion], scored: frozenset[int]) -> Sequences:
    """Return the sequences of questions for the engine; see `EncodedQuestions.sequences`."""
    return EncodedQuestions.of([one.question for one in encoded], encoded).sequences(scored)


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


def part_table(questions: Sequence[Question], rows: pa.Table, folder: Path) -> pd.DataFrame:
    """Return the score table of questions: the journal's rows in the order of the documents.

    Args:
        questions: of one task.
        rows: from the journal, in any order of the documents.
        folder: of the run, for messages.

    Raises:
        RunError: a choice has no row.
    """
    order = {(question.subtask, question.doc_id): place for place, question in enumerate(questions)}
    documents = zip(rows["subtask"].to_pylist(), rows["doc_id"].to_pylist(), strict=True)
    # The sort keeps the order of a document's rows
    places = sorted((order[one], number) for number, one in enumerate(documents) if one in order)
    table = rows.take([number for _, number in places])
    found = list(zip((place for place, _ in places), table["choice"].to_pylist(), strict=True))
    if found != [(place, choice) for place, one in enumerate(questions) for choice in range(len(one.contexts))]:
        # Happens only if lines of the journal were removed while it was read
        raise RunError(
            f"the journal of {folder} lacks choices of some documents; delete the folder and run the command again"
        )
    scores: pd.DataFrame = table.to_pandas()
    return scores.assign(**{CLUSTER: [questions[place].cluster for place, _ in places]})
