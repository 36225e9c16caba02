"""The caches that a model makes itself, which may hold states of recurrent and convolutional layers.

In: a model whose caches are transformers', and the prompts of a batch. Out: as of every `Storage`. No padding may enter
a state, so each prompt has a cache of its own until all are joined: states are stacked, keys and values are padded on
the left. Where tokens behind a state give other logits than in one pass, `chunk` is 0: a prompt is run in one pass, and
nothing of it is copied.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache, DynamicCache

from evalkit.compatibility.transformers import cached_tensors
from evalkit.generation.prompts import Ints, shared_tokens
from evalkit.generation.rows import Generation
from evalkit.generation.storage import Behind, Calls, Sizes, Storage

_DIMENSIONS = {
    "keys": (0, -2),
    "values": (0, -2),
    "indexer_keys": (0, 1),
    "indexer_position_ids": (1, 2),
    "conv_states": (0, None),
    "recurrent_states": (0, None),
}
"""Dimensions of the rows, and of the tokens if they grow with these, of the tensors in transformers' cache layers."""


class OwnCaches(Storage):
    """The model's own caches: one for each prompt, and then one of all rows."""

    def __init__(self, calls: Calls, rows: Sequence[Generation], chunk: int) -> None:
        super().__init__(calls, rows, chunk)
        self._caches: list[Any] = []
        self._joined: Any = None
        self._shared: dict[bytes, Any] = {}
        """Caches of the chunks with which a later prompt begins, by their token ids."""
        self._before_answers: Any = None
        # As `generate` does
        self.gives_positions = calls.takes_positions

    def prefill(self, index: int) -> torch.Tensor:
        row, logits = self.rows[index], torch.empty(0)
        tokens = row.prompt.tokens
        # Behind these tokens, chunks begin elsewhere than those of other prompts
        most = row.prompt.shared - 1 if row.prompt.answers else len(tokens)
        shared = self._lengths_shared(index)
        cache = self._begun(index, most)
        self._before_answers = copy.deepcopy(cache) if row.reused == most else None
        for begin, end in self.parts(row.reused, [most, len(tokens)]):
            logits, cache = self.run_behind(cache, begin, tokens[begin:end])
            self.has_columns = _has_columns(cache)
            if end in shared and end <= most:
                self._shared[tokens[:end].tobytes()] = copy.deepcopy(cache)
            if end == most and row.prompt.answers:
                self._before_answers = copy.deepcopy(cache)
        self._caches.append(cache)
        return logits[:, -1]

    @contextmanager
    def before_answers(self, index: int) -> Iterator[Behind | None]:
        stored, cache = self.rows[index].prompt.shared - 1, self._before_answers

        def behind(ids: Ints) -> torch.Tensor:
            logits, _ = self.run_behind(copy.deepcopy(cache), stored, ids, len(ids))
            return logits

        yield None if cache is None else behind
        self._before_answers = None

    def without_ended(self, rows: Sequence[Generation]) -> list[Generation]:
        live = [row for row in rows if not row.ended]
        if live and self._joined is None:
            lengths = [len(row.prompt.tokens) for row in live]
            self.used = max(lengths)
            self._joined = _joined_caches([self._caches[row.place] for row in live], lengths.index(self.used))
            self._caches = []
            for row in live:
                row.start = self.used - len(row.prompt.tokens)
        elif live and len(live) < len(rows):
            self._keep([row.place for row in live])
        for index, row in enumerate(live):
            row.place = index
        return live

    def step(self, live: Sequence[Generation]) -> torch.Tensor:
        logits, self._joined = self.run_last(live, self._joined)
        return logits

    def sizes(self) -> Sizes:
        token_bytes: Counter[torch.device] = Counter()
        row_bytes: Counter[torch.device] = Counter()
        layers = 0
        for layer in self._joined.layers:
            before = token_bytes.total()
            for kept in cached_tensors(layer):
                states = kept.tensor
                rows, tokens = _DIMENSIONS[kept.name]
                of_row = states.nbytes // states.shape[rows]
                if tokens is None:
                    row_bytes[states.device] += of_row
                else:
                    token_bytes[states.device] += of_row // states.shape[tokens]
            layers += token_bytes.total() > before
        return Sizes(token_bytes, row_bytes, layers)

    def _keep(self, rows: Sequence[int]) -> None:
        for layer in self._joined.layers:
            for kept in cached_tensors(layer):
                states = kept.tensor
                index = torch.tensor(rows, device=states.device)
                kept.holder[kept.key] = states.index_select(_DIMENSIONS[kept.name][0], index)

    def _lengths_shared(self, index: int) -> set[int]:
        """Return the lengths of the prefixes that a prompt shares with later ones."""
        if not self.chunk:
            return set()
        tokens = self.rows[index].prompt.tokens
        return {shared_tokens(tokens, later.prompt.tokens, self.chunk) for later in self.rows[index + 1 :]}

    def _begun(self, index: int, most: int) -> Any:
        """Return a copy of the longest stored cache, of at most some tokens, with which a prompt begins; or None."""
        row = self.rows[index]
        begun = row.prompt.tokens[: min(most, len(row.prompt.tokens) - 1)].tobytes()
        prefix = max((prefix for prefix in self._shared if begun.startswith(prefix)), key=len, default=b"")
        row.reused = len(prefix) // row.prompt.tokens.itemsize
        cache = copy.deepcopy(self._shared.get(prefix))
        later = [other.prompt.tokens.tobytes() for other in self.rows[index + 1 :]]
        for known in list(self._shared):
            if not any(tokens.startswith(known) for tokens in later):
                del self._shared[known]
        return cache


def _has_columns(cache: Any) -> bool:
    """Return whether a model's cache keeps something of each token. Raises `TypeError` for an unknown cache."""
    if cache is None:
        raise TypeError("no cache is returned")
    if type(cache) not in (Cache, DynamicCache):
        raise TypeError(f"{type(cache).__name__} is an unknown cache")
    names = {kept.name for layer in cache.layers for kept in cached_tensors(layer)}
    unknown = names.difference(_DIMENSIONS)
    if unknown:
        raise TypeError(f"{min(unknown)} is an unknown part of its cache")
    return any(_DIMENSIONS[name][1] is not None for name in names)


def _joined_caches(caches: Sequence[Any], longest: int) -> Any:
    """Return one cache of the rows of several, which lose their layers; one of them has the most tokens.

    Keys and values are padded on the left with zeros.
    """
    whole = caches[longest]
    for index in range(len(whole.layers)):
        layers = [cache.layers[index] for cache in caches]
        for of_rows in zip(*map(cached_tensors, layers), strict=True):
            target = of_rows[longest]
            target.holder[target.key] = _stacked(target.name, [kept.tensor for kept in of_rows])
        for cache in caches:
            if cache is not whole:
                cache.layers[index] = None
    return whole


def _stacked(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors of single rows as one; those that grow with the tokens are padded in front."""
    rows, tokens = _DIMENSIONS[name]
    if tokens is None:
        return torch.cat(list(parts), rows)
    most = max(part.shape[tokens] for part in parts)
    shape = list(parts[0].shape)
    shape[rows] = len(parts)
    shape[tokens] = most
    whole = parts[0].new_zeros(shape)
    for target, part in zip(whole.split(1, rows), parts, strict=True):
        size = part.shape[tokens]
        target.narrow(tokens, most - size, size).copy_(part)
    return whole
