"""Scoring of a suite's documents: the computer and the plan of its batches.

In: a plan and a loaded model. Out: batches, and their rows of the score table. A background thread encodes and plans
the tasks, in order, while the model scores the first ones.
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
from evalkit.remembered import remembered
from evalkit.runs.batch_devices import BatchDevice, place_of
from evalkit.scores.table import SEGMENTS, ScoreRow
from evalkit.scoring import pack
from evalkit.scoring.prefetch import prefetched

if TYPE_CHECKING:
    from evalkit.benchmarks.multiple_choice.plan import ChoicePlan
    from evalkit.benchmarks.multiple_choice.tasks import Question
    from evalkit.benchmarks.multiple_choice.templates import Template
    from evalkit.models.load import LoadedModel
    from evalkit.runs.finished_rows import FinishedRows, Key

_CANDIDATES = 2
"""Questions of each task among which the start-up check chooses."""
_TASKS_KEPT = 16
"""Tasks whose tokens are kept for the next checkpoint with the same tokenizer."""

_Encoded: TypeAlias = tuple[list[EncodedQuestion], list[pack.TreeBatch]]
"""A task's documents as token sequences, and their batches."""


@dataclass(frozen=True)
class ScoringFacts:
    """Properties of a scoring model that planning needs."""

    window: int
    """Context window in tokens."""
    token_budget: int
    """Maximum number of tokens in a batch."""
    shares: bool
    """Whether sequences share the computation of common prefixes."""


@dataclass(frozen=True)
class ScoringSetup:
    """What scoring needs of a plan."""

    template: Template
    unconditional: bool
    """Whether choices are scored without their context too."""
    candidates: tuple[Question, ...]
    """Documents among which the start-up check chooses."""


def setup_of(plan: ChoicePlan) -> ScoringSetup:
    """Return what scoring needs of a plan."""
    first = tuple(question for members in plan.questions.values() for question in members[:_CANDIDATES])
    return ScoringSetup(plan.template, plan.unconditional, first)


class Scoring:
    """Computer of multiple-choice batches."""

    def __init__(self, setup: ScoringSetup, loaded: LoadedModel, budget: int | None, say: Say) -> None:
        from evalkit.scoring.budget import auto_budget
        from evalkit.scoring.engine import Engine

        self._scored = _scored(setup.template)
        self._engine = engine = Engine(loaded.model, budget or auto_budget(loaded.model), say, remembers=loaded.stock)
        prompter = Prompter(setup.template, loaded.tokenizer, loaded.window, silent)
        encoded = prompter.encode(setup.candidates, setup.unconditional)
        engine.check([question_item(number, one, self._scored) for number, one in enumerate(encoded)])
        self.facts = ScoringFacts(loaded.window, engine.budget, engine.shares)
        self.about = {
            "token_budget": engine.budget,
            "sharing": engine.describe(),
            "loaded": loaded.facts() | {"markers": _markers(setup.template, loaded.tokenizer)},
        }
        self._place = place_of(loaded.device, engine.kernel if engine.shares else "alone")

    def place(self, batch: Batch | None = None) -> BatchDevice:
        """Return the model's device."""
        return self._place

    def compute(self, batch: Batch) -> list[ScoreRow]:
        """Score a batch."""
        packed, questions = batch.content
        return [
            row
            for item, scores in self._engine.score(packed)
            for row in question_rows(questions[item.index], scores, self._scored)
        ]


def batches_of(plan: ChoicePlan, facts: ScoringFacts, tokenizer: Any, finished: FinishedRows, say: Say) -> Batches:
    """Yield the batches that have documents without scores, task by task."""
    prompter, scored, stop = Prompter(plan.template, tokenizer, facts.window, say), _scored(plan.template), Event()

    specification = plan.manifest["specification"]
    tokenized = (plan.documents_key, specification["checkpoint"]["tokenizer"], specification["template"], facts)

    def encode(task: str) -> _Encoded:
        """Encode and plan a task."""
        encoded, items, packed = remembered("batches", (tokenized, task), lambda: planned(task), most=_TASKS_KEPT)
        if facts.shares and plan.request.token_budget == facts.token_budget:
            pack.check_budget(items, facts.token_budget)
        # Without their trees, which are made when a batch's turn comes and not kept
        return encoded, [pack.TreeBatch(batch.trunk, batch.items) for batch in packed]

    def planned(task: str) -> tuple[list[EncodedQuestion], list[pack.SequenceSet], list[pack.TreeBatch]]:
        """Encode and plan a task; raise `_Stopped` once stopped."""
        found = prompter.encode(plan.questions[task], plan.unconditional)
        encoded = list(takewhile(lambda _: not stop.is_set(), found))
        if stop.is_set():
            raise _Stopped
        items = [question_item(number, one, scored) for number, one in enumerate(encoded)]
        return encoded, items, pack.plan(items, facts.token_budget)

    tasks = [task for task, members in plan.questions.items() if any(key_of(one) not in finished for one in members)]
    with _BackgroundPlanner(encode, tasks, stop) as planner:
        if plan.request.token_budget is not None:
            # Fail before scoring if the budget is too small for a later task: a started run keeps its budget
            planner.wait()
        for task in tasks:
            encoded, packed = planner.take(task)

            def done(batch: pack.TreeBatch, encoded: list[EncodedQuestion] = encoded) -> bool:
                return all(key_of(encoded[item.index].question) in finished for item in batch.items)

            for number, batch in prefetched(packed, done):
                members = {item.index: encoded[item.index] for item in batch.items}
                work = sum(work_of(one.question) for one in members.values())
                yield Batch(task, number, (batch, members), work, len(members))
                planner.raise_failure()


class _Stopped(Exception):
    """Nobody needs the batches any more."""


class _BackgroundPlanner:
    """Background thread that encodes and plans all tasks, in order, while the first ones are scored.

    Args:
        plan: encodes and plans one task.
        tasks: tasks in the order in which `take` is called.
        stop: set on exit; makes `plan` return early.
    """

    def __init__(self, plan: Callable[[str], _Encoded], tasks: list[str], stop: Event) -> None:
        self._stop = stop
        self._encoder = ThreadPoolExecutor(1, "evalkit-encode")
        self._planned = {task: self._encoder.submit(plan, task) for task in tasks}

    def __enter__(self) -> _BackgroundPlanner:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._encoder.shutdown(wait=True, cancel_futures=True)

    def take(self, task: str) -> _Encoded:
        """Return a task's documents and batches; wait until they are ready."""
        return self._planned.pop(task).result()

    def wait(self) -> None:
        """Wait until all tasks are planned; raise the first failure."""
        wait(self._planned.values())
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the failure of a later task as soon as it is known, before the task's turn."""
        for planned in self._planned.values():
            if planned.done() and (failure := planned.exception()):
                raise failure


def key_of(question: Question) -> Key:
    """Return a document's key in the journal."""
    return question.task, question.subtask, question.doc_id


def _scored(template: Template) -> frozenset[int]:
    """Return the indices of the segments that a template scores."""
    return frozenset(map(SEGMENTS.index, template.score))


def work_of(question: Question) -> int:
    """Return the characters that a question adds to the tree, which approximate its share of the time."""
    return len(question.contexts[0]) + sum(map(len, question.continuations))


def _markers(template: Template, tokenizer: Any) -> Mapping[str, str]:
    """Return literal marker of the template, such as [INST] → whether the tokenizer has it as a special token."""
    special = set(tokenizer.all_special_tokens)
    literals = [part.text.strip() for part in template.parts if part.segment == "special"]
    return {literal: "special token" if literal in special else "text" for literal in literals}
