"""What a model keeps of the tokens of a batch: what `columns.py` and `own_caches.py` have in common.

In: a model, and the prompts of a batch. Out: the logits after each prompt, and then after the last token of each row
that has not ended. One prompt after the other is run, in chunks of a fixed size that start at multiples of it, so what
is kept of a prompt does not depend on its batch; chunks shared with an earlier prompt of the batch are copied. Then all
rows are in one cache, in which the last tokens of all prompts have the same column: a mask hides the columns before a
shorter prompt, and each token has its own position.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from evalkit.generation.prompts import Ints
from evalkit.generation.rows import Generation

Behind = Callable[[Ints], torch.Tensor]
"""A pass over some tokens behind stored ones: logits after each token, [1, tokens, vocabulary]."""


class Sizes(NamedTuple):
    """Bytes that a row needs, by device."""

    token_bytes: Mapping[torch.device, int]
    row_bytes: Mapping[torch.device, int]
    """Bytes of states, which do not grow with the tokens."""
    attention_layers: int
    """Layers that keep something of each token."""


NOTHING = Sizes({}, {}, 0)


class Calls:
    """Calls of a model with a cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.device = model.get_output_embeddings().weight.device
        parameters = inspect.signature(model.forward).parameters
        is_key_value = "past_key_values" in parameters or "cache_params" not in parameters
        self._cache = "past_key_values" if is_key_value else "cache_params"
        self.takes_positions = "position_ids" in parameters
        # Only the logits of a chunk's last tokens are needed
        self._is_short = "logits_to_keep" in parameters

    def run(self, ids: Ints, cache: Any, last: int = 1, **inputs: Any) -> tuple[torch.Tensor, Any]:
        """Return the logits after the last tokens, [rows, last, vocabulary] in float32, and the model's cache.

        `ids` are [rows, tokens], or [tokens] of a single row. Without a cache, the model makes one.
        """
        inputs = {"use_cache": True} | inputs
        if cache is not None:
            inputs[self._cache] = cache
        if self._is_short:
            inputs["logits_to_keep"] = last
        output = self._model(input_ids=torch.from_numpy(np.atleast_2d(ids)).to(self.device), **inputs)
        return output.logits[:, -last:].float(), getattr(output, self._cache, None)


class Storage(ABC):
    """What a model keeps of the tokens of a batch."""

    gives_positions = True
    has_columns = True
    """Whether something is kept of each token, so that a mask can hide it."""

    def __init__(self, calls: Calls, rows: Sequence[Generation], chunk: int) -> None:
        self.calls, self.rows, self.chunk = calls, rows, chunk
        self.used = max(len(row.prompt.tokens) for row in rows)
        """Columns with tokens, once all prompts have been run."""
        for index, row in enumerate(rows):
            row.place = index
            row.start = self.used - len(row.prompt.tokens)

    @abstractmethod
    def prefill(self, index: int) -> torch.Tensor:
        """Run a prompt, without what an earlier one shares; return the logits [1, vocabulary] of the next token."""

    @abstractmethod
    def before_answers(self, index: int) -> AbstractContextManager[Behind | None]:
        """Return a context that runs answers behind a prompt, which must be the last one that was run, if it can.

        The tokens it stores are all before the one from which an answer's first token is predicted.
        """

    @abstractmethod
    def without_ended(self, rows: Sequence[Generation]) -> list[Generation]:
        """Remove the rows that have ended; return the others in the order of their places."""

    @abstractmethod
    def step(self, live: Sequence[Generation]) -> torch.Tensor:
        """Run the last token of each row; return the logits [rows, vocabulary] of the next one."""

    @abstractmethod
    def sizes(self) -> Sizes: ...

    def parts(self, done: int, stops: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the beginning and end of each chunk of a prompt after some tokens, up to the last of several stops."""
        ends = {*range(self.chunk, stops[-1], self.chunk), *stops} if self.chunk else {stops[-1]}
        for end in sorted(end for end in ends if end > done):
            yield done, end
            done = end

    def run_behind(self, cache: Any, stored: int, ids: Ints, last: int = 1) -> tuple[torch.Tensor, Any]:
        """Run some tokens of one row behind those that its cache has stored; return what `Calls.run` does."""
        inputs: dict[str, Any] = {}
        if self.gives_positions:
            inputs["position_ids"] = torch.arange(stored, stored + len(ids), device=self.calls.device)[None]
        return self.calls.run(ids, cache, last, **inputs)

    def run_last(self, live: Sequence[Generation], cache: Any) -> tuple[torch.Tensor, Any]:
        """Run the last token of each row; return the logits [rows, vocabulary] of the next one, and the cache."""
        inputs: dict[str, Any] = {}
        if self.gives_positions:
            lengths = np.array([[len(row.prompt.tokens) + len(row.tokens)] for row in live])
            inputs["position_ids"] = torch.from_numpy(lengths - 1).to(self.calls.device)
        starts = np.array([[row.start] for row in live])
        if self.has_columns and starts.any():
            mask = np.arange(self.used + 1) >= starts
            inputs["attention_mask"] = torch.from_numpy(mask.astype(np.int64)).to(self.calls.device)
        ids = np.array([[row.tokens[-1]] for row in live])
        logits, cache = self.calls.run(ids, cache, **inputs)
        self.used += 1
        return logits[:, -1], cache
