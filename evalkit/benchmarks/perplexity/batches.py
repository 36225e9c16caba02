"""Batches of windows. In: documents and facts about the model. Out: batches, in the order of the documents.

Short windows, of one document or of several, go through the model together, as one tree; a long one is a batch by
itself. A document may thus be in several batches. The batches do not depend on what is finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from evalkit.benchmarks.base import Batch, Batches
from evalkit.benchmarks.perplexity.texts import TextDocument
from evalkit.benchmarks.perplexity.windows import TextWindow, WindowSettings, windows_of
from evalkit.scoring.pack import SequenceSet, TreeBatch

if TYPE_CHECKING:
    from evalkit.benchmarks.perplexity.plan import PerplexityPlan
    from evalkit.runs.finished_rows import FinishedRows, Key

LONG = 2048
"""Tokens from which a window is scored alone, by the model's own attention: a batch of several is not faster."""


@dataclass(frozen=True)
class PerplexityFacts:
    """Properties of a model that planning needs."""

    window: int
    """Context window in tokens, at most the requested one."""
    token_budget: int
    """Maximum number of tokens in a batch."""
    prefix_id: int
    prefix_text: str

    def settings(self, stride: int | None) -> WindowSettings:
        """Return how documents are cut."""
        return WindowSettings(self.window, stride or self.window, self.prefix_id, self.prefix_text)


@dataclass(frozen=True)
class WindowsContent:
    """Content of a batch."""

    windows: tuple[TextWindow, ...]
    batch: TreeBatch

    @property
    def is_alone(self) -> bool:
        """Whether there is one window only."""
        return len(self.windows) == 1

    def warm(self) -> None:
        """See `Batch.warm`."""
        if not self.is_alone:
            _ = self.batch.tree


def batches_of(plan: PerplexityPlan, facts: PerplexityFacts, tokenizer: Any, finished: FinishedRows) -> Batches:
    """Yield the batches with windows that have no rows, task by task.

    Raises:
        ScoringError: a document has no tokens.
    """
    settings = facts.settings(plan.request.stride)
    for task, documents in plan.documents.items():
        if all(is_finished(one, finished) for one in documents):
            continue
        windows = (window for one in documents for window in windows_of(one, tokenizer, settings))
        for number, members in enumerate(packed(windows, facts.token_budget)):
            # A finished batch is left out as a whole: the others' numbers stay the same
            if any(key_of(task, one) not in finished for one in members):
                work = float(sum(int(one.bytes.sum()) for one in members))
                ended = sum(one.is_last for one in members)
                yield Batch(task, number, content_of(task, members), work, ended)


def packed(windows: Iterable[TextWindow], budget: int) -> Iterator[tuple[TextWindow, ...]]:
    """Group windows, in order, up to a token budget; long ones, and any larger than half of it, stay alone."""
    members: list[TextWindow] = []
    tokens = 0
    for window in windows:
        size = len(window.tokens) - 1
        alone = size >= longest_shared(budget)
        if members and (alone or tokens + size > budget):
            yield tuple(members)
            members, tokens = [], 0
        if alone:
            yield (window,)
        else:
            members.append(window)
            tokens += size
    if members:
        yield tuple(members)


def longest_shared(budget: int) -> int:
    """Return the tokens from which a window is a batch by itself."""
    return min(LONG, budget // 2)


def content_of(task: str, windows: tuple[TextWindow, ...]) -> WindowsContent:
    """Return windows as the content of a batch."""
    return WindowsContent(
        windows,
        TreeBatch(np.empty(0, np.int32), tuple(map(_item, range(len(windows)), windows, [task] * len(windows)))),
    )


def key_of(task: str, window: TextWindow) -> Key:
    """Return a window's key in the journal."""
    return task, window.document, window.number, window.is_last


def is_finished(document: TextDocument, finished: FinishedRows) -> bool:
    """Return whether the journal has all windows of a document."""
    number = 0
    while (document.task, document.number, number, False) in finished:
        number += 1
    return (document.task, document.number, number, True) in finished


def _item(index: int, window: TextWindow, task: str) -> SequenceSet:
    label = f"{task} document {window.document}, window {window.number}"
    is_scored = np.arange(len(window.tokens)) >= window.context
    return SequenceSet(index, label, task, (window.tokens,), (is_scored,))
