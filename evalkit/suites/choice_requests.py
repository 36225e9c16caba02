"""Requests of documents with choices: each choice of a question is a sequence to score; and their score table.

In: the questions of a task and a template. Out: `ChoiceRequests`; and from the journal's rows that answer them, the
score table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from evalkit.errors import RunError
from evalkit.inputs.values import utf8_length
from evalkit.requests.requests import Encoder, Score, ScoreDocument, TaskRequests
from evalkit.requests.rows import RequestKey, segment_columns
from evalkit.runs.score_table import CLUSTER, COLUMNS, CONTINUATION, SEGMENTS
from evalkit.suites.prompt_sets import Order
from evalkit.suites.prompts import EncodedQuestion, Prompter, TokenSequence
from evalkit.suites.questions import Question
from evalkit.suites.templates import Template

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from evalkit.runs.journal import FinishedRows

_CANDIDATES = 2
"""Questions of each task among which the start-up check chooses."""


@dataclass(frozen=True)
class ChoiceRequests(TaskRequests):
    """The questions of a task under one template; the choices of several orders follow each other in a question."""

    task: str
    template: Template
    questions: Sequence[Question]
    prompt: str
    """Name of the prompt; empty in a run with one."""
    orders: Sequence[Order]
    """Orders of the options, the original one first, whose choices follow each other in every question."""
    unconditional: bool = False
    """Whether the choices are scored without the question, too; their numbers follow those of the others."""
    step: int = 0
    first: int = 0
    """Of a later step, the documents of the earlier ones, which have at most as many batches."""
    sizes: Mapping[str, int] | None = None
    settings: Any = None
    """What determines the requests beside the questions, hashable; None: their tokens are not kept."""
    is_adoptable = True

    @property
    def journal(self) -> str:
        return f"{self.task} {self.prompt}" if self.prompt else self.task

    @property
    def contents(self) -> Any:
        if self.settings is None:
            return None
        return self.settings, tuple((question.identity, question.texts_digest) for question in self.questions)

    @property
    def scored_segments(self) -> frozenset[int]:
        return frozenset(map(SEGMENTS.index, self.template.score))

    def costs(self) -> Iterator[tuple[RequestKey, float]]:
        for question in self.questions:
            yield self._key(question), _work_of(question)
            for choice in range(1, len(question.contexts) * (1 + self.unconditional)):
                yield self._key(question, choice), 0

    def without(self, keys: Collection[Any]) -> ChoiceRequests:
        if not keys:
            return self
        return replace(self, questions=[each for each in self.questions if (*self._key(each), 0) not in keys])

    def candidates(self) -> ChoiceRequests:
        single = [question for question in self.questions[_CANDIDATES:] if len(question.continuations) == 1]
        # Of a task in which few documents have one answer, one of these too: it needs the argmax
        return replace(self, questions=[*self.questions[:_CANDIDATES], *single[:1]])

    def scored(self, encoder: Encoder) -> Iterator[ScoreDocument]:
        prompter = Prompter(self.template, encoder.tokenizer, encoder.facts.window, encoder.say)
        of_template = np.isin(np.arange(len(SEGMENTS)), list(self.scored_segments))
        of_continuation = np.isin(np.arange(len(SEGMENTS)), [CONTINUATION])
        for encoded in prompter.encode(self.questions, self.unconditional):
            question = encoded.question
            scores = _scores(encoded, encoded.sequences, of_template)
            scores += _scores(encoded, encoded.unconditional, of_continuation, len(scores))
            yield ScoreDocument(question.identity, question.label, question.subtask, scores, _work_of(question))

    def about(self, tokenizer: Any) -> dict[str, Any]:
        special = set(tokenizer.all_special_tokens)
        literals = [part.text.strip() for part in self.template.parts if part.segment == "special"]
        return {"markers": {text: "special token" if text in special else "text" for text in literals}}

    def scores(self, finished: FinishedRows) -> pd.DataFrame:
        """Return the score table of the questions, in their order."""
        return choice_scores(finished.table(self.journal), self.questions, self.scored_segments, self.unconditional)

    def _key(self, question: Question, choice: int = 0) -> RequestKey:
        return RequestKey(self.journal, question.identity, choice, question.texts_digest)


def _work_of(question: Question) -> int:
    """Return the characters that a question adds to a tree, which approximate its share of the time."""
    return len(question.contexts[0]) + sum(map(len, question.continuations))


def _scores(
    encoded: EncodedQuestion, sequences: Sequence[TokenSequence], is_scored: Any, first: int = 0
) -> list[Score]:
    """Return the sequences of a question; `is_scored`: [segments] whether the tokens of each are scored."""
    question = encoded.question
    return [
        Score(
            choice=choice,
            texts=question.texts_digest,
            tokens=sequence.tokens,
            segments=sequence.segments,
            is_scored=is_scored[sequence.segments],
            greedy=len(question.contexts) == 1 and first == 0,
            truncated=sequence.truncated,
            straddles=sequence.straddles,
        )
        for choice, sequence in enumerate(sequences, first)
    ]


def choice_scores(
    rows: pa.Table, questions: Sequence[Question], scored: Collection[int], unconditional: bool
) -> pd.DataFrame:
    """Return the score table of questions in their order, from rows of the journal.

    `scored` are the codes of the segments that are scored, and `unconditional` is whether the choices are scored
    without the question, too. Raises a `RunError` if rows are missing.
    """
    import pandas as pd

    numbers = {(question.identity, question.texts_digest): number for number, question in enumerate(questions)}
    keys = zip(rows["document"].to_pylist(), rows["texts"].to_pylist(), strict=True)
    of_rows = np.array([numbers.get(key, -1) for key in keys], np.int64)
    of_choices = rows["choice"].to_numpy()
    order = np.lexsort((of_choices, of_rows))
    order = order[of_rows[order] >= 0]
    counts = np.array([len(question.contexts) for question in questions], np.int64)
    expected = [(n, c) for n, count in enumerate(counts) for c in range(count * (1 + unconditional))]
    if list(zip(of_rows[order].tolist(), of_choices[order].tolist(), strict=True)) != expected:
        # Happens only if lines of the journal were removed while it was read
        task = questions[0].task
        raise RunError(f"the journal lacks choices of documents of {task}; delete its folder, run again")
    number = of_rows[order]
    choice = of_choices[order]
    chosen = rows.take(order)
    likelihoods, tokens = segment_columns(chosen, range(len(SEGMENTS)))
    # A segment that a sequence does not have has the log-likelihood of no token
    is_scored = np.isin(np.arange(len(SEGMENTS)), list(scored))
    likelihoods[(tokens == 0) & is_scored] = 0
    is_asked = choice < counts[number]
    asked = likelihoods[is_asked]
    alone = np.full(len(asked), np.nan)
    if unconditional:
        alone = likelihoods[~is_asked, CONTINUATION]
    if np.isnan(asked[:, is_scored]).any() or (unconditional and np.isnan(alone).any()):
        raise RunError(f"the journal lacks log-likelihoods of {questions[0].task}; delete its folder, run again")
    of_question = [questions[index] for index in number[is_asked].tolist()]
    options = [question.choices[index] for question, index in zip(of_question, choice[is_asked].tolist(), strict=True)]
    columns: dict[str, Any] = {
        "task": [question.task for question in of_question],
        "subtask": [question.subtask for question in of_question],
        "doc_id": [question.doc_id for question in of_question],
        "choice": choice[is_asked],
        "choices": counts[number[is_asked]],
        "gold": [question.gold for question in of_question],
    }
    columns |= {f"ll_{name}": asked[:, code] for code, name in enumerate(SEGMENTS)}
    columns |= {f"n_{name}": tokens[is_asked, code] for code, name in enumerate(SEGMENTS)}
    columns |= {
        "ll_unconditional": alone,
        "chars": [len(option) for option in options],
        "bytes": [utf8_length(option) for option in options],
        "truncated": chosen["truncated"].to_numpy()[is_asked],
        "straddles": chosen["straddles"].to_numpy()[is_asked],
        "greedy": chosen["greedy"].to_pandas().astype("float64").to_numpy()[is_asked],
        CLUSTER: [question.cluster for question in of_question],
    }
    return pd.DataFrame(columns)[list(COLUMNS)]
