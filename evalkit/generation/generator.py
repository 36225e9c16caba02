"""Generation of a batch: prefill of one prompt after the other in chunks, then decoding of all prompts together.

In: a model and a batch of prompts. Out: a `Generation` for each. Prefill takes one prompt at a time, in chunks of a
fixed size that start at multiples of it, so a prompt's keys and values do not depend on its batch. A prefix shared with
an earlier prompt of the batch is copied. Prompts are left-padded to end in the same column of a static cache, so all
write the keys and values of their next token to the next column; rows that have ended leave the batch. Models that do
not run on this cache generate one prompt at a time with transformers' `generate` (`rows.py`).
"""

from __future__ import annotations

import inspect
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from evalkit.compatibility.transformers import keeps_state
from evalkit.display import Say
from evalkit.errors import CheckpointError, ScoringError, first_line
from evalkit.generation.prompts import CHUNK, Ints, Prompt, shared_tokens
from evalkit.generation.rows import NOT_FINITE_ADVICE, Generation, choose, generate_with_transformers, sampler_of
from evalkit.models.loading.load import LoadedModel
from evalkit.models.loading.tokenizer import refuse_tokens_without_rows
from evalkit.models.memory import check_room, is_out_of_memory, refuse_to_split
from evalkit.models.parts import dynamic_modules, forget_lengths
from evalkit.scoring.architecture import memory_beside_weights, rotary_lengths

_CHECKED_TOKENS = 16
_CACHE_TOLERANCE, _LEAST_EPSILON = 0.6, 2.0**-16
"""Tolerance of the cache check, in units of rounding: the deviation of the logits that rounding the embeddings once
more causes in this model, times √(2 layers), since each layer adds twice to what is rounded. The cache's own rounding
gives 0 to 0.25 in every dtype; positions that are off by one give 1 to 8 in bfloat16, and more in others. Kernels of
float32 differ by more than its epsilon."""


class _Storage:
    """Keys and values of every layer, [rows, heads, columns, size]; a layer is allocated at its first write."""

    def __init__(self, layers: int, rows: int, columns: int) -> None:
        self._rows, self._columns = rows, columns
        self.layers: list[tuple[torch.Tensor, ...]] = [()] * layers

    def view(self, rows: slice, start: int, used: int) -> Cache:
        """Return a cache over some rows that starts at column `start` and contains `used` tokens."""
        return Cache(layers=[_LayerView(self, layer, rows, start, used) for layer in range(len(self.layers))])

    def copy(self, source: tuple[int, int], target: tuple[int, int], tokens: int) -> None:
        """Copy some tokens of one row to another; both are given as (row, first column)."""
        (row, start), (other, begin) = source, target
        for layer in self.layers:
            for states in layer:
                states[other, :, begin : begin + tokens] = states[row, :, start : start + tokens]

    @contextmanager
    def kept(self, row: int, start: int, stop: int) -> Iterator[None]:
        """Restore some columns of a row when the context ends."""
        before = [[states[row, :, start:stop].clone() for states in layer] for layer in self.layers]
        yield
        for layer, copies in zip(self.layers, before, strict=True):
            for states, copy in zip(layer, copies, strict=True):
                states[row, :, start:stop] = copy

    def put(self, layer: int, rows: slice, column: int, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Write new keys and values, [rows, heads, tokens, size], from a column on; return all of the layer."""
        if not self.layers[layer]:
            # Zeros, since masked columns are multiplied too: attention weight 0 times NaN is NaN
            self.layers[layer] = tuple(
                states.new_zeros(self._rows, states.shape[1], self._columns, states.shape[3]) for states in new
            )
        for stored, states in zip(self.layers[layer], new, strict=True):
            stored[rows, :, column : column + states.shape[2]] = states
        return self.layers[layer]

    def without_ended(self, rows: Sequence[Generation], used: int) -> list[Generation]:
        """Move the rows that have not ended to the first places, and return them in that order."""
        live = [row for row in rows if not row.ended]
        free = sorted(set(range(len(live))) - {row.place for row in live})
        for row in live:
            if row.place >= len(live):
                target = free.pop()
                self.copy((row.place, row.start), (target, row.start), used - row.start)
                row.place = target
        return sorted(live, key=lambda row: row.place)


class _LayerView(DynamicLayer):  # type: ignore[misc]
    def __init__(self, storage: _Storage, layer: int, rows: slice, start: int, used: int) -> None:
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


def _deviation(logits: torch.Tensor, others: torch.Tensor) -> float:
    """Return the deviation of logits [tokens, vocabulary] from others, as a share of theirs, at half of the tokens."""
    return float(((logits - others).std(-1) / others.std(-1)).median())


class Generator:
    """A generator of a causal language model, whose tokenizer is needed by stop texts and patterns only."""

    def __init__(self, model: Any, chunk: int = CHUNK, tokenizer: Any = None) -> None:
        self._model, self._tokenizer, self.chunk = model, tokenizer, chunk
        head = model.get_output_embeddings().weight
        self.device, self._dtype, self._vocabulary = head.device, model.dtype, head.shape[0]
        self._dynamic = dynamic_modules(model)
        self._layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0))
        self.memory = memory_beside_weights(model)
        """Bytes of memory beside the weights, by device."""
        # Only the logits of a chunk's last token are needed
        last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last: dict[str, int] = {"logits_to_keep": 1} if last else {}
        self.token_bytes_on: Mapping[torch.device, int] = {}
        """Bytes of one token's keys and values in the layers of each device; empty without a key-value cache."""
        self.without_cache = self._check_cache()
        """Reason why the model does not run on evalkit's cache; empty if it does."""
        self.token_bytes = sum(self.token_bytes_on.values())
        """Bytes of one token's keys and values, in all layers; 0 if the model has no key-value cache."""

    def _check_cache(self) -> str:
        """Compare logits with and without the cache on a few tokens; return why the cache does not work, or ""."""
        name = type(self._model).__name__
        ids = (torch.arange(_CHECKED_TOKENS, device=self.device) % self._vocabulary)[None]
        with torch.inference_mode():
            uncached = self._model(input_ids=ids).logits[0].float()
            if not uncached.isfinite().all():
                raise CheckpointError(f"the logits of {name} are not numbers; {NOT_FINITE_ADVICE}")
            if keeps_state(self._model):
                return f"{name} has a recurrent state and no key-value cache"
            if rotary_lengths(self._model.config):
                return f"the rotary frequencies of {name} depend on the length of a text"
            storage, half = _Storage(self._layers, 1, _CHECKED_TOKENS), _CHECKED_TOKENS // 2
            try:
                parts = [
                    self._model(input_ids=part, past_key_values=storage.view(slice(0, 1), 0, used), use_cache=True)
                    for part, used in ((ids[:, :half], 0), (ids[:, half:], half))
                ]
            except Exception as error:  # an architecture of any kind may fail in any way
                return f"{name} does not run on evalkit's cache ({type(error).__name__}: {first_line(error)[:120]})"
        sizes: Counter[torch.device] = Counter()
        for layer in storage.layers:
            for states in layer:
                sizes[states.device] += states[0, :, 0].numel() * states.element_size()
        if not sizes.total():
            return f"{name} has no key-value cache"
        tolerance = _CACHE_TOLERANCE * (2 * self._layers) ** 0.5 * self._rounding(ids, uncached, half)
        # Written so that NaN exceeds the tolerance
        if not _deviation(parts[1].logits[0].float(), uncached[half:]) <= tolerance:
            return f"{name} gives different logits with a key-value cache than without one"
        self.token_bytes_on = sizes
        return ""

    def _rounding(self, ids: torch.Tensor, logits: torch.Tensor, first: int) -> float:
        """Return the deviation of logits [tokens, vocabulary] from a token on, if the embeddings are rounded again."""
        epsilon = max(torch.finfo(self._dtype).eps, _LEAST_EPSILON)

        def rounded(_: Any, __: Any, embeddings: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(embeddings.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
            return embeddings * (1 + epsilon * noise).to(embeddings)

        hook = self._model.get_input_embeddings().register_forward_hook(rounded)
        try:
            with torch.inference_mode():
                again = self._model(input_ids=ids).logits[0, first:].float()
        finally:
            hook.remove()
        return max(_deviation(again, logits[first:]), epsilon)

    def generate(self, prompts: Sequence[Prompt], say: Say = lambda _: None) -> list[Generation]:
        """Generate the continuations of a batch, in order; it is split in halves when memory runs out.

        Raises a `ScoringError` if memory runs out on a single prompt, logits are NaN or infinite, or a prompt has a
        token for which the embedding has no row, and a `UsageError` for decoding settings that are not supported.
        """
        for prompt in prompts:
            for tokens in (prompt.tokens, *prompt.answers):
                refuse_tokens_without_rows(self._model, prompt.label, tokens)
        try:
            return self._generate(prompts)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            refuse_to_split(f"{len(prompts)} prompts")
            if len(prompts) == 1:
                size = len(prompts[0].tokens)
                raise ScoringError(f"out of memory on a prompt of {size} tokens; use a smaller dtype") from error
        # Outside the handler, since the traceback references the tensors
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        half = len(prompts) // 2
        say(f"out of memory on {len(prompts)} prompts: going on with {half}")
        return self.generate(prompts[:half], say) + self.generate(prompts[half:], say)

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Prompt]) -> list[Generation]:
        rows = [Generation(prompt, sampler_of(self._model, prompt), self._tokenizer) for prompt in prompts]
        if self.without_cache:
            for row in rows:
                forget_lengths(self._dynamic)
                generate_with_transformers(self._model, row)
                row.logprobs = [self._logprob(row, answer) for answer in row.prompt.answers]
            return rows
        used = max(len(prompt.tokens) for prompt in prompts)
        columns = used + max(prompt.columns - len(prompt.tokens) for prompt in prompts)
        check_room(self.device, len(prompts) * columns * self.token_bytes)
        storage = _Storage(self._layers, len(prompts), columns)
        for index, row in enumerate(rows):
            started = time.perf_counter()
            row.place, row.start = index, used - len(row.prompt.tokens)
            row.append(*choose([row], self._prefill(storage, row, rows[:index])))
            row.prompt_seconds = time.perf_counter() - started
            if row.prompt.answers:
                with storage.kept(row.place, row.start + row.prompt.shared - 1, used):
                    row.logprobs = [self._logprob(row, answer, storage) for answer in row.prompt.answers]
            row.seconds = time.perf_counter() - started
        live = storage.without_ended(rows, used)
        while live:
            self._step(storage, live, used)
            used += 1
            live = storage.without_ended(live, used)
        return rows

    def _prefill(self, storage: _Storage, row: Generation, earlier: Sequence[Generation]) -> torch.Tensor:
        """Copy what an earlier row shares, compute the rest; return the logits [1, vocabulary] of the next token."""
        tokens = row.prompt.tokens
        shared = [shared_tokens(other.prompt.tokens, tokens, self.chunk) for other in earlier]
        if done := max(shared, default=0):
            source = earlier[shared.index(done)]
            storage.copy((source.place, source.start), (row.place, row.start), done)
            row.reused = done
        cache = storage.view(slice(row.place, row.place + 1), row.start, done)
        ids, logits = torch.from_numpy(tokens[None]).to(self.device), torch.empty(0)
        for begin in range(done, len(tokens), self.chunk):
            part = ids[:, begin : begin + self.chunk]
            positions = torch.arange(begin, begin + part.shape[1], device=self.device)[None]
            logits = self._logits(input_ids=part, position_ids=positions, past_key_values=cache)
        return logits

    def _logprob(self, row: Generation, answer: Ints, storage: _Storage | None = None) -> float:
        """Return the log-likelihood of an answer in nats, from stored keys and values or else by a plain pass."""
        prompt, before, inputs = row.prompt, 0, dict[str, Any](use_cache=False)
        if storage is not None:
            before = prompt.shared - 1  # the token from which the answer's first one is predicted
            positions = torch.arange(before, before + len(answer), device=self.device)[None]
            cache = storage.view(slice(row.place, row.place + 1), row.start, before)
            inputs = {"use_cache": True, "past_key_values": cache, "position_ids": positions}
        forget_lengths(self._dynamic)
        ids = torch.from_numpy(np.concatenate([prompt.tokens[before : prompt.shared], answer[:-1]])[None])
        inputs |= dict.fromkeys(self._last, len(answer))
        logits = self._model(input_ids=ids.to(self.device), **inputs).logits[0, -len(answer) :]
        targets = torch.from_numpy(answer).to(logits.device)[:, None]
        total = float(logits.float().log_softmax(-1).gather(-1, targets).double().sum())
        if not math.isfinite(total):
            raise ScoringError(f"the log-likelihood of an answer is not a finite number; {NOT_FINITE_ADVICE}")
        return total

    def _step(self, storage: _Storage, live: Sequence[Generation], used: int) -> None:
        started = time.perf_counter()
        lengths = [len(row.prompt.tokens) + len(row.tokens) for row in live]
        starts, mask = np.array([row.start for row in live]), None
        if starts.any():
            mask = torch.from_numpy((np.arange(used + 1) >= starts[:, None]).astype(np.int64)).to(self.device)
        logits = self._logits(
            input_ids=torch.tensor([[row.tokens[-1]] for row in live], device=self.device),
            position_ids=torch.tensor([[length - 1] for length in lengths], device=self.device),
            attention_mask=mask,
            past_key_values=storage.view(slice(0, len(live)), 0, used),
        )
        chosen = choose(live, logits)
        share = (time.perf_counter() - started) / len(live)
        for row, token in zip(live, chosen, strict=True):
            row.append(token)
            row.seconds += share

    def _logits(self, **inputs: Any) -> torch.Tensor:
        """Return the logits after the last of the input tokens [rows, tokens]: [rows, vocabulary]."""
        logits: torch.Tensor = self._model(**inputs, use_cache=True, **self._last).logits[:, -1].float()
        return logits


def generator_of(loaded: LoadedModel, say: Say) -> Generator:
    """Return the generator of a loaded model; report if it generates texts one by one."""
    generator = Generator(loaded.model, tokenizer=loaded.tokenizer)
    if generator.without_cache:
        say(f"{generator.without_cache}: its texts are generated one by one with transformers")
    return generator
