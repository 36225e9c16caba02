"""Documents that several runs of a task have: their order in a page, and each run's places in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.document_views import Piece, TaskView
from evalkit.data.sampling import DocumentSample
from evalkit.runs.folder import Run
from evalkit.scores.table import SEGMENTS

DocumentName: TypeAlias = tuple[str, Any]
"""Subtask, and the document's id in it."""


@dataclass(frozen=True)
class ViewOfRun:
    """A run's view of a task."""

    number: int
    """Place of the run in the page."""
    run: Run
    view: TaskView


class Union:
    """The documents of several runs of one task.

    Args:
        task: the task's name.
        by_run: the documents of each run, in order.
        sample: which to take; None: all.
    """

    def __init__(self, task: str, by_run: Sequence[Sequence[DocumentName]], sample: DocumentSample | None) -> None:
        every = list(dict.fromkeys(name for names in by_run for name in names))
        taken = range(len(every)) if sample is None else sample.places(task, [subtask for subtask, _ in every])
        self.total = len(every)
        self.names = [every[number] for number in taken]
        self.subtasks = list(dict.fromkeys(subtask for subtask, _ in self.names))
        self._places = {name: place for place, name in enumerate(self.names)}

    def places(self, names: Sequence[DocumentName]) -> NDArray[np.int64]:
        """Return the place of each document, -1 of those that are not taken."""
        return np.fromiter((self._places.get(name, -1) for name in names), np.int64, len(names))

    def subtask_numbers(self) -> NDArray[np.int64]:
        """Return the number of each document's subtask in `subtasks`."""
        number = {subtask: place for place, subtask in enumerate(self.subtasks)}
        return np.fromiter((number[subtask] for subtask, _ in self.names), np.int64, len(self.names))

    def about(self) -> dict[str, Any]:
        """Return the entries of the page's index."""
        return {"documents": len(self.names), "of": self.total, "subtasks": self.subtasks}


def indexed(pieces: Iterable[Piece]) -> list[list[Any]]:
    """Return [place of the segment in `SEGMENTS`, −1 for another one, text] of each piece."""
    return [[SEGMENTS.index(piece.segment) if piece.segment in SEGMENTS else -1, piece.text] for piece in pieces]


def problem_of(views: Iterable[TaskView]) -> str:
    """Return the distinct problems of a task's views, joined."""
    return "; ".join(dict.fromkeys(view.problem for view in views if view.problem))
