"""A loaded model that scores a suite's documents, and the batches that it scores them in.

The thread that tokenises is ahead of the model: tasks are encoded and planned, in their order, while the first ones
are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import takewhile
from threading import Event
from typing import TYPE_CHECKING, Any, TypeAlias

from evalkit.benchmarks.base import Batch, Batches, Say
from evalkit.benchmarks.multiple_choice.prompts import EncodedQuestion, Prompter
from evalkit.benchmarks.multiple_choice.rows import question_item, question_rows
from evalkit.models.locate import silent
from evalkit.runs.batch_devices import BatchDevice, place_of
from evalkit.scores.table import SEGMENTS, ScoreRow
from evalkit.scoring import pack
from evalkit.scoring.prefetch import prefetched

if TYPE_CHECKING:
    from evalkit.benchmarks.multiple_choice.plan import ChoicePlan
    from evalkit.benchmarks.multiple_choice.tasks import Question
    from evalkit.models.load import LoadedModel
    from evalkit.runs.finished_rows import FinishedRows, Key

_CANDIDATES = 2
"""Questions of each task that the start-up check may choose from."""

_Encoded: TypeAlias = tuple[list[EncodedQuestion], list[pack.TreeBatch]]
"""A task's documents as token sequences, and the batches that they are scored in."""


@dataclass(frozen=True)
class ScoringFacts:
    """What planning needs to know of a model that scores."""

    window: int
    """Most tokens of a sequence."""
    token_budget: int
    """Most tokens of a batch."""
    shares: bool
    """Whether sequences share their prefixes."""


class Scoring:
    """A model that scores documents."""

    def __init__(self, plan: ChoicePlan, loaded: LoadedModel, budget: int | None, say: Say) -> None:
        from evalkit.scoring.budget import auto_budget
        from evalkit.scoring.engine import Engine

        self._scored = _scored(plan)
        self._engine = engine = Engine(loaded.model, budget or auto_budget(loaded.model), say, remembers=loaded.stock)
        prompter = Prompter(plan.template, loaded.tokenizer, loaded.window, silent)
        first = [question for members in plan.questions.values() for question in members[:_CANDIDATES]]
        encoded = prompter.encode(first, plan.unconditional)
        engine.check([question_item(number, one, self._scored) for number, one in enumerate(encoded)])
        self.facts = ScoringFacts(loaded.window, engine.budget, engine.shares)
        self.about = {
            "token_budget": engine.budget,
            "sharing": engine.describe(),
            "loaded": loaded.facts() | {"markers": _markers(plan, loaded.tokenizer)},
        }
        self._place = place_of(loaded.device, engine.kernel if engine.shares else "alone")

    def place(self, batch: Batch | None = None) -> BatchDevice:
        """See `Computer`."""
        return self._place

    def compute(self, batch: Batch) -> list[ScoreRow]:
        """See `Computer`."""
        packed, questions = batch.content
        return [
            row
            for item, scores in self._engine.score(packed)
            for row in question_rows(questions[item.index], scores, self._scored)
        ]


def batches_of(plan: ChoicePlan, facts: ScoringFacts, tokenizer: Any, finished: FinishedRows, say: Say) -> Batches:
    prompter, scored, stop = Prompter(plan.template, tokenizer, facts.window, say), _scored(plan), Event()

    def encode(task: str) -> _Encoded:
        """Cut short once stopped."""
        found = prompter.encode(plan.questions[task], plan.unconditional)
        encoded = list(takewhile(lambda _: not stop.is_set(), found))
        items = [question_item(number, one, scored) for number, one in enumerate(encoded)]
        if facts.shares and plan.request.token_budget == facts.token_budget:
            pack.check_budget(items, facts.token_budget)
        return encoded, pack.plan(items, facts.token_budget)

    tasks = [task for task, members in plan.questions.items() if any(key_of(one) not in finished for one in members)]
    with _Ahead(encode, tasks, stop) as ahead:
        if plan.request.token_budget is not None:
            # Which may be too small for a later task: a run that has begun keeps its budget
            ahead.wait()
        for task in tasks:
            encoded, packed = ahead.take(task)

            def done(batch: pack.TreeBatch, encoded: list[EncodedQuestion] = encoded) -> bool:
                return all(key_of(encoded[item.index].question) in finished for item in batch.items)

            for number, batch in prefetched(packed, done):
                members = {item.index: encoded[item.index] for item in batch.items}
                work = sum(work_of(one.question) for one in members.values())
                yield Batch(task, number, (batch, members), work, len(members))
                ahead.raise_trouble()


class _Ahead:
    """Tokenises and plans all tasks, in their order, while the first ones are scored.

    Args:
        plan: encodes and plans one task.
        tasks: in the order in which they will be taken.
        stop: set when nobody wants them any more.
    """

    def __init__(self, plan: Callable[[str], _Encoded], tasks: list[str], stop: Event) -> None:
        self._stop = stop
        self._encoder = ThreadPoolExecutor(1, "evalkit-encode")
        self._planned = {task: self._encoder.submit(plan, task) for task in tasks}

    def __enter__(self) -> _Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._encoder.shutdown(wait=True, cancel_futures=True)

    def take(self, task: str) -> _Encoded:
        """The task's documents and batches, as soon as they are there."""
        return self._planned.pop(task).result()

    def wait(self) -> None:
        """Until all tasks are planned. Raises what is wrong with any."""
        wait(self._planned.values())
        self.raise_trouble()

    def raise_trouble(self) -> None:
        """Raise what is wrong with a later task as soon as it is known, not when its turn comes."""
        for planned in self._planned.values():
            if planned.done() and (trouble := planned.exception()):
                raise trouble


def key_of(question: Question) -> Key:
    """What the journal calls a document."""
    return question.task, question.subtask, question.doc_id


def _scored(plan: ChoicePlan) -> frozenset[int]:
    """Indices of the segments that the template scores."""
    return frozenset(map(SEGMENTS.index, plan.template.score))


def work_of(question: Question) -> int:
    """Characters that a question adds to the tree: near enough to its share of the time."""
    return len(question.contexts[0]) + sum(map(len, question.continuations))


def _markers(plan: ChoicePlan, tokenizer: Any) -> Mapping[str, str]:
    """Whether each literal marker of the template, such as [INST], is one special token of this tokenizer or text."""
    special = set(tokenizer.all_special_tokens)
    literals = [part.text.strip() for part in plan.template.parts if part.segment == "special"]
    return {literal: "special token" if literal in special else "text" for literal in literals}
