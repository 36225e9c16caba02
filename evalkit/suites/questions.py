"""Questions: the documents of a suite's tasks before any template, and which of them are read.

In: documents of any origin (`task_questions.py`: lm-eval's tasks; `request_files.py`). Out: `Question`s, those of a
selection. `question_loading.py` loads a suite's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evalkit.data.sampling import DocumentSelection, spread
from evalkit.inputs.values import text_digest

_BLOCK, _OF_SUBJECT = 4, 3
"""Documents next to each other in a sample, and the least of a subject: with fewer, what they share is unknown."""


@dataclass(frozen=True)
class LeafTask:
    """Properties of a leaf task."""

    alias: str
    """Name in lm-eval's printed tables, e.g. "anatomy"."""
    version: Any
    documents: int
    most_tokens: int | None = None
    """Of an input, with the continuation but its last token. A longer one loses its first tokens, BOS too, as in OLMES.
    None: no limit but the window, to which a context is truncated."""


@dataclass(frozen=True)
class Question:
    """One multiple-choice document, before any template.

    `contexts`, `continuations` and `gaps` have one entry for each choice. Choices share either the context (all tasks
    but WinoGrande) or the continuation (WinoGrande); the shared text is repeated.
    """

    task: str
    """Task of the suite, e.g. "mmlu"."""
    subtask: str
    """lm-eval's leaf task, e.g. "mmlu_anatomy"; the task itself if it has no subjects."""
    doc_id: int
    """lm-eval's index of the document within the subtask."""
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    delimiter: str
    gaps: tuple[str, ...]
    """Separator of context and continuation in running text: one space, or the white space of WinoGrande's sentence."""
    choices: tuple[str, ...]
    """The answer options, whose lengths lm-eval normalises by."""
    gold: int
    cluster: int
    """`doc_id` of the subtask's first document with the same source, which may be the document itself."""
    doc: dict[str, Any]
    leaf: LeafTask
    alone: tuple[str, ...] = ()
    """Contexts without the question, for unconditional log-likelihoods; empty: there is no context in these."""

    @property
    def label(self) -> str:
        return f"{self.subtask} document {self.doc_id}"

    @property
    def identity(self) -> str:
        """Identity of the document in its task."""
        return f"{self.subtask} {self.doc_id}"

    @cached_property
    def texts_digest(self) -> str:
        """Return a digest of the document's texts and gold answer.

        Code of a task may make others of the same document in another sample.
        """
        texts = (self.contexts, self.continuations, self.delimiter, self.gaps, self.choices, self.alone, self.gold)
        return text_digest(repr(texts))[:16]


def by_subtask(questions: Iterable[Question]) -> dict[str, list[Question]]:
    """Return subtask → its questions, in order."""
    subtasks: dict[str, list[Question]] = {}
    for question in questions:
        subtasks.setdefault(question.subtask, []).append(question)
    return subtasks


def chosen(
    task: str, questions: Sequence[Question], selection: DocumentSelection, estimate: int | None
) -> list[Question]:
    """Return the questions of a selection, of all documents of a task; `estimate` as of `load_questions`."""
    subtasks = by_subtask(questions)
    sizes = {name: len(members) for name, members in subtasks.items()}
    numbers = selected_documents(task, sizes, selection)
    return [subtasks[name][number] for name, of_subtask in numbers.items()
            for number in places_for_estimate(of_subtask, len(sizes), estimate)]  # fmt: skip


def places_for_estimate(numbers: list[int], subjects: int, estimate: int | None) -> list[int]:
    """Return the numbers of a subject's documents that an estimate reads; all of them without an estimate."""
    if estimate is None:
        return numbers
    return [numbers[index] for index in spread(len(numbers), max(_OF_SUBJECT, estimate // subjects), _BLOCK)]


def selected_documents(task: str, sizes: Mapping[str, int], selection: DocumentSelection) -> dict[str, list[int]]:
    """Return subject → the numbers of its documents that are read, in order; `sizes`: subject → its documents."""
    strata = [(name, number) for name, size in sizes.items() for number in range(size)]
    selected: dict[str, list[int]] = {name: [] for name in sizes}
    for index in selection.places(task, [name for name, _ in strata]):
        name, number = strata[index]
        selected[name].append(number)
    return selected
