"""Scoring of a suite's documents: the computer and the plan of its batches.

In: a plan and a loaded model. Out: batches, and their rows of the score table. A background thread encodes and plans
the tasks, in order, while the model scores the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import Batch, Batches, Say
from evalkit.benchmarks.multiple_choice.background import BackgroundPlanner, Pace
from evalkit.benchmarks.multiple_choice.encoded import EncodedQuestion, EncodedQuestions
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.rows import question_item, question_rows
from evalkit.benchmarks.multiple_choice.stored_tokens import encoded_questions
from evalkit.benchmarks.remembered import is_awaited, remembered
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
    """Index of an item → its document."""

    def warm(self) -> None:
        """See `Batch.warm`."""
        _ = self.batch.tree

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without texts, and with tokens once."""
        return ChoiceContent, (self.batch, {item: one.without_text() for item, one in self.questions.items()})


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


@dataclass(frozen=True)
class _PlannedTask:
    """A task's tokens and batches, whose content is made one by one."""

    task: str
    encoded: EncodedQuestions
    batches: Sequence[pack.PlannedBatch]

    def missing(self, finished: FinishedRows, scored: frozenset[int]) -> Iterator[Batch]:
        """Yield the batches with documents without scores."""
        questions = self.encoded.questions
        for number, planned in enumerate(self.batches):
            # A finished batch is left out as a whole: the others' numbers stay the same
            if any(key_of(questions[item]) not in finished for item in planned.items):
                yield self._batch(number, planned, scored)

    def _batch(self, number: int, planned: pack.PlannedBatch, scored: frozenset[int]) -> Batch:
        members = {item: self.encoded[item] for item in planned.items}
        items = tuple(question_item(item, one, scored) for item, one in members.items())
        work = sum(work_of(one.question) for one in members.values())
        return Batch(
            self.task, number, ChoiceContent(pack.TreeBatch(planned.trunk, items), members), work, len(members)
        )


def batches_of(
    plan: ChoicePlan, facts: ScoringFacts, tokenizer: Any, finished: FinishedRows, say: Say
) -> tuple[Batches, Callable[[], None]]:
    """Return the batches that have documents without scores, task by task, and `Planned.stop`."""
    prompter, scored = Prompter(plan.template, tokenizer, facts.window, say), _scored(plan.template)
    specification = plan.manifest["specification"]
    tokenized = (plan.documents_key, specification["checkpoint"]["tokenizer"], specification["template"], facts)
    given = plan.request.token_budget

    def planned(task: str, pace: Pace) -> _PlannedTask:
        """Encode and plan a task; within `remembering`, that of an earlier run with the same tokens."""

        key, questions = (tokenized, task), plan.questions[task]
        groups = [question.subtask for question in questions]

        def make() -> _PlannedTask:
            # Another run that waits for these tokens is not kept waiting by this run's pace
            own = partial(pace, count=len(questions), is_awaited=lambda: is_awaited("batches", key))
            encoded = encoded_questions(prompter, questions, plan.unconditional, own)
            return _PlannedTask(task, encoded, pack.plan_arrays(encoded.arrays, groups, facts.token_budget))

        found = remembered("batches", key, make, most=_TASKS_KEPT)
        if facts.shares and given == facts.token_budget:
            labels = [question.label for question in questions]
            pack.check_arrays(found.batches, found.encoded.arrays, groups, labels, given)
        return found

    tasks = [task for task, members in plan.questions.items() if any(key_of(one) not in finished for one in members)]
    planner = BackgroundPlanner(planned, tasks)

    def batches() -> Batches:
        with planner:
            if given is not None:
                # Fail before scoring if the budget is too small for a later task: a started run keeps its budget
                planner.wait()
            for task in tasks:
                found = planner.take(task)
                for batch in found.missing(finished, scored):
                    yield batch
                    planner.scored(task, (batch.number + 1) / len(found.batches))
                    planner.raise_failure()

    return batches(), planner.stop


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
