"""What a model keeps of the tokens of a batch: evalkit's columns of keys and values, or the model's own caches.

In: a model, and the prompts of a batch. Out: the logits after each prompt, and then after the last token of each row
that has not ended. Both forms run one prompt after the other, in chunks of a fixed size that start at multiples of it,
so what is kept of a prompt does not depend on its batch; chunks shared with an earlier prompt of the batch are copied.
Then all rows are in one cache, in which the last tokens of all prompts have the same column: a mask hides the columns
before a shorter prompt, and each token has its own position.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from evalkit.generation.prompts import Ints, shared_tokens
from evalkit.generation.rows import Generation

_TOKEN_DIMENSIONS = {"keys": -2, "values": -2, "indexer_keys": 1}
"""Dimension of the tokens in the tensors of transformers' cache layers that grow with them; rows are the first."""
_STATES = ("conv_states", "recurrent_states")
"""Tensors that do not grow with the tokens."""


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

    has_columns = True
    """Whether something is kept of each token, and so tokens have positions, and columns that a mask can hide."""

    def __init__(self, calls: Calls, rows: Sequence[Generation], chunk: int) -> None:
        self.calls, self.rows, self.chunk = calls, rows, chunk
        self.used = max(len(row.prompt.tokens) for row in rows)
        """Columns with tokens, once all prompts have been run."""
        for place, row in enumerate(rows):
            row.place = place
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
        if self.has_columns and cache is not None:
            inputs["position_ids"] = torch.arange(stored, stored + len(ids), device=self.calls.device)[None]
        return self.calls.run(ids, cache, last, **inputs)

    def run_last(self, live: Sequence[Generation], cache: Any) -> tuple[torch.Tensor, Any]:
        """Run the last token of each row; return the logits [rows, vocabulary] of the next one, and the cache."""
        inputs: dict[str, Any] = {}
        if self.has_columns:
            lengths = np.array([[len(row.prompt.tokens) + len(row.tokens)] for row in live])
            inputs["position_ids"] = torch.from_numpy(lengths - 1).to(self.calls.device)
            starts = np.array([[row.start] for row in live])
            if starts.any():
                mask = np.arange(self.used + 1) >= starts
                inputs["attention_mask"] = torch.from_numpy(mask.astype(np.int64)).to(self.calls.device)
        ids = np.array([[row.tokens[-1]] for row in live])
        logits, cache = self.calls.run(ids, cache, **inputs)
        self.used += 1
        return logits[:, -1], cache


class Columns(Storage):
    """Keys and values of every layer, [rows, heads, columns, size]; a layer is allocated at its first write."""

    def __init__(self, calls: Calls, rows: Sequence[Generation], chunk: int, layers: int) -> None:
        super().__init__(calls, rows, chunk)
        self._columns = self.used + max(row.prompt.columns - len(row.prompt.tokens) for row in rows)
        self.layers: list[tuple[torch.Tensor, ...]] = [()] * layers

    def prefill(self, index: int) -> torch.Tensor:
        row, logits = self.rows[index], torch.empty(0)
        tokens = row.prompt.tokens
        shared = [shared_tokens(other.prompt.tokens, tokens, self.chunk) for other in self.rows[:index]]
        row.reused = max(shared, default=0)
        if row.reused:
            source = self.rows[shared.index(row.reused)]
            self._copy((source.place, source.start), (row.place, row.start), row.reused)
        cache = self._view(slice(row.place, row.place + 1), row.start, row.reused)
        for begin, end in self.parts(row.reused, [len(tokens)]):
            logits, _ = self.run_behind(cache, begin, tokens[begin:end])
        return logits[:, -1]

    @contextmanager
    def before_answers(self, index: int) -> Iterator[Behind]:
        """Restore the columns that answers have overwritten when the context ends."""
        row = self.rows[index]
        stored = row.prompt.shared - 1
        columns = slice(row.start + stored, self.used)
        before = [[states[row.place, :, columns].clone() for states in layer] for layer in self.layers]

        def behind(ids: Ints) -> torch.Tensor:
            cache = self._view(slice(row.place, row.place + 1), row.start, stored)
            logits, _ = self.run_behind(cache, stored, ids, len(ids))
            return logits

        yield behind
        for layer, copies in zip(self.layers, before, strict=True):
            for states, kept in zip(layer, copies, strict=True):
                states[row.place, :, columns] = kept

    def without_ended(self, rows: Sequence[Generation]) -> list[Generation]:
        """Move the rows that have not ended to the first places, and return them in that order."""
        live = [row for row in rows if not row.ended]
        free = sorted(set(range(len(live))) - {row.place for row in live})
        for row in live:
            if row.place >= len(live):
                target = free.pop()
                self._copy((row.place, row.start), (target, row.start), self.used - row.start)
                row.place = target
        return sorted(live, key=lambda row: row.place)

    def step(self, live: Sequence[Generation]) -> torch.Tensor:
        logits, _ = self.run_last(live, self._view(slice(0, len(live)), 0, self.used))
        return logits

    def sizes(self) -> Sizes:
        token_bytes: Counter[torch.device] = Counter()
        for layer in self.layers:
            for states in layer:
                token_bytes[states.device] += states[0, :, 0].nbytes
        return Sizes(token_bytes, {}, sum(bool(layer) for layer in self.layers))

    def put(self, layer: int, rows: slice, column: int, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Write new keys and values, [rows, heads, tokens, size], from a column on; return all of the layer."""
        if not self.layers[layer]:
            # Zeros, since masked columns are multiplied too: attention weight 0 times NaN is NaN
            self.layers[layer] = tuple(
                states.new_zeros(len(self.rows), states.shape[1], self._columns, states.shape[3]) for states in new
            )
        for stored, states in zip(self.layers[layer], new, strict=True):
            stored[rows, :, column : column + states.shape[2]] = states
        return self.layers[layer]

    def _view(self, rows: slice, start: int, used: int) -> Cache:
        """Return a cache over some rows that starts at column `start` and contains `used` tokens."""
        return Cache(layers=[_LayerView(self, layer, rows, start, used) for layer in range(len(self.layers))])

    def _copy(self, source: tuple[int, int], target: tuple[int, int], tokens: int) -> None:
        """Copy some tokens of one row to another; both are given as (row, first column)."""
        (row, start), (other, begin) = source, target
        for layer in self.layers:
            for states in layer:
                states[other, :, begin : begin + tokens] = states[row, :, start : start + tokens]


class _LayerView(DynamicLayer):  # type: ignore[misc]
    def __init__(self, storage: Columns, layer: int, rows: slice, start: int, used: int) -> None:
        super().__init__()
        self._storage, self._layer, self._rows, self._start, self._used = storage, layer, rows, start, used
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, [rows, heads, tokens, size]; return all keys and values so far."""
        stored = self._storage.put(self._layer, self._rows, self._start + self._used, key_states, value_states)
        self._used += key_states.shape[2]
        keys, values = (states[self._rows, :, self._start : self._start + self._used] for states in stored)
        return keys, values

    def get_seq_length(self) -> int:
        return self._used


class OwnCaches(Storage):
    """The caches that a model makes itself: one for each prompt, and then one of all rows.

    They may hold states of recurrent and convolutional layers, into which no padding may enter. Where several tokens
    behind such a state give other logits than in one pass (`chunk` is 0), a prompt is run in one pass.
    """

    has_columns = False

    def __init__(self, calls: Calls, rows: Sequence[Generation], chunk: int) -> None:
        super().__init__(calls, rows, chunk)
        self._caches: list[Any] = []
        self._joined: Any = None
        self._shared: dict[bytes, Any] = {}
        """Caches of the chunks with which a later prompt begins, by their token ids."""
        self._before_answers: Any = None

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
        stored, known = self.rows[index].prompt.shared - 1, self._before_answers

        def behind(ids: Ints) -> torch.Tensor:
            logits, _ = self.run_behind(copy.deepcopy(known), stored, ids, len(ids))
            return logits

        yield None if known is None else behind
        self._before_answers = None

    def without_ended(self, rows: Sequence[Generation]) -> list[Generation]:
        live = [row for row in rows if not row.ended]
        if live and self._joined is None:
            lengths = [len(row.prompt.tokens) for row in live]
            self.used = max(lengths)
            self._joined = joined([self._caches[row.place] for row in live], lengths.index(self.used))
            self._caches = []
            for row in live:
                row.start = self.used - len(row.prompt.tokens)
        elif live and len(live) < len(rows):
            self._keep([row.place for row in live])
        for place, row in enumerate(live):
            row.place = place
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
            for kept in _tensors(layer):
                states = kept.tensor
                of_row = states.nbytes // len(states)
                if kept.name in _TOKEN_DIMENSIONS:
                    token_bytes[states.device] += of_row // states.shape[_TOKEN_DIMENSIONS[kept.name]]
                else:
                    row_bytes[states.device] += of_row
            layers += token_bytes.total() > before
        return Sizes(token_bytes, row_bytes, layers)

    def _keep(self, rows: Sequence[int]) -> None:
        for layer in self._joined.layers:
            for kept in _tensors(layer):
                states = kept.tensor
                kept.holder[kept.key] = states.index_select(0, torch.tensor(rows, device=states.device))

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
    kept = [kept for layer in cache.layers for kept in _tensors(layer)]
    unknown = {one.name for one in kept}.difference(_TOKEN_DIMENSIONS, _STATES)
    if unknown:
        raise TypeError(f"{min(unknown)} is an unknown part of the model's cache")
    return any(one.name in _TOKEN_DIMENSIONS for one in kept)


def joined(caches: Sequence[Any], longest: int) -> Any:
    """Return one cache of the rows of several, which lose their layers; one of them has the most tokens.

    Keys and values are padded on the left with zeros.
    """
    whole = caches[longest]
    for index in range(len(whole.layers)):
        layers = [cache.layers[index] for cache in caches]
        for places in zip(*map(_tensors, layers), strict=True):
            target = places[longest]
            target.holder[target.key] = _stacked(target.name, [place.tensor for place in places])
        for cache in caches:
            if cache is not whole:
                cache.layers[index] = None
    return whole


class _Kept(NamedTuple):
    """A tensor of a cache layer: `holder[key]`."""

    name: str
    holder: dict[Any, Any]
    key: Any

    @property
    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self.holder[self.key]
        return tensor


def _tensors(layer: Any) -> list[_Kept]:
    """Return the tensors of a cache layer, without single numbers."""
    kept = []
    for name, value in vars(layer).items():
        places = [(value, key) for key in value] if isinstance(value, dict) else [(vars(layer), name)]
        for holder, key in places:
            if isinstance(holder[key], torch.Tensor) and holder[key].dim():
                kept.append(_Kept(name, holder, key))
    return kept


def _stacked(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors of single rows as one; those that grow with the tokens are padded in front."""
    if name in _STATES:
        return torch.cat(list(parts))
    dimension = _TOKEN_DIMENSIONS[name]
    most = max(part.shape[dimension] for part in parts)
    shape = list(parts[0].shape)
    shape[0] = len(parts)
    shape[dimension] = most
    whole = parts[0].new_zeros(shape)
    for row, part in zip(whole.split(1), parts, strict=True):
        size = part.shape[dimension]
        row.narrow(dimension, most - size, size).copy_(part)
    return whole
