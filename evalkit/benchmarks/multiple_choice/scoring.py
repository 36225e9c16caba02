"""Scoring of a suite's documents: the computer and the plan of its batches.

In: a plan and a loaded model. Out: batches, and their rows of the score table. While the model scores a task, a thread
encodes and plans the next one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from evalkit.benchmarks.base import Batch, Batches, Planned
from evalkit.benchmarks.multiple_choice.encoded import (
    EncodedQuestion,
    EncodedQuestions,
    question_rows,
    question_sequences,
)
from evalkit.benchmarks.multiple_choice.plan import ChoicePlan, TaskPart
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.stored import encoded_questions
from evalkit.benchmarks.multiple_choice.tasks import Question, load_questions, selected_documents
from evalkit.benchmarks.multiple_choice.templates import Template
from evalkit.benchmarks.request import TaskTokens, remembered
from evalkit.display import Say
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import window_of
from evalkit.runs.batch_devices import BatchDevice, place_of
from evalkit.runs.score_table import SEGMENTS, ScoreRow
from evalkit.scoring.pack import PlannedBatch, TreeBatch
from evalkit.scoring.pack import plan as plan_batches
from evalkit.scoring.sequences import SampledGroup, Sequences, SequenceSet, estimated_tokens

if TYPE_CHECKING:
    from evalkit.models.loading.load import LoadedModel
    from evalkit.runs.journal import FinishedRows

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

    batch: TreeBatch
    questions: dict[int, EncodedQuestion]
    """Index of an item → its document, without its texts and tokens."""
    scored: frozenset[int]
    """Indices into `SEGMENTS` of the segments that the template scores."""

    def warm(self) -> None:
        """See `Batch.warm`."""
        _ = self.batch.tree


class ScoringSetup(NamedTuple):
    """What scoring needs of a plan's documents under one template."""

    template: Template
    unconditional: bool
    """Whether choices are scored without their context too."""
    candidates: list[Question]
    """Documents among which the start-up check chooses."""


def setups_of(plan: ChoicePlan) -> list[ScoringSetup]:
    """Return what scoring needs of a plan, for each template."""
    setups: dict[Template, ScoringSetup] = {}
    for part in plan.parts:
        setup = setups.setdefault(part.template, ScoringSetup(part.template, plan.unconditional, []))
        setup.candidates.extend(part.questions[:_CANDIDATES])
    return list(setups.values())


class Scoring:
    """Computer of multiple-choice batches."""

    def __init__(self, setups: Sequence[ScoringSetup], loaded: LoadedModel, budget: int | None, say: Say) -> None:
        from evalkit.scoring.architecture import auto_budget
        from evalkit.scoring.engine import Engine

        self._engine = engine = Engine(
            loaded.model, budget or auto_budget(loaded.model), say, remembers=loaded.stock, files=loaded.files
        )
        special = set(loaded.tokenizer.all_special_tokens)
        markers: dict[str, str] = {}
        candidates: list[SequenceSet] = []
        for template, unconditional, members in setups:
            prompter = Prompter(template, loaded.tokenizer, loaded.window, silent)
            sequences = question_sequences(list(prompter.encode(members, unconditional)), _scored(template))
            candidates += [sequences[number] for number in range(len(members))]
            for literal in (part.text.strip() for part in template.parts if part.segment == "special"):
                markers[literal] = "special token" if literal in special else "text"
        engine.check(Sequences.of(candidates))
        self.facts = ScoringFacts(loaded.window, engine.budget, engine.shares)
        self.about = {
            "token_budget": engine.budget,
            "sharing": engine.describe(),
            "loaded": loaded.facts() | {"markers": markers},
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
            for row in question_rows(content.questions[item], scores, content.scored)
        ]


def batches_of(plan: ChoicePlan, facts: ScoringFacts, tokenizer: Any, finished: FinishedRows, say: Say) -> Planned:
    """Plan the batches that have documents without scores, part by part.

    Arguments: as of `Benchmark.batches`.
    """
    parts = plan.parts
    prompters = {template: Prompter(template, tokenizer, facts.window, say) for template in plan.templates.values()}
    identity, given = plan.manifest["specification"]["checkpoint"]["tokenizer"], plan.request.token_budget
    missing = [part for part in parts if part.is_missing(finished)]
    stopped = threading.Event()

    def planned(part: TaskPart) -> tuple[EncodedQuestions, Sequences, list[PlannedBatch]]:
        """Encode and plan a part; within `remembering`, that of an earlier run with the same tokens."""
        questions = part.questions
        must_fit = facts.shares and given == facts.token_budget
        # Several orders of the choices are more contexts
        what = (part.task, len(questions[0].contexts), part.template.content_hash, must_fit)

        def make() -> tuple[EncodedQuestions, Sequences, list[PlannedBatch]]:
            encoded = encoded_questions(prompters[part.template], questions, plan.unconditional, stopped)
            sequences = encoded.sequences(_scored(part.template))
            return encoded, sequences, plan_batches(sequences, facts.token_budget, must_fit)

        key = (plan.documents_key, identity, facts, *what)
        return remembered("batches", key, make, most=_TASKS_KEPT)

    def batches() -> Batches:
        with ThreadPoolExecutor(1, "evalkit-encode") as thread:
            try:
                # A started run keeps its budget, so one that is too small for a later task fails before scoring
                ahead = len(missing) if given is not None else 1
                tasks = deque(thread.submit(planned, part) for part in missing[:ahead])
                for task in list(tasks) if given is not None else ():
                    task.result()
                rest = iter(missing[ahead:])
                for part in missing:
                    encoded, sequences, found = tasks.popleft().result()
                    tasks.extend(thread.submit(planned, following) for following in islice(rest, 1))
                    for batch in _missing(part, encoded, sequences, found, finished):
                        yield batch
                        if tasks and tasks[0].done():
                            tasks[0].result()  # a failure is reported before the task's turn
            finally:
                stopped.set()

    work = {part.key_of(question): _work_of(question) for part in parts for question in part.questions}
    done = sum(size for key, size in work.items() if key in finished)
    return Planned(batches(), sum(work.values()), done, plan.message, stopped.set)


def _missing(
    part: TaskPart,
    encoded: EncodedQuestions,
    sequences: Sequences,
    batches: Sequence[PlannedBatch],
    finished: FinishedRows,
) -> Iterator[Batch]:
    """Yield the batches with documents without scores, whose content is made one by one."""
    for number, planned in enumerate(batches):
        # A finished batch is left out as a whole: the others' numbers stay the same
        if all(part.key_of(encoded.questions[item]) in finished for item in planned.items):
            continue
        members = {item: encoded[item].without_text() for item in planned.items}
        content = ChoiceContent(planned.of(sequences), members, _scored(part.template))
        work = sum(_work_of(encoded.questions[item]) for item in planned.items)
        yield Batch(part.task, number, content, work, len(members), part.journal)


def _scored(template: Template) -> frozenset[int]:
    """Return the indices of the segments that a template scores."""
    return frozenset(map(SEGMENTS.index, template.score))


def _work_of(question: Question) -> int:
    """Return the characters that a question adds to the tree, which approximate its share of the time."""
    return len(question.contexts[0]) + sum(map(len, question.continuations))


def estimated(plan: ChoicePlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
    """Return the estimates for each task under all prompts; no tree joins two templates.

    Arguments: as in `Benchmark.token_counts`.
    """
    window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
    prompters = {template: Prompter(template, tokenizer, window, say) for template in plan.templates.values()}
    found = load_questions(plan.suite, plan.library, plan.request.selection, plan.others, sample)
    estimates: dict[str, TaskTokens] = {}
    for part in plan.parts_of(found):
        tokens = task_tokens(plan, prompters[part.template], part.task, part.questions)
        if before := estimates.get(part.task):
            sums = {name: getattr(before, name) + getattr(tokens, name) for name in ("rows", "alone", "distinct")}
            tokens = replace(before, **sums)
        estimates[part.task] = tokens
    return list(estimates.values())


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
