"""Blocks of a page: the documents that several runs of a task have, in one order, encoded for the page's script."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.document_views import Piece, TaskView
from evalkit.data.sampling import DocumentSample
from evalkit.escape import in_json
from evalkit.runs.folder import Run
from evalkit.runs.score_table import SEGMENTS

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
    """The documents of several runs of one task, given in order, or a sample of them."""

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


_ALIGNED = 8


@dataclass(frozen=True)
class DocumentData:
    """Documents of a page."""

    index: Mapping[str, Any]
    """Runs and tasks, JSON-compatible; "block" of a task is a place in `blocks`."""
    blocks: Sequence[str]


def encoded(header: Mapping[str, Any], arrays: Mapping[str, tuple[str, NDArray[Any]]]) -> str:
    """Return a block as base64: JSON-compatible content, and name → (u1, u2, i4, f4 or f8; values of any shape).

    Raises:
        OverflowError: an integer does not fit its type.
    """
    table: dict[str, list[Any]] = {}
    parts: list[bytes] = []
    offset = 0
    for name, (kind, values) in arrays.items():
        data = _packed(name, kind, values)
        table[name] = [kind, offset, int(np.size(values))]
        data += bytes(-len(data) % _ALIGNED)
        parts.append(data)
        offset += len(data)
    text = in_json(json.dumps({**header, "arrays": table}, ensure_ascii=False, separators=(",", ":")))
    start = text.encode("utf-8", "replace")  # a lone surrogate is shown as a question mark
    start += b" " * (-(4 + len(start)) % _ALIGNED)
    content = b"".join((len(start).to_bytes(4, "little"), start, *parts))
    return base64.b64encode(gzip.compress(content, mtime=0)).decode("ascii")


def _packed(name: str, kind: str, values: NDArray[Any]) -> bytes:
    flat = np.asarray(values).ravel()
    if kind.startswith(("u", "i")) and flat.size:
        limits = np.iinfo(np.dtype(kind))
        if flat.min() < limits.min or flat.max() > limits.max:
            raise OverflowError(f"array {name}: values from {flat.min()} to {flat.max()} do not fit {kind}")
    return flat.astype(f"<{kind}").tobytes()
