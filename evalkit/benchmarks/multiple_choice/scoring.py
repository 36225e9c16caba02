"""Scoring of a suite's documents: plan → batches → rows of the score table.

In: a plan and a loaded model. Out: batches, and their rows. From top to bottom: the plan of the batches, their
computer, and estimates without a model. While the model scores a task, a thread encodes and plans the next one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import Batch, Batches, Budget, Planned
from evalkit.benchmarks.multiple_choice.plan import ChoicePlan, TaskPart
from evalkit.benchmarks.request import TaskTokens, remembered
from evalkit.display import Say
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import window_of
from evalkit.runs.score_table import SEGMENTS, ScoreRow
from evalkit.runs.traits import BatchDevice, place_of
from evalkit.scoring.pack import PlannedBatch, SampledGroup, TreeBatch, estimated_tokens
from evalkit.scoring.pack import plan as plan_batches
from evalkit.suites.prompts import (
    EncodedQuestion,
    EncodedQuestions,
    Prompter,
    question_rows,
    question_sequences,
)
from evalkit.suites.questions import Question, by_subtask, selected_documents
from evalkit.suites.templates import Template

if TYPE_CHECKING:
    from evalkit.models.loading.load import LoadedModel
    from evalkit.runs.journal import FinishedRows

_CANDIDATES = 2
"""Questions of each task among which the start-up check chooses."""
_TASKS_KEPT = 16
"""Tasks whose tokens are kept for the next checkpoint with the same tokenizer."""


class Stopped(Exception):
    """The batches are not needed any more."""


@dataclass(frozen=True)
class ScoringFacts:
    """Properties of a scoring model that planning needs."""

    window: int
    token_budget: int
    shares: bool
    """Whether sequences share the computation of common prefixes."""


@dataclass(frozen=True)
class ChoiceContent:
    batch: TreeBatch
    questions: dict[int, EncodedQuestion]
    """Index of an item → its document, without its texts and tokens."""
    scored: frozenset[int]

    def warm(self) -> None:
        _ = self.batch.tree


def batches_of(plan: ChoicePlan, facts: ScoringFacts, tokenizer: Any, finished: FinishedRows, say: Say) -> Planned:
    """Plan the batches that have documents without scores, part by part; arguments as of `Benchmark.batches`."""
    prompters = _prompters(plan, tokenizer, facts.window, say)
    identity, requested = plan.manifest["specification"]["checkpoint"]["tokenizer"], plan.request.token_budget
    missing = [part.without(finished.without_batch) for part in plan.steps if part.is_missing(finished)]
    stopped = threading.Event()

    def until_stopped(encoded: Iterable[EncodedQuestion]) -> Iterator[EncodedQuestion]:
        for question in encoded:
            if stopped.is_set():
                raise Stopped
            yield question

    def planned(part: TaskPart) -> tuple[EncodedQuestions, list[PlannedBatch]]:
        """Encode and plan a part; within `remembering`, that of an earlier run with the same tokens."""
        must_fit = facts.shares and requested == facts.token_budget

        def make() -> tuple[EncodedQuestions, list[PlannedBatch]]:
            members = prompters[part.template].encode(part.questions, plan.unconditional(part.task))
            encoded = EncodedQuestions.of(until_stopped(members), _scored(part.template))
            return encoded, plan_batches(encoded.sequences, facts.token_budget, must_fit)

        # Several orders of the choices are more contexts
        documents = tuple(map(part.key_of, part.questions))
        what = (part.task, documents, len(part.questions[0].contexts), part.template.content_hash, must_fit)
        return remembered("batches", (plan.documents_key, identity, facts, *what), make, most=_TASKS_KEPT)

    def batches() -> Batches:
        with ThreadPoolExecutor(1, "evalkit-encode") as thread:
            try:
                # A started run keeps its budget, so one that is too small for a later task fails before scoring
                ahead = len(missing) if requested is not None else 1
                tasks = deque(thread.submit(planned, part) for part in missing[:ahead])
                for task in list(tasks) if requested is not None else ():
                    task.result()
                rest = iter(missing[ahead:])
                for part in missing:
                    encoded, of_part = tasks.popleft().result()
                    tasks.extend(thread.submit(planned, following) for following in islice(rest, 1))
                    for batch in _missing(part, encoded, of_part, finished):
                        yield batch
                        if tasks and tasks[0].done():
                            tasks[0].result()  # a failure is reported before the task's turn
            finally:
                stopped.set()

    work = {part.key_of(question): _work_of(question) for part in plan.parts for question in part.questions}
    done = sum(size for key, size in work.items() if key in finished)
    message = plan.prompts.message(
        {part.task: len(part.orders) for part in plan.parts if part.template is plan.template}
    )
    return Planned(batches(), sum(work.values()), done, message, stopped.set)


def _missing(
    part: TaskPart, encoded: EncodedQuestions, batches: Sequence[PlannedBatch], finished: FinishedRows
) -> Iterator[Batch]:
    """Yield the batches with documents without scores, whose content is made one by one."""
    for number, planned in enumerate(batches, part.first):
        questions = {item: part.questions[item] for item in planned.items}
        # A finished batch is left out as a whole: the others' numbers stay the same
        if any(part.key_of(question) not in finished for question in questions.values()):
            members = {item: encoded.without_text(item, question) for item, question in questions.items()}
            content = ChoiceContent(planned.of(encoded.sequences), members, _scored(part.template))
            work = sum(map(_work_of, questions.values()))
            yield Batch(part.task, number, content, work, len(members), part.journal)


def _prompters(plan: ChoicePlan, tokenizer: Any, window: int, say: Say) -> dict[Template, Prompter]:
    templates = plan.prompts.templates.values()
    return {template: Prompter(template, tokenizer, window, say) for template in templates}


def _scored(template: Template) -> frozenset[int]:
    return frozenset(map(SEGMENTS.index, template.score))


def _work_of(question: Question) -> int:
    """Return the characters that a question adds to the tree, which approximate its share of the time."""
    return len(question.contexts[0]) + sum(map(len, question.continuations))


Setup = dict[Template, list[Question]]
"""What scoring needs of a plan: template → documents among which the start-up check chooses."""


def setup_of(plan: ChoicePlan) -> Setup:
    setup: Setup = {}
    for part in plan.parts:
        single = [question for question in part.questions[_CANDIDATES:] if len(question.continuations) == 1]
        # Of a task in which few documents have one answer, one of these too: it needs the argmax
        setup.setdefault(part.template, []).extend([*part.questions[:_CANDIDATES], *single[:1]])
    return setup


class Scoring:
    """Computer of multiple-choice batches; see `Benchmark.computer`."""

    def __init__(self, setup: Setup, loaded: LoadedModel, budget: Budget, say: Say) -> None:
        from evalkit.scoring.architecture import auto_budget
        from evalkit.scoring.engine import Engine

        greedy = any(len(question.continuations) == 1 for questions in setup.values() for question in questions)
        self._engine = engine = Engine(
            loaded.model, budget.scored or auto_budget(loaded.model), say, greedy,
            remembers=loaded.stock, files=loaded.files,
        )  # fmt: skip
        special = set(loaded.tokenizer.all_special_tokens)
        markers: dict[str, str] = {}
        candidates: list[EncodedQuestion] = []
        for template, questions in setup.items():
            candidates += Prompter(template, loaded.tokenizer, loaded.window, silent).encode(questions)
            for literal in (part.text.strip() for part in template.parts if part.segment == "special"):
                markers[literal] = "special token" if literal in special else "text"
        engine.check(question_sequences(candidates, frozenset()))
        self.facts = ScoringFacts(loaded.window, engine.budget, engine.shares)
        self.about = {
            "token_budget": engine.budget,
            "sharing": engine.describe(),
            "loaded": loaded.facts() | {"markers": markers},
        }
        self._place = place_of(loaded.device, engine.kernel if engine.shares else "alone")

    def place(self, batch: Batch | None = None) -> BatchDevice:
        return self._place

    def compute(self, batch: Batch) -> list[ScoreRow]:
        content = batch.content
        return [
            row
            for item, scores in self._engine.score(content.batch)
            for row in question_rows(content.questions[item], scores, content.scored)
        ]


def estimated(plan: ChoicePlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
    """Return the estimates of `Benchmark.token_counts` for each task under all prompts; no tree joins two templates."""
    window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
    prompters = _prompters(plan, tokenizer, window, say)
    sampled = plan.selected(plan.request.selection, sample)
    by_task: dict[str, TaskTokens] = {}
    for part in plan.parts_of(sampled):
        tokens = task_tokens(plan, prompters[part.template], part.task, part.questions)
        if before := by_task.get(part.task):
            sums = {name: getattr(before, name) + getattr(tokens, name) for name in ("rows", "alone", "distinct")}
            tokens = replace(before, **sums)
        by_task[part.task] = tokens
    return list(by_task.values())


def task_tokens(plan: ChoicePlan, prompter: Prompter, task: str, questions: Sequence[Question]) -> TaskTokens:
    """Return the estimates for a task from sampled documents."""
    subjects = by_subtask(questions)
    every = {name: members[0].leaf.documents for name, members in subjects.items()}
    sizes = {name: len(chosen) for name, chosen in selected_documents(task, every, plan.request.selection).items()}
    groups, rows = [], 0.0
    for name, members in subjects.items():
        encoded = list(prompter.encode(members, plan.unconditional(task)))
        sequences = [
            sequence.tokens for document in encoded for sequence in document.sequences + document.unconditional
        ]
        groups.append(SampledGroup(sequences, len(members), sizes[name]))
        rows += sum(len(document.sequences) for document in encoded) * sizes[name] / len(members)
    return TaskTokens(task, sum(sizes.values()), len(questions), rows, *estimated_tokens(groups))
