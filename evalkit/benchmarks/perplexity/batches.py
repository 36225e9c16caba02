"""Batches of windows, and their computer. In: documents and a model. Out: batches in the order of documents; rows.

Short windows, of one document or of several, go through the model together, as one tree; a long one is a batch by
itself. A document may thus be in several batches. The batches do not depend on what is finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from evalkit.benchmarks.base import Batch, Batches, Budget, Planned
from evalkit.benchmarks.perplexity.texts import TextDocument
from evalkit.benchmarks.perplexity.windows import PerplexityFacts, PositionRow, TextWindow, rows_of, windows_of
from evalkit.benchmarks.request import TaskTokens, spread
from evalkit.display import Say
from evalkit.errors import CheckpointError, UsageError
from evalkit.models.loading.spec import window_of
from evalkit.runs.batch_devices import BatchDevice, place_of
from evalkit.scoring.pack import TreeBatch
from evalkit.scoring.sequences import Sequences, SequenceSet

if TYPE_CHECKING:
    from evalkit.benchmarks.generated import DocumentPlan
    from evalkit.models.loading.load import LoadedModel
    from evalkit.runs.journal import FinishedRows


LONG = 2048
"""Tokens from which a window is scored alone, by the model's own attention: a batch of several is not faster."""
_BYTES_PER_TOKEN = 5
"""Assumed bytes of a token; English text has 4 to 5."""
_CHECKED_CHARACTERS = 1000
"""Characters of the first document on which the model is run at the start."""


@dataclass(frozen=True)
class PerplexitySetup:
    """What scoring needs of a plan."""

    first: TextDocument
    """The beginning of the first document."""
    window: int | None
    """Requested tokens of a window; None: the model's."""
    stride: int | None
    is_long: bool
    """Whether every document is likely to fill a window that is a batch by itself."""


class WindowsContent(NamedTuple):
    """Content of a batch."""

    windows: tuple[TextWindow, ...]
    batch: TreeBatch

    @property
    def is_alone(self) -> bool:
        return len(self.windows) == 1

    def warm(self) -> None:
        """See `Batch.warm`."""
        if not self.is_alone:
            _ = self.batch.tree


def setup_of(plan: DocumentPlan) -> PerplexitySetup:
    """Return the windows' settings and the beginning of a document."""
    documents = _documents(plan)
    first = replace(documents[0], text=documents[0].text[:_CHECKED_CHARACTERS])
    # Where a document is short, its window is scored alone too
    is_long = len(documents) == 1 or all(len(document.content) >= _BYTES_PER_TOKEN * LONG for document in documents)
    return PerplexitySetup(first, _requested(plan), plan.request.stride, is_long)


def is_missing(plan: DocumentPlan, finished: FinishedRows) -> bool:
    return not all(_is_finished(document, finished) for document in _documents(plan))


def planned_batches(
    plan: DocumentPlan, facts: PerplexityFacts, tokenizer: Any, finished: FinishedRows, say: Say
) -> Planned:
    """Plan the batches of windows that have no rows; work is counted in bytes."""
    sizes = [(len(document.content), _is_finished(document, finished)) for document in _documents(plan)]
    total, done = sum(size for size, _ in sizes), sum(size for size, is_finished in sizes if is_finished)
    return Planned(_batches(plan, facts, tokenizer, finished), float(total), float(done))


def _batches(plan: DocumentPlan, facts: PerplexityFacts, tokenizer: Any, finished: FinishedRows) -> Batches:
    for task, documents in plan.tasks.items():
        if all(_is_finished(document, finished) for document in documents):
            continue
        cut = (windows_of(document, tokenizer, facts, plan.request.stride) for document in documents)
        for number, members in enumerate(packed(chain.from_iterable(cut), facts.token_budget)):
            # A finished batch is left out as a whole: the others' numbers stay the same
            if any((task, window.document, window.number, window.is_last) not in finished for window in members):
                work = float(sum(int(window.bytes.sum()) for window in members))
                ended = sum(window.is_last for window in members)
                yield Batch(task, number, _content_of(task, members), work, ended)


def task_tokens(plan: DocumentPlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
    """Count the tokens of a sample of each task's documents."""
    window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
    window = min(window, _requested(plan) or window)
    prefix = next(token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id, 0) if token is not None)
    facts = PerplexityFacts(window, window, prefix, tokenizer.decode(prefix))
    stride = min(plan.request.stride or window, window)
    counts = []
    for task, documents in plan.tasks.items():
        taken = [documents[place] for place in spread(len(documents), sample)]
        windows = chain.from_iterable(windows_of(document, tokenizer, facts, stride) for document in taken)
        lengths = [len(window.tokens) - 1 for window in windows]
        scale = len(documents) / len(taken)
        tokens = scale * sum(lengths)
        counts.append(TaskTokens(task, len(documents), len(taken), scale * len(lengths), tokens, tokens))
    return counts


def packed(windows: Iterable[TextWindow], budget: int) -> Iterator[tuple[TextWindow, ...]]:
    """Group windows, in order, up to a token budget; long ones, and any larger than half of it, stay alone."""
    members: list[TextWindow] = []
    tokens = 0
    for window in windows:
        size = len(window.tokens) - 1
        alone = size >= _longest_shared(budget)
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


def _longest_shared(budget: int) -> int:
    """Return the tokens from which a window is a batch by itself."""
    return min(LONG, budget // 2)


def _content_of(task: str, windows: tuple[TextWindow, ...]) -> WindowsContent:
    items = []
    for window in windows:
        label = f"{task} document {window.document}, window {window.number}"
        is_scored = np.arange(len(window.tokens)) >= window.context
        items.append(SequenceSet(label, task, (window.tokens,), (is_scored,)))
    batch = TreeBatch(np.empty(0, np.int32), tuple(range(len(items))), Sequences.of(items))
    return WindowsContent(windows, batch)


def _documents(plan: DocumentPlan) -> list[TextDocument]:
    return list(chain.from_iterable(plan.tasks.values()))


def _requested(plan: DocumentPlan) -> int | None:
    """Return the requested tokens of a window; None: the model's."""
    window: int | None = plan.manifest["specification"]["windows"]["tokens"]
    return window


def _is_finished(document: TextDocument, finished: FinishedRows) -> bool:
    """Return whether the journal has all windows of a document."""
    number = 0
    while (document.task, document.number, number, False) in finished:
        number += 1
    return (document.task, document.number, number, True) in finished


class WindowScoring:
    """Computer of batches of windows."""

    def __init__(self, setup: PerplexitySetup, loaded: LoadedModel, budget: Budget, say: Say) -> None:
        from evalkit.scoring.architecture import auto_budget
        from evalkit.scoring.engine import Engine

        window = min(loaded.window, setup.window or loaded.window)
        if setup.stride is not None and setup.stride > window:
            raise UsageError(f"--stride {setup.stride}: more than the context window of {window:,} tokens; give fewer")
        prefix = loaded.eos_id if loaded.bos_id is None else loaded.bos_id
        if prefix is None:
            raise CheckpointError(
                f"{loaded.name}: its tokenizer has neither a BOS nor an EOS token, and a document needs one as prefix; "
                "give another --tokenizer"
            )
        tokens = budget.scored or auto_budget(loaded.model)
        self._engine = engine = Engine(loaded.model, tokens, say, remembers=loaded.stock, files=loaded.files)
        facts = PerplexityFacts(window, engine.budget, prefix, loaded.tokenizer.decode(prefix))
        first = windows_of(setup.first, loaded.tokenizer, facts, setup.stride)[:1]
        sequences = _content_of(setup.first.task, tuple(first)).batch.sequences
        # The check of sharing takes as long as some windows, and is not needed where each is a batch by itself
        engine.check(sequences, alone=setup.is_long and window >= _longest_shared(tokens))
        self.facts = replace(facts, token_budget=engine.budget)
        self.about: dict[str, Any] = {
            "token_budget": engine.budget,
            "sharing": engine.describe(),
            # Tokens that the tokenizer adds to a text by itself, such as BOS
            "loaded": loaded.facts()
            | {"prefix_id": prefix, "adds_tokens": bool(loaded.tokenizer("", verbose=False)["input_ids"])},
        }
        self._places = {
            alone: place_of(loaded.device, "alone" if alone or not engine.shares else engine.kernel)
            for alone in (True, False)
        }

    def place(self, batch: Batch | None = None) -> BatchDevice:
        return self._places[batch is None or batch.content.is_alone]

    def compute(self, batch: Batch) -> list[PositionRow]:
        content = batch.content
        return [
            row
            for item, [scores] in self._engine.score(content.batch, alone=content.is_alone)
            for row in rows_of(content.windows[item], scores.logprobs)
        ]
