"""Encoded questions: the token sequences of questions, with the segment of each token.

In: sequences of choices, one question after the other. Out: `EncodedQuestions`, which holds those of a whole task in
flat arrays: the 56,168 sequences of MMLU take 45 MB; of these, what the engine scores, and from its scores the rows of
the score table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.errors import RunError
from evalkit.escape import printable
from evalkit.reporting.terminal import COLOURS
from evalkit.runs.score_table import CLUSTER, SEGMENTS, ScoreRow
from evalkit.scoring.pack import SequenceSet
from evalkit.scoring.sequences import SequenceArrays, offsets

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from evalkit.benchmarks.multiple_choice.tasks import Question
    from evalkit.scoring.head import Scores


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


def question_item(index: int, encoded: EncodedQuestion, scored: frozenset[int]) -> SequenceSet:
    """Return the sequences of a question for the engine: first the conditional ones, then the unconditional ones.

    Args:
        index: the question's number, which identifies its scores.
        encoded: the question.
        scored: indices into `SEGMENTS` of the segments to score. In unconditional sequences only the continuation is
            scored.
    """
    is_scored = np.isin(np.arange(len(SEGMENTS)), list(scored))
    masks = [is_scored[sequence.segments] for sequence in encoded.sequences]
    masks += [sequence.segments == CONTINUATION for sequence in encoded.unconditional]
    tokens = tuple(sequence.tokens for sequence in encoded.sequences + encoded.unconditional)
    return SequenceSet(index, encoded.question.label, encoded.question.subtask, tokens, tuple(masks))


def question_rows(encoded: EncodedQuestion, scores: Sequence[Scores], scored: frozenset[int]) -> Iterator[ScoreRow]:
    """Yield the score table's rows of one question, one for each choice.

    Args:
        encoded: the question.
        scores: scores of the sequences of `question_item`, in order.
        scored: indices of the segments that the template scores.
    """
    question = encoded.question
    count = len(encoded.sequences)
    for choice, sequence in enumerate(encoded.sequences):
        sums, counts = _segment_sums(sequence, scores[choice].logprobs, scored)
        ll_unconditional = None
        if encoded.unconditional:
            unconditional = scores[count + choice].logprobs
            sums_alone, _ = _segment_sums(encoded.unconditional[choice], unconditional, frozenset({CONTINUATION}))
            ll_unconditional = sums_alone[CONTINUATION]
        option = question.choices[choice]
        place = (question.task, question.subtask, question.doc_id, choice, count, question.gold)
        sizes = (len(option), len(option.encode("utf-8")), sequence.truncated, sequence.straddles)
        yield ScoreRow._make((*place, *sums, *counts, ll_unconditional, *sizes))


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


def _segment_sums(
    sequence: TokenSequence, scores: NDArray[np.float32], scored: frozenset[int]
) -> tuple[list[float | None], list[int]]:
    """Return each segment's sum of log-probabilities and number of tokens; the first token is not predicted."""
    segments = sequence.segments[1:]
    mask = np.isin(segments, list(scored))
    # float64: a float32 sum of thousands of values would lose precision
    weights = np.where(mask, scores[1:].astype(np.float64), 0.0)
    sums = np.bincount(segments, weights=weights, minlength=len(SEGMENTS))
    counts = np.bincount(segments, minlength=len(SEGMENTS))
    return [float(sums[s]) if s in scored else None for s in range(len(SEGMENTS))], counts.tolist()


def prompt_text(encoded: EncodedQuestion, tokenizer: Any) -> str:
    """Return a question's sequences as text, with segments in colour and their token counts."""
    question = encoded.question
    lines = [click.style(printable(f"{question.label}, gold answer {question.gold}"), bold=True)]
    for choice, sequence in enumerate(encoded.sequences):
        spans = sequence.spans()
        text = "".join(
            click.style(printable(tokenizer.decode(sequence.tokens[start:end].tolist()), "\n\t"), fg=COLOURS[segment])
            for segment, start, end in spans
        )
        counts = ", ".join(
            click.style(f"{segment} {end - start}", fg=COLOURS[segment]) for segment, start, end in spans
        )
        cut = f", {sequence.truncated} context tokens cut" if sequence.truncated else ""
        mark = "*" if choice == question.gold else " "
        lines += [f"[{choice}]{mark} {len(sequence.tokens)} tokens: {counts}{cut}", text, ""]
    return "\n".join(lines)
