"""Computer of a perplexity run: a loaded model, and the log-probabilities of a batch of windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import Batch, Say
from evalkit.benchmarks.perplexity.batches import LONG, PerplexityFacts, content_of, longest_shared
from evalkit.benchmarks.perplexity.rows import PositionRow, rows_of
from evalkit.benchmarks.perplexity.texts import TextDocument
from evalkit.benchmarks.perplexity.windows import windows_of
from evalkit.errors import CheckpointError, UsageError
from evalkit.runs.batch_devices import BatchDevice, place_of

if TYPE_CHECKING:
    from evalkit.models.load import LoadedModel

_BYTES_PER_TOKEN = 5
"""Assumed bytes of a token; English text has 4 to 5."""
CHECKED_CHARACTERS = 1000
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


class WindowScoring:
    """Computer of batches of windows."""

    def __init__(self, setup: PerplexitySetup, loaded: LoadedModel, budget: int | None, say: Say) -> None:
        from evalkit.scoring.budget import auto_budget
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
        tokens = budget or auto_budget(loaded.model)
        self._engine = engine = Engine(loaded.model, tokens, say, remembers=loaded.stock, files=loaded.files)
        facts = PerplexityFacts(window, engine.budget, prefix, loaded.tokenizer.decode(prefix))
        first = windows_of(setup.first, loaded.tokenizer, facts.settings(setup.stride))[:1]
        items = content_of(setup.first.task, tuple(first)).batch.items
        # The check of sharing takes as long as some windows, and is not needed where each is a batch by itself
        engine.check(items, alone=setup.is_long and window >= longest_shared(tokens))
        self.facts = PerplexityFacts(window, engine.budget, prefix, facts.prefix_text)
        self.about: dict[str, Any] = {
            "token_budget": engine.budget,
            "sharing": engine.describe(),
            "loaded": loaded.facts() | {"prefix_id": prefix, "adds_tokens": _adds_tokens(loaded.tokenizer)},
        }
        self._places = {
            alone: place_of(loaded.device, "alone" if alone or not engine.shares else engine.kernel)
            for alone in (True, False)
        }

    def place(self, batch: Batch | None = None) -> BatchDevice:
        """Return the model's device, with the attention of the batch."""
        return self._places[batch is None or batch.content.is_alone]

    def compute(self, batch: Batch) -> list[PositionRow]:
        """Score a batch."""
        content = batch.content
        return [
            row
            for item, [scores] in self._engine.score(content.batch, alone=content.is_alone)
            for row in rows_of(content.windows[item.index], scores.logprobs)
        ]


def are_long(documents: Sequence[TextDocument]) -> bool:
    """Return whether documents are likely to have no short windows. Where one does, it is scored alone too."""
    return len(documents) == 1 or all(len(one.content) >= _BYTES_PER_TOKEN * LONG for one in documents)


def _adds_tokens(tokenizer: Any) -> bool:
    """Return whether the tokenizer adds tokens, such as BOS, to a text by itself."""
    return bool(tokenizer("", verbose=False)["input_ids"])
