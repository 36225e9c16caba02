"""Scoring of a suite's documents: the computer and the plan of its batches.

In: a plan and a loaded model. Out: batches, and their rows of the score table. A background thread encodes and plans
the tasks, in order, while the model scores the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import takewhile
from threading import Event
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import Batch, Batches, Say
from evalkit.benchmarks.multiple_choice.prompts import EncodedQuestion, Prompter
from evalkit.benchmarks.multiple_choice.rows import question_item, question_rows
from evalkit.benchmarks.remembered import Compressed, is_remembering, remembered
from evalkit.models.locate import silent
from evalkit.runs.batch_devices import BatchDevice, place_of
from evalkit.scores.table import SEGMENTS, ScoreRow
from evalkit.scoring import pack

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
class ChoiceContent:
    """Content of a batch of multiple-choice documents."""

    batch: pack.TreeBatch
    questions: dict[int, EncodedQuestion]
    """Index of an item → its document, without text."""

    def warm(self) -> None:
        """See `Batch.warm`."""
        _ = self.batch.tree


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
        self._engine = engine = Engine(
            loaded.model, budget or auto_budget(loaded.model), say, remembers=loaded.stock, files=loaded.files
        )
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
        content = batch.content
        return [
            row
            for item, scores in self._engine.score(content.batch)
            for row in question_rows(content.questions[item.index], scores, self._scored)
        ]


def batches_of(plan: ChoicePlan, facts: ScoringFacts, tokenizer: Any, finished: FinishedRows, say: Say) -> Batches:
    """Yield the batches that have documents without scores, task by task."""
    prompter, scored, stop = Prompter(plan.template, tokenizer, facts.window, say), _scored(plan.template), Event()

    specification = plan.manifest["specification"]
    tokenized = (plan.documents_key, specification["checkpoint"]["tokenizer"], specification["template"], facts)
    given = plan.request.token_budget

    def task_batches(task: str) -> Sequence[Batch]:
        """Return all batches of a task; within `remembering`, those of an earlier run with the same tokens."""
        found: Sequence[Batch] = (
            remembered("batches", (tokenized, task), lambda: Compressed(planned(task)), most=_TASKS_KEPT)
            if is_remembering()
            else planned(task)
        )
        if facts.shares and given == facts.token_budget:
            pack.check_budget([item for batch in found for item in batch.content.batch.items], given)
        return found

    def planned(task: str) -> list[Batch]:
        """Encode and plan a task; raise `_Stopped` once stopped."""
        found = prompter.encode(plan.questions[task], plan.unconditional)
        encoded = list(takewhile(lambda _: not stop.is_set(), found))
        if stop.is_set():
            raise _Stopped
        items = [question_item(number, one, scored) for number, one in enumerate(encoded)]
        packed = pack.plan(items, facts.token_budget)
        return [_batch(task, number, batch, encoded) for number, batch in enumerate(packed)]

    tasks = [task for task, members in plan.questions.items() if any(key_of(one) not in finished for one in members)]
    with _BackgroundPlanner(task_batches, tasks, stop) as planner:
        if given is not None:
            # Fail before scoring if the budget is too small for a later task: a started run keeps its budget
            planner.wait()
        for task in tasks:
            for batch in _emptied(planner.take(task)):
                # A finished batch is left out as a whole: the others' numbers stay the same
                if any(key_of(one.question) not in finished for one in batch.content.questions.values()):
                    yield batch
                    planner.raise_failure()


def _emptied(batches: Sequence[Batch]) -> Iterator[Batch]:
    """Yield batches in order; remove them from a list, so that their trees are freed."""
    if not isinstance(batches, list):
        yield from batches
        return
    batches.reverse()
    while batches:
        yield batches.pop()


def _batch(task: str, number: int, batch: pack.TreeBatch, encoded: Sequence[EncodedQuestion]) -> Batch:
    members = {item.index: encoded[item.index] for item in batch.items}
    work = sum(work_of(one.question) for one in members.values())
    questions = {index: one.without_text() for index, one in members.items()}
    return Batch(task, number, ChoiceContent(batch, questions), work, len(members))


class _Stopped(Exception):
    """Nobody needs the batches any more."""


class _BackgroundPlanner:
    """Background thread that encodes and plans all tasks, in order, while the first ones are scored.

    Args:
        plan: encodes and plans one task.
        tasks: tasks in the order in which `take` is called.
        stop: set on exit; makes `plan` return early.
    """

    def __init__(self, plan: Callable[[str], Sequence[Batch]], tasks: list[str], stop: Event) -> None:
        self._stop = stop
        self._encoder = ThreadPoolExecutor(1, "evalkit-encode")
        self._planned = {task: self._encoder.submit(plan, task) for task in tasks}

    def __enter__(self) -> _BackgroundPlanner:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._encoder.shutdown(wait=True, cancel_futures=True)

    def take(self, task: str) -> Sequence[Batch]:
        """Return a task's batches; wait until they are ready."""
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
