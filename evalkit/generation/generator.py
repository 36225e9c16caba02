"""Generation of a batch: prefill of one prompt after the other in chunks, then decoding of all prompts together.

In: a model and a batch of prompts. Out: a `Generation` for each. Prefill takes one prompt at a time, in chunks of a
fixed size that start at multiples of it, so a prompt's keys and values do not depend on its batch. A prefix shared with
an earlier prompt of the batch is copied. Rows that have ended leave the batch. Models that do not run on this cache
generate one prompt at a time with transformers' `generate` (`rows.py`).
"""

from __future__ import annotations

import inspect
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from evalkit.compatibility.transformers import keeps_state
from evalkit.display import Say
from evalkit.errors import CheckpointError, ScoringError, first_line
from evalkit.generation.cache import Storage, chunked_attention
from evalkit.generation.prompts import CHUNK, Ints, Prompt, shared_tokens
from evalkit.generation.rows import NOT_FINITE_ADVICE, Generation, choose, generate_with_transformers, sampler_of
from evalkit.models.loading.load import LoadedModel
from evalkit.models.memory import check_room, is_out_of_memory, refuse_to_split
from evalkit.models.parts import cache_reset_lengths, dynamic_modules, forget_lengths
from evalkit.scoring.architecture import memory_beside_weights, rotary_lengths

_CHECKED_TOKENS = 16
"""Tokens on which the cache is checked before generation."""
_CACHE_TOLERANCE = 0.05
"""Tolerance of the cache check. With the cache, the token that is the argmax without a cache may be this far below the
largest logit, as a share of the range from the mean logit to the largest. Rounding gives 0.01 in bfloat16; logits of
another context differ by about 1."""


class Generator:
    """A token-by-token text generator.

    Args:
        model: a Hugging Face causal language model in evaluation mode.
        chunk: prompt tokens in one forward pass.
        tokenizer: the model's; needed by prompts with stop texts or a stop pattern.
    """

    def __init__(self, model: Any, chunk: int = CHUNK, tokenizer: Any = None) -> None:
        self._model, self._tokenizer = model, tokenizer
        head = model.get_output_embeddings().weight
        self.device, self._vocabulary = head.device, head.shape[0]
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
        # Rotary frequencies that depend on the longest position in a forward pass need each prompt whole and by itself
        trained = rotary_lengths(model.config)
        self.one_by_one = bool(trained) or bool(self.without_cache)
        """Whether prompts are generated one by one and prefilled in one piece."""
        self.chunk = sys.maxsize if self.one_by_one else chunk
        self._recomputed_lengths = frozenset() if self.without_cache else cache_reset_lengths(model, trained)

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
            storage, half = Storage(self._layers, 1, _CHECKED_TOKENS), _CHECKED_TOKENS // 2
            try:
                parts = [
                    self._model(input_ids=part, past_key_values=storage.view(slice(0, 1), 0, used), use_cache=True)
                    for part, used in ((ids[:, :half], 0), (ids[:, half:], half))
                ]
            except Exception as error:  # an architecture of any kind may fail in any way
                return f"{name} does not run on evalkit's cache ({type(error).__name__}: {first_line(error)[:120]})"
        sizes: Counter[torch.device] = Counter()
        for states in storage.states():
            sizes[states.device] += states[0, :, 0].numel() * states.element_size()
        if not sizes.total():
            return f"{name} has no key-value cache"
        cached = torch.cat([part.logits[0].float() for part in parts])
        gap = cached.amax(-1) - cached.gather(-1, uncached.argmax(-1, keepdim=True))[:, 0]
        # Written so that NaN exceeds the tolerance
        if not (gap <= _CACHE_TOLERANCE * (cached.amax(-1) - cached.mean(-1))).all():
            return f"{name} gives different logits with a key-value cache than without one"
        self.token_bytes_on = sizes
        return ""

    def generate(self, prompts: Sequence[Prompt], say: Say = lambda _: None) -> list[Generation]:
        """Generate the continuations of a batch, in the order of its prompts.

        Args:
            prompts: one batch; it is split in halves when memory runs out.
            say: called with a line when that happens.

        Raises:
            ScoringError: out of memory on a single prompt, or NaN or infinite logits.
            UsageError: a prompt has decoding settings that are not supported.
        """
        if self.one_by_one and len(prompts) > 1:
            return [row for prompt in prompts for row in self.generate([prompt], say)]
        try:
            with chunked_attention(self._model):
                return self._generate(prompts)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            refuse_to_split(f"{len(prompts)} prompts")
            if len(prompts) == 1:
                raise ScoringError(
                    f"a prompt of {len(prompts[0].tokens)} tokens is more than memory holds; "
                    "free some, or use a smaller dtype or --max-prompt-tokens"
                ) from error
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
                generate_with_transformers(self._model, row)
            return rows
        longest = max(len(prompt.tokens) for prompt in prompts)
        columns = longest + max(prompt.max_new_tokens for prompt in prompts)
        check_room(self.device, len(prompts) * columns * self.token_bytes)
        batch = _Batch(Storage(self._layers, len(prompts), columns), rows, longest)
        for place, row in enumerate(rows):
            started = time.perf_counter()
            row.place = place
            row.append(*choose([row], self._prefill(batch, row)))
            row.seconds = row.prompt_seconds = time.perf_counter() - started
        while batch.drop_ended():
            self._step(batch)
        return rows

    def _prefill(self, batch: _Batch, row: Generation) -> torch.Tensor:
        """Copy what an earlier row shares, compute the rest; return the logits [1, vocabulary] of the next token."""
        tokens, earlier = row.prompt.tokens, batch.rows[: row.place]
        shared = [shared_tokens(other.prompt.tokens, tokens, self.chunk) for other in earlier]
        if done := max(shared, default=0):
            source = earlier[shared.index(done)]
            batch.storage.copy_tokens((source.place, batch.start(source)), (row.place, batch.start(row)), done)
            row.reused = done
        forget_lengths(self._dynamic)
        cache = batch.storage.view(slice(row.place, row.place + 1), batch.start(row), done)
        return self._forward_chunks(cache, tokens, done)

    def _forward_chunks(self, cache: Any, tokens: Ints, done: int) -> torch.Tensor:
        """Run tokens from index `done` on through the model in chunks; return logits [1, vocabulary] after the last."""
        ids = torch.from_numpy(tokens[None]).to(self.device)
        logits = torch.empty(0)
        for begin in range(done, len(tokens), self.chunk):
            part = ids[:, begin : begin + self.chunk]
            positions = torch.arange(begin, begin + part.shape[1], device=self.device)[None]
            logits = self._logits(input_ids=part, position_ids=positions, past_key_values=cache)
        return logits

    def _step(self, batch: _Batch) -> None:
        """Generate one token for every row that has not ended."""
        started, live = time.perf_counter(), batch.live
        lengths = [len(row.prompt.tokens) + len(row.tokens) for row in live]
        if lengths[0] in self._recomputed_lengths:  # only for batches of one
            logits = self._forward_chunks(batch.storage.view(slice(0, 1), 0, 0), live[0].all_tokens, 0)
        else:
            logits = self._logits(
                input_ids=torch.tensor([[row.tokens[-1]] for row in live], device=self.device),
                position_ids=torch.tensor([[length - 1] for length in lengths], device=self.device),
                attention_mask=batch.mask(self.device),
                past_key_values=batch.storage.view(slice(0, len(live)), 0, batch.used),
            )
        chosen = choose(live, logits)
        batch.used += 1
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


class _Batch:
    """A batch during generation; rows that have not ended come first in the storage."""

    def __init__(self, storage: Storage, rows: Sequence[Generation], longest: int) -> None:
        self.storage, self.rows, self._longest, self.used = storage, rows, longest, longest
        self.live = list(rows)

    def start(self, row: Generation) -> int:
        """Return the first column of a row's prompt; those to its left are padding."""
        return self._longest - len(row.prompt.tokens)

    def drop_ended(self) -> bool:
        """Move live rows into the places of ended rows; return whether any row is live."""
        live = [row for row in self.live if not row.ended]
        free = sorted(set(range(len(live))) - {row.place for row in live})
        for row in live:
            if row.place >= len(live):
                start, target = self.start(row), free.pop()
                self.storage.copy_tokens((row.place, start), (target, start), self.used - start)
                row.place = target
        self.live = sorted(live, key=lambda row: row.place)
        return bool(live)

    def mask(self, device: Any) -> torch.Tensor | None:
        """Return the attention mask [rows, used + 1], ones for tokens; None without padding."""
        starts = np.array([self.start(row) for row in self.live])
        if not starts.any():
            return None
        return torch.from_numpy((np.arange(self.used + 1) >= starts[:, None]).astype(np.int64)).to(device)
