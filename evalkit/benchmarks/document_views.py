"""Documents of a finished run as people read them: prompts by segment, choices or answers, scores.

In: a run, by `FinishedResults.views`. Out: a view of each task. Texts of choices are read from the documents' source
again, and only if these are the documents that were scored; answers are read from the run folder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, TypeAlias

from evalkit.reporting.decimals import fixed
from evalkit.runs.scales import FRACTION, Scale
from evalkit.suites.templates import Piece

if TYPE_CHECKING:
    import pandas as pd


DocumentKey: TypeAlias = tuple[str, int]
"""Subtask, and lm-eval's index of the document in it."""


@dataclass(frozen=True)
class ChoiceText:
    """The sequences of a document's choices: the pieces with which all begin, and the other ones of each choice."""

    common: tuple[Piece, ...]
    choices: tuple[tuple[Piece, ...], ...]
    options: tuple[str, ...]


Texts: TypeAlias = Mapping[DocumentKey, ChoiceText]


def common_prefix(sequences: Sequence[Any]) -> Any:
    """Return what all texts, or all sequences, begin with."""
    return commonprefix(sequences)  # noqa: RUF071 (no paths)


def choice_text(sequences: Sequence[Sequence[Piece]], options: Sequence[str]) -> ChoiceText:
    common = tuple(common_prefix(sequences))
    return ChoiceText(common, tuple(tuple(pieces[len(common) :]) for pieces in sequences), tuple(options))


@dataclass(frozen=True)
class ChoiceView:
    """A task whose choices were scored, with its rows of the score table and the rules that apply to them."""

    task: str
    scores: pd.DataFrame
    rules: tuple[str, ...]
    read: Callable[[], tuple[Texts, str]] = lambda: ({}, "")
    """Reads `texts` and `problem` when either is first used."""

    @property
    def texts(self) -> Texts:
        """Return the texts of the documents; empty if these cannot be read."""
        return self._read[0]

    @property
    def problem(self) -> str:
        """Return why there are no texts, or how they differ from what was scored."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[Texts, str]:
        return self.read()


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
    score: float | None
    """From 0 to 1, or another number if the task's metric has other bounds; None if it has no score of its own."""
    prompt: tuple[Piece, ...] = ()
    """Empty if the run folder does not have it."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Name → value, for readers: how the answer ended, prompt tokens, what was cut."""


@dataclass(frozen=True)
class AnswerView:
    """A task whose documents were answered, with the scale of their scores; or why there are no documents."""

    task: str
    scale: Scale
    documents: Sequence[AnsweredDocument]
    problem: str = ""


TaskView: TypeAlias = ChoiceView | AnswerView


_ENDS = {"end": "end token", "enough": "stop text", "length": "maximum length"}
"""Stopping criterion in the table → its description."""


def answer_views(table: pd.DataFrame, tasks: Collection[str], metric: Callable[[str], str]) -> Iterator[AnswerView]:
    """Yield the generated answers of a run by task; no `tasks`: all.

    The table has columns task, id, answer (the text that was scored), references, score, the whole prompt if the run
    stores it, and those of `GeneratedRow`; without `tokens_before`, no prompt was truncated.
    """
    for task, rows in table.groupby("task", sort=False):
        if not tasks or task in tasks:
            scale = Scale(metric(str(task)), FRACTION)
            yield AnswerView(str(task), scale, list(map(_answered, rows.to_dict("records"))))


def _answered(row: Mapping[Any, Any]) -> AnsweredDocument:
    before, after = (int(row.get(name, row["tokens"])) for name in ("tokens_before", "tokens"))
    facts = {"ended": _ENDS.get(row["ended"], str(row["ended"])), "prompt tokens": f"{before:,}"}
    if row.get("truncated"):
        facts |= {CUT: f"{before - after:,} tokens of the prompt's middle", "prompt tokens after the cut": f"{after:,}"}
    facts |= {"generated tokens": f"{row['new_tokens']:,}", "seconds": fixed(row["seconds"], 1)}
    pieces = (Piece("context", row["prompt"]),) if row.get("prompt") else ()
    return AnsweredDocument(
        row["task"], str(row["id"]), tuple(row["references"]), row["answer"], float(row["score"]), pieces, facts
    )
