"""Documents of a finished run as people read them: prompts by segment, choices or answers, scores.

In: a run, by `Benchmark.views`. Out: a view of each task. Texts of choices are read from the documents' source again,
and only if these are the documents that were scored; answers are read from the run folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import pandas as pd


class Piece(NamedTuple):
    """A stretch of a prompt."""

    segment: str
    """One of `SEGMENTS`."""
    text: str


DocumentKey: TypeAlias = tuple[str, int]
"""Subtask, and lm-eval's index of the document in it."""


@dataclass(frozen=True)
class ChoiceText:
    """The sequences of a document's choices, as text."""

    common: tuple[Piece, ...]
    """The pieces with which all sequences begin."""
    choices: tuple[tuple[Piece, ...], ...]
    """The other pieces of each choice's sequence."""
    options: tuple[str, ...]
    """The answer options."""


def choice_text(sequences: Sequence[Sequence[Piece]], options: Sequence[str]) -> ChoiceText:
    """Return the text of a document from the pieces of each choice's sequence."""
    common = 0
    for column in zip(*sequences, strict=False):
        if column.count(column[0]) < len(column):
            break
        common += 1
    return ChoiceText(tuple(sequences[0][:common]), tuple(tuple(one[common:]) for one in sequences), tuple(options))


@dataclass(frozen=True)
class ChoiceView:
    """A task whose choices were scored."""

    task: str
    scores: pd.DataFrame
    """The task's rows of the score table."""
    rules: tuple[str, ...]
    """Rules that the run has scores for."""
    texts: Mapping[DocumentKey, ChoiceText] = field(default_factory=dict)
    """Empty if the documents cannot be read."""
    problem: str = ""
    """Why there are no texts, or how they differ from what was scored."""


CUT = "cut"
"""Name of the fact that a prompt was truncated."""


@dataclass(frozen=True)
class AnsweredDocument:
    """A document that was answered with a generated text, or measured in another way than by choices."""

    subtask: str
    id: str
    references: tuple[str, ...]
    """Right answers; empty if there are none."""
    answer: str
    """What the model generated, as it was scored."""
    score: float | None
    """From 0 to 1, or another number if the task's metric has other bounds; None if it has no score of its own."""
    prompt: tuple[Piece, ...] = ()
    """Empty if the run folder does not have it."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Name → value, for readers: how the answer ended, prompt tokens, what was cut."""


@dataclass(frozen=True)
class AnswerView:
    """A task whose documents were answered."""

    task: str
    metric: str
    """What `AnsweredDocument.score` is."""
    documents: Sequence[AnsweredDocument]
    problem: str = ""
    """Why there are no documents."""


TaskView: TypeAlias = ChoiceView | AnswerView


def common_prefix(texts: Sequence[str]) -> str:
    """Return the characters that all texts begin with: what the first and the last in order have in common."""
    first, last = min(texts), max(texts)
    pairs = enumerate(zip(first, last, strict=False))
    return first[: next((place for place, (one, other) in pairs if one != other), len(first))]
