"""Scoring of a suite's documents: the computer and the plan of its batches.

In: a plan and a loaded model. Out: batches, and their rows of the score table. While the model scores a task, a thread
encodes and plans the next one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import Batch, Batches, Planned
from evalkit.benchmarks.multiple_choice.encoded import EncodedQuestion, EncodedQuestions, question_item, question_rows
from evalkit.benchmarks.multiple_choice.plan import ChoicePlan
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.stored import encoded_questions
from evalkit.benchmarks.multiple_choice.tasks import Question, load_questions, selected_documents
from evalkit.benchmarks.request import TaskTokens, remembered
from evalkit.display import Say
from evalkit.models.locate import silent
from evalkit.models.spec import window_of
from evalkit.runs.batch_devices import BatchDevice, place_of
from evalkit.runs.score_table import SEGMENTS, ScoreRow
from evalkit.scoring import pack
from evalkit.scoring.sequences import SampledGroup, estimated_tokens

if TYPE_CHECKING:
    from evalkit.benchmarks.multiple_choice.plan import ChoicePlan, TaskPart
    from evalkit.benchmarks.multiple_choice.tasks import Question
    from evalkit.benchmarks.multiple_choice.templates import Template
    from evalkit.models.load import LoadedModel
    from evalkit.runs.journal import FinishedRows
    from evalkit.scoring.pack import SequenceSet


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
    scored: frozenset[int]
    """Indices into `SEGMENTS` of the segments that the template scores."""

    def warm(self) -> None:
        """See `Batch.warm`."""
        _ = self.batch.tree

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without texts, and with tokens once."""
        questions = {item: one.without_text() for item, one in self.questions.items()}
        return ChoiceContent, (self.batch, questions, self.scored)


@dataclass(frozen=True)
class ScoringSetup:
    """What scoring needs of a plan's documents under one template."""

    template: Template
    unconditional: bool
    """Whether choices are scored without their context too."""
    candidates: tuple[Question, ...]
    """Documents among which the start-up check chooses."""


def setups_of(plan: ChoicePlan) -> list[ScoringSetup]:
    """Return what scoring needs of a plan, for each template."""
    first: dict[Template, list[Question]] = {}
    for part in plan.parts:
        first.setdefault(part.template, []).extend(part.questions[:_CANDIDATES])
    return [ScoringSetup(template, plan.unconditional, tuple(members)) for template, members in first.items()]


class Scoring:
    """Computer of multiple-choice batches."""

    def __init__(self, setups: Sequence[ScoringSetup], loaded: LoadedModel, budget: int | None, say: Say) -> None:
        from evalkit.scoring.architecture import auto_budget
        from evalkit.scoring.engine import Engine

        self._engine = engine = Engine(
            loaded.model, budget or auto_budget(loaded.model), say, remembers=loaded.stock, files=loaded.files
        )
        engine.check(list(_candidates(setups, loaded)))
        self.facts = ScoringFacts(loaded.window, engine.budget, engine.shares)
        self.about = {
            "token_budget": engine.budget,
            "sharing": engine.describe(),
            "loaded": loaded.facts() | {"markers": _markers(setups, loaded.tokenizer)},
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
            for row in question_rows(content.questions[item.index], scores, content.scored)
        ]


def _candidates(setups: Sequence[ScoringSetup], loaded: LoadedModel) -> Iterator[SequenceSet]:
    """Yield the documents of the start-up check under their templates."""
    number = count()
    for setup in setups:
        prompter = Prompter(setup.template, loaded.tokenizer, loaded.window, silent)
        for one in prompter.encode(setup.candidates, setup.unconditional):
            yield question_item(next(number), one, _scored(setup.template))


@dataclass(frozen=True)
class _PlannedTask:
    """A task's tokens and batches, whose content is made one by one."""

    encoded: EncodedQuestions
    batches: Sequence[pack.PlannedBatch]

    def missing(self, part: TaskPart, finished: FinishedRows) -> Iterator[Batch]:
        """Yield the batches with documents without scores."""
        questions, scored = self.encoded.questions, _scored(part.template)
        for number, planned in enumerate(self.batches):
            # A finished batch is left out as a whole: the others' numbers stay the same
            if any(part.key_of(questions[item]) not in finished for item in planned.items):
                members = {item: self.encoded[item] for item in planned.items}
                items = tuple(question_item(item, one, scored) for item, one in members.items())
                content = ChoiceContent(pack.TreeBatch(planned.trunk, items), members, scored)
                work = sum(_work_of(one.question) for one in members.values())
                yield Batch(part.task, number, content, work, len(members), part.journal)


def batches_of(
    plan: ChoicePlan,
    facts: ScoringFacts,
    tokenizer: Any,
    finished: FinishedRows,
    say: Say,
) -> Planned:
    """Plan the batches that have documents without scores, part by part.

    Arguments: as of `Benchmark.batches`.
    """
    parts = plan.parts
    prompters = {part.template: Prompter(part.template, tokenizer, facts.window, say) for part in parts}
    identity, given = plan.manifest["specification"]["checkpoint"]["tokenizer"], plan.request.token_budget
    by_name = {part.journal: part for part in parts}

    stopped = threading.Event()

    def planned(name: str) -> _PlannedTask:
        """Encode and plan a part; within `remembering`, that of an earlier run with the same tokens."""
        part = by_name[name]
        questions = part.questions
        # Several orders of the choices are more contexts
        what = (part.task, len(questions[0].contexts), part.template.content_hash)
        key = (plan.documents_key, identity, facts, *what)
        groups = [question.subtask for question in questions]

        def make() -> _PlannedTask:
            encoded = encoded_questions(prompters[part.template], questions, plan.unconditional, stopped)
            return _PlannedTask(encoded, pack.plan_arrays(encoded.arrays, groups, facts.token_budget))

        found = remembered("batches", key, make, most=_TASKS_KEPT)
        if facts.shares and given == facts.token_budget:
            labels = [question.label for question in questions]
            pack.check_arrays(found.batches, found.encoded.arrays, groups, labels, given)
        return found

    missing = [name for name, part in by_name.items() if part.is_missing(finished)]

    def batches() -> Batches:
        with ThreadPoolExecutor(1, "evalkit-encode") as thread:
            try:
                # A started run keeps its budget, so one that is too small for a later task fails before scoring
                ahead = len(missing) if given is not None else 1
                tasks = deque(thread.submit(planned, name) for name in missing[:ahead])
                for task in list(tasks) if given is not None else ():
                    task.result()
                rest = iter(missing[ahead:])
                for name in missing:
                    found = tasks.popleft().result()
                    tasks.extend(thread.submit(planned, following) for following in islice(rest, 1))
                    for batch in found.missing(by_name[name], finished):
                        yield batch
                        if tasks and tasks[0].done():
                            tasks[0].result()  # a failure is reported before the task's turn
            finally:
                stopped.set()

    work = {part.key_of(question): _work_of(question) for part in parts for question in part.questions}
    done = sum(size for key, size in work.items() if key in finished)
    return Planned(batches(), sum(work.values()), done, plan.message, stopped.set)


def _scored(template: Template) -> frozenset[int]:
    """Return the indices of the segments that a template scores."""
    return frozenset(map(SEGMENTS.index, template.score))


def _work_of(question: Question) -> int:
    """Return the characters that a question adds to the tree, which approximate its share of the time."""
    return len(question.contexts[0]) + sum(map(len, question.continuations))


def _markers(setups: Sequence[ScoringSetup], tokenizer: Any) -> Mapping[str, str]:
    """Return literal marker of a template, such as [INST] → whether the tokenizer has it as a special token."""
    special = set(tokenizer.all_special_tokens)
    parts = [part for setup in setups for part in setup.template.parts if part.segment == "special"]
    literals = [part.text.strip() for part in parts]
    return {literal: "special token" if literal in special else "text" for literal in literals}


def estimated(plan: ChoicePlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
    """Return the estimates for each task; arguments as in `Benchmark.token_counts`."""
    window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
    prompter = Prompter(plan.template, tokenizer, window, say)
    found = load_questions(plan.suite, plan.library, plan.request.selection, plan.others, sample)
    return [task_tokens(plan, prompter, task, questions) for task, questions in found.items()]


def task_tokens(plan: ChoicePlan, prompter: Prompter, task: str, questions: Sequence[Question]) -> TaskTokens:
    """Return the estimates for a task.

    Args:
        plan: its limit is that of the task.
        prompter: of the template.
        task: its name.
        questions: sampled documents.

    Raises:
        EvalkitError: a document cannot be computed.
    """
    subjects: dict[str, list[Question]] = {}
    for question in questions:
        subjects.setdefault(question.subtask, []).append(question)
    every = {name: members[0].leaf.documents for name, members in subjects.items()}
    sizes = {name: len(found) for name, found in selected_documents(task, every, plan.request.selection).items()}
    groups, rows = [], 0.0
    for name, members in subjects.items():
        encoded = list(prompter.encode(members, plan.unconditional))
        sequences = [one.tokens for document in encoded for one in document.sequences + document.unconditional]
        groups.append(SampledGroup(sequences, len(members), sizes[name]))
        rows += sum(len(document.sequences) for document in encoded) * sizes[name] / len(members)
    return TaskTokens(task, sum(sizes.values()), len(questions), rows, *estimated_tokens(groups))
