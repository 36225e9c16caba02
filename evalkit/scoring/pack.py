"""From encoded questions to batches under a token budget.

In: the encoded questions of one task. Out: `Batch`es, in the order they are run. The plan depends only on its
arguments, so an interrupted run that plans again finds the same batches and can skip the finished ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evalkit.prompts import CONTINUATION, EncodedQuestion, TokenSequence
from evalkit.scoring.tree import Ints, Row, build_row, common_prefix, join_rows, sort_key, trunk_length

MIN_TRUNK = 8
"""A shorter trunk is cheaper inside the rows than in a forward pass of its own."""
MIN_SAVING = 512
"""A subject gets a trunk of its own when that saves at least so many tokens: about what the extra forward pass and
one more partly filled batch cost."""
MIN_SHARED = 8
"""Neighbouring questions share a row when they have at least so many tokens in common after the trunk …"""
MIN_SHARE = 0.25
"""… and at least this share of the question's own length …"""
MAX_MERGED = 768
"""… and the row stays below this length, since attention grows with its square."""


@dataclass(frozen=True)
class PackedRow:
    """A row and the questions whose sequences it holds, each question's conditional ones before the others."""

    row: Row
    questions: tuple[EncodedQuestion, ...]


@dataclass(frozen=True)
class Batch:
    """Rows that go through the model together."""

    trunk: Ints
    """[trunk length] tokens before every row; empty without a trunk."""
    rows: tuple[PackedRow, ...]


def plan(encoded: Sequence[EncodedQuestion], scored: frozenset[int], budget: int) -> list[Batch]:
    """Plan one task's batches, longest rows first.

    Args:
        encoded: the task's questions.
        scored: indices into `SEGMENTS` of the segments to score. Of unconditional sequences only the
            continuation is scored, whatever this says.
        budget: most tokens of a batch, padding included; a longer row is a batch by itself.
    """
    batches = []
    for group in _groups(encoded):
        length = _trunk_of(group)
        trunk = group[0].sequences[0].tokens[:length]
        rows = [_packed(questions, scored, length) for questions in _neighbours(group, length)]
        batches += [Batch(trunk, chunk) for chunk in _fill(rows, budget)]
    return batches


def all_sequences(question: EncodedQuestion) -> tuple[TokenSequence, ...]:
    """A question's sequences in the order in which a row's paths stand."""
    return question.sequences + question.unconditional


def _tokens(questions: Iterable[EncodedQuestion]) -> list[Ints]:
    return [sequence.tokens for question in questions for sequence in all_sequences(question)]


def _trunk_of(questions: Sequence[EncodedQuestion]) -> int:
    length = trunk_length(_tokens(questions))
    return length if length >= MIN_TRUNK else 0


def _groups(encoded: Sequence[EncodedQuestion]) -> list[list[EncodedQuestion]]:
    """Questions by subject where a trunk of its own pays, the rest together."""
    by_subtask: dict[str, list[EncodedQuestion]] = {}
    for question in encoded:
        by_subtask.setdefault(question.question.subtask, []).append(question)
    common = _trunk_of(encoded)
    own, pooled = [], []
    for group in by_subtask.values():
        if len(by_subtask) > 1 and (_trunk_of(group) - common) * len(group) >= MIN_SAVING:
            own.append(group)
        else:
            pooled += group
    return own + ([pooled] if pooled else [])


def _neighbours(group: Sequence[EncodedQuestion], trunk: int) -> list[list[EncodedQuestion]]:
    """Questions that share a long beginning (a passage, a twin's sentence), together."""
    together: list[list[EncodedQuestion]] = []
    width = 0
    for question in sorted(group, key=lambda q: min(map(sort_key, _tokens([q])))):
        own = max(len(tokens) for tokens in _tokens([question])) - trunk
        if together:
            before = together[-1][-1]
            shared = common_prefix(before.sequences[0].tokens, question.sequences[0].tokens) - trunk
            if shared >= max(MIN_SHARED, MIN_SHARE * own) and width + own - shared <= MAX_MERGED:
                together[-1].append(question)
                width += own - shared
                continue
        together.append([question])
        width = own
    return together


def _packed(questions: list[EncodedQuestion], scored: frozenset[int], trunk: int) -> PackedRow:
    wanted: list[NDArray[np.bool_]] = []
    for question in questions:
        wanted += [np.isin(sequence.segments, list(scored)) for sequence in question.sequences]
        wanted += [sequence.segments == CONTINUATION for sequence in question.unconditional]
    return PackedRow(build_row(_tokens(questions), wanted, trunk), tuple(questions))


def _fill(rows: list[PackedRow], budget: int) -> Iterator[tuple[PackedRow, ...]]:
    """Batches without much padding: as wide as the longest row left, shorter rows joined to fill the width."""
    rows = sorted(rows, key=lambda packed: len(packed.row.tokens))
    lengths = [len(packed.row.tokens) for packed in rows]
    while rows:
        width = lengths[-1]
        batch: list[PackedRow] = []
        while rows and len(batch) < max(1, budget // width):
            line: list[PackedRow] = []
            room = width
            # The longest row that still fits
            while (at := bisect_right(lengths, room) - 1) >= 0:
                room -= lengths.pop(at)
                line.append(rows.pop(at))
            batch.append(_joined(line))
        yield tuple(batch)


def _joined(line: list[PackedRow]) -> PackedRow:
    if len(line) == 1:
        return line[0]
    questions = tuple(question for packed in line for question in packed.questions)
    return PackedRow(join_rows([packed.row for packed in line]), questions)
