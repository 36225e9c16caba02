"""Parts of a run of choices: the documents of a task under one template. A part has its own name in the journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evalkit.benchmarks.multiple_choice.templates import Template

if TYPE_CHECKING:
    from evalkit.benchmarks.multiple_choice.tasks import Question
    from evalkit.runs.finished_rows import FinishedRows, Key


@dataclass(frozen=True)
class TaskPart:
    """Documents of a task under one template: the whole task, unless a run has several prompts."""

    task: str
    template: Template
    questions: Sequence[Question]
    prompt: str = ""
    """Name of the prompt, if a run has several."""

    @property
    def journal(self) -> str:
        """Name of the part in the journal."""
        return f"{self.task} {self.prompt}" if self.prompt else self.task

    def key_of(self, question: Question) -> Key:
        """Return a document's key in the journal."""
        return self.journal, question.subtask, question.doc_id

    def is_missing(self, finished: FinishedRows) -> bool:
        """Return whether a document has no scores."""
        return any(self.key_of(question) not in finished for question in self.questions)
