"""Scoring of a suite's documents: plan → batches → rows of the score table.

In: a plan and a loaded model. Out: batches, and their rows. From top to bottom: the token sequences of a task, the plan
of the batches, their computer, and estimates without a model. While the model scores a task, a thread encodes and plans
the next one.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.base import Batch, Batches, Planned
from evalkit.benchmarks.multiple_choice.plan import ChoicePlan, TaskPart
from evalkit.benchmarks.multiple_choice.prompts import (
    EncodedQuestion,
    Prompter,
    TokenSequence,
    question_item,
    question_rows,
)
from evalkit.benchmarks.multiple_choice.tasks import Question, load_questions, selected_documents
from evalkit.benchmarks.multiple_choice.templates import Template
from evalkit.benchmarks.request import TaskTokens, remembered
from evalkit.display import Say
from evalkit.models.locate import silent
from evalkit.models.spec import window_of
from evalkit.runs.batch_devices import BatchDevice, place_of
from evalkit.runs.score_table import SEGMENTS, ScoreRow
from evalkit.scoring import pack
from evalkit.scoring.sequences import SampledGroup, SequenceArrays, estimated_tokens, offsets

if TYPE_CHECKING:
    from evalkit.models.load import LoadedModel
    from evalkit.runs.journal import FinishedRows

_CANDIDATES = 2
"""Questions of each task among which the start-up check chooses."""
_TASKS_KEPT = 16
"""Tasks whose tokens are kept for the next checkpoint with the same tokenizer."""
_NO_TOKENS = np.zeros(0, np.int32)


class Stopped(Exception):
    """The batches are not needed any more."""


@dataclass(frozen=True)
class TaskSequences:
    """The sequences of a task's questions in flat arrays; those of MMLU, 56,168, take 45 MB."""

    arrays: SequenceArrays
    """The sequences of each question: those of its choices, then the unconditional ones."""
    segments: NDArray[np.int8]
    """[tokens] index into `SEGMENTS` of each token's segment."""
    cuts: NDArray[np.int32]
    """[sequences, 2] number of truncated and of straddling tokens."""

    @classmethod
    def of(cls, encoded: Iterable[EncodedQuestion]) -> TaskSequences:
        """Join the sequences of questions."""
        tokens, segments, cuts = array("i"), array("b"), array("i")
        lengths, counts = array("q"), array("q")
        for question in encoded:
            sequences = question.sequences + question.unconditional
            counts.append(len(sequences))
            for sequence in sequences:
                tokens.frombytes(sequence.tokens.tobytes())
                segments.frombytes(sequence.segments.tobytes())
                lengths.append(len(sequence.tokens))
                cuts.extend((sequence.truncated, sequence.straddles))
        arrays = SequenceArrays(np.asarray(tokens), offsets(lengths), offsets(counts))
        return cls(arrays, np.asarray(segments), np.asarray(cuts).reshape(-1, 2))

    def encoded(self, index: int, question: Question) -> EncodedQuestion:
        """Return a question with its sequences, by its number."""
        sequences = []
        for number in range(*self.arrays.first[index : index + 2].tolist()):
            tokens = slice(*self.arrays.starts[number : number + 2].tolist())
            cuts = self.cuts[number].tolist()
            sequences.append(TokenSequence(self.arrays.tokens[tokens], self.segments[tokens], *cuts))
        count = len(question.contexts)
        return EncodedQuestion(question, tuple(sequences[:count]), tuple(sequences[count:]))


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
    """Index of an item → its document, without its texts and tokens."""
    scored: frozenset[int]
    """Indices into `SEGMENTS` of the segments that the template scores."""

    def warm(self) -> None:
        """See `Batch.warm`."""
        _ = self.batch.tree


def batches_of(plan: ChoicePlan, facts: ScoringFacts, tokenizer: Any, finished: FinishedRows, say: Say) -> Planned:
    """Plan the batches that have documents without scores, part by part.

    Arguments: as of `Benchmark.batches`.
    """
    parts = plan.parts
    prompters = _prompters(plan, tokenizer, facts.window, say)
    identity, requested = plan.manifest["specification"]["checkpoint"]["tokenizer"], plan.request.token_budget
    missing = [part for part in parts if part.is_missing(finished)]
    stopped = threading.Event()

    def until_stopped(encoded: Iterable[EncodedQuestion]) -> Iterator[EncodedQuestion]:
        for question in encoded:
            if stopped.is_set():
                raise Stopped
            yield question

    def planned(part: TaskPart) -> tuple[TaskSequences, list[pack.PlannedBatch]]:
        """Encode and plan a part; within `remembering`, that of an earlier run with the same tokens."""
        questions, groups = part.questions, [question.subtask for question in part.questions]

        def make() -> tuple[TaskSequences, list[pack.PlannedBatch]]:
            encoded = prompters[part.template].encode(questions, plan.unconditional)
            sequences = TaskSequences.of(until_stopped(encoded))
            return sequences, pack.plan_arrays(sequences.arrays, groups, facts.token_budget)

        # Several orders of the choices are more contexts
        what = (part.task, len(questions[0].contexts), part.template.content_hash)
        sequences, batches = remembered("batches", (plan.documents_key, identity, facts, *what), make, most=_TASKS_KEPT)
        if facts.shares and requested == facts.token_budget:
            labels = [question.label for question in questions]
            pack.check_arrays(batches, sequences.arrays, groups, labels, requested)
        return sequences, batches

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
                    sequences, of_part = tasks.popleft().result()
                    tasks.extend(thread.submit(planned, following) for following in islice(rest, 1))
                    for batch in _missing(part, sequences, of_part, finished):
                        yield batch
                        if tasks and tasks[0].done():
                            tasks[0].result()  # a failure is reported before the task's turn
            finally:
                stopped.set()

    work = {part.key_of(question): _work_of(question) for part in parts for question in part.questions}
    done = sum(size for key, size in work.items() if key in finished)
    message = plan.prompts.message({part.task: len(part.orders) for part in parts if part.template is plan.template})
    return Planned(batches(), sum(work.values()), done, message, stopped.set)


def _missing(
    part: TaskPart, sequences: TaskSequences, batches: Sequence[pack.PlannedBatch], finished: FinishedRows
) -> Iterator[Batch]:
    """Yield the batches with documents without scores, whose content is made one by one."""
    scored = _scored(part.template)
    for number, planned in enumerate(batches):
        questions = {item: part.questions[item] for item in planned.items}
        # A finished batch is left out as a whole: the others' numbers stay the same
        if all(part.key_of(question) in finished for question in questions.values()):
            continue
        members = {item: sequences.encoded(item, question) for item, question in questions.items()}
        items = tuple(question_item(item, encoded, scored) for item, encoded in members.items())
        without_text = {item: _without_text(encoded) for item, encoded in members.items()}
        content = ChoiceContent(pack.TreeBatch(planned.trunk, items), without_text, scored)
        work = sum(map(_work_of, questions.values()))
        yield Batch(part.task, number, content, work, len(members), part.journal)


def _without_text(encoded: EncodedQuestion) -> EncodedQuestion:
    question = replace(encoded.question, contexts=(), continuations=(), gaps=(), doc={})
    both = (encoded.sequences, encoded.unconditional)
    kept = (tuple(replace(sequence, tokens=_NO_TOKENS) for sequence in sequences) for sequences in both)
    return EncodedQuestion(question, *kept)


def _prompters(plan: ChoicePlan, tokenizer: Any, window: int, say: Say) -> dict[Template, Prompter]:
    templates = plan.prompts.templates.values()
    return {template: Prompter(template, tokenizer, window, say) for template in templates}


def _scored(template: Template) -> frozenset[int]:
    """Return the indices of the segments that a template scores."""
    return frozenset(map(SEGMENTS.index, template.score))


def _work_of(question: Question) -> int:
    """Return the characters that a question adds to the tree, which approximate its share of the time."""
    return len(question.contexts[0]) + sum(map(len, question.continuations))


Setup = dict[Template, list[Question]]
"""What scoring needs of a plan: template → documents among which the start-up check chooses."""


def setup_of(plan: ChoicePlan) -> Setup:
    """Return what scoring needs of a plan."""
    setup: Setup = {}
    for part in plan.parts:
        setup.setdefault(part.template, []).extend(part.questions[:_CANDIDATES])
    return setup


class Scoring:
    """Computer of multiple-choice batches."""

    def __init__(self, setup: Setup, loaded: LoadedModel, budget: int | None, say: Say) -> None:
        from evalkit.scoring.architecture import auto_budget
        from evalkit.scoring.engine import Engine

        self._engine = engine = Engine(
            loaded.model, budget or auto_budget(loaded.model), say, remembers=loaded.stock, files=loaded.files
        )
        special = set(loaded.tokenizer.all_special_tokens)
        markers: dict[str, str] = {}
        candidates: list[pack.SequenceSet] = []
        for template, questions in setup.items():
            prompter = Prompter(template, loaded.tokenizer, loaded.window, silent)
            for encoded in prompter.encode(questions):
                candidates.append(question_item(len(candidates), encoded, _scored(template)))
            for literal in (part.text.strip() for part in template.parts if part.segment == "special"):
                markers[literal] = "special token" if literal in special else "text"
        engine.check(candidates)
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
            for row in question_rows(content.questions[item.index], scores, content.scored)
        ]


def estimated(plan: ChoicePlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
    """Return the estimates for each task under all prompts; no tree joins two templates.

    Arguments: as in `Benchmark.token_counts`.
    """
    window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
    prompters = _prompters(plan, tokenizer, window, say)
    sampled = load_questions(plan.suite, plan.library, plan.request.selection, plan.others, sample)
    estimates: dict[str, TaskTokens] = {}
    for part in plan.parts_of(sampled):
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
    sizes = {name: len(chosen) for name, chosen in selected_documents(task, every, plan.request.selection).items()}
    groups, rows = [], 0.0
    for name, members in subjects.items():
        encoded = list(prompter.encode(members, plan.unconditional))
        sequences = [one.tokens for document in encoded for one in document.sequences + document.unconditional]
        groups.append(SampledGroup(sequences, len(members), sizes[name]))
        rows += sum(len(document.sequences) for document in encoded) * sizes[name] / len(members)
    return TaskTokens(task, sum(sizes.values()), len(questions), rows, *estimated_tokens(groups))
