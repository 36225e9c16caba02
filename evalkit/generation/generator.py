"""Generation of a batch: prompt after prompt in chunks, then all of them token by token.

A prompt goes through the model by itself, in chunks of a fixed size that begin at multiples of it, so its keys and
values are the same whatever batch it is in; what it shares with an earlier prompt of the batch is copied. Rows that
have ended leave the batch. A model that cannot be run on such keys and values continues its prompts one by one by
transformers' own `generate` (`alone.py`), under the same rules of what comes next and what is enough.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from evalkit.compatibility.transformers import keeps_state
from evalkit.errors import CheckpointError, ScoringError, first_line
from evalkit.generation.alone import continue_alone
from evalkit.generation.attention import attending_in_chunks
from evalkit.generation.batches import shared_tokens
from evalkit.generation.cache import Storage
from evalkit.generation.choosing import chooser_of
from evalkit.generation.prompts import Ints, Prompt
from evalkit.generation.rows import NARROW, Generation, GenerationRow, choose
from evalkit.models.dynamic import cache_reset_lengths, dynamic_modules, forget_lengths
from evalkit.models.load import LoadedModel
from evalkit.scoring.architecture import rotary_lengths
from evalkit.scoring.memory import is_out_of_memory

CHUNK = 512
"""Tokens of a prompt that go through the model at a time."""
_TRIED = 16
"""Tokens on which a model is tried before it generates."""
_CACHE_TOLERANCE = 0.05
"""How far below the largest logit on our cache that of the argmax without a cache may be, as a share of the range from
the mean logit to the largest. Rounding leaves 0.01 in bfloat16; logits of another context are off by about 1."""


class Generator:
    """Continues prompts, token by token.

    Args:
        model: a Hugging Face causal language model in evaluation mode.
        chunk: tokens of a prompt at a time.
        tokenizer: of the model; needed by prompts whose stops read the text.

    Raises:
        CheckpointError: the model gives no numbers.
    """

    def __init__(self, model: Any, chunk: int = CHUNK, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._head = model.get_output_embeddings()
        self.device = self._head.weight.device
        self._dynamic = dynamic_modules(model)
        # Of a prompt's chunk, only the last token's logits are asked for
        last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last: dict[str, int] = {"logits_to_keep": 1} if last else {}
        self.token_bytes = 0
        """Bytes of a token's keys and values, in all layers; 0 where there are none to be had."""
        self.without_cache = self._try()
        """Why the model does not run on evalkit's keys and values, in words; empty where it does."""
        # Frequencies that depend on the longest position of what is computed are those of the whole prompt, by itself
        trained = rotary_lengths(model.config)
        self.alone = bool(trained) or bool(self.without_cache)
        """Whether prompts go through the model one by one and in one piece."""
        self.chunk = sys.maxsize if self.alone else chunk
        self._anew = frozenset() if self.without_cache else cache_reset_lengths(model, trained)

    def _try(self) -> str:
        """Run a few tokens in two steps and compare what follows with the model's answer without a cache."""
        name = type(self._model).__name__
        ids = (torch.arange(_TRIED, device=self.device) % self._head.weight.shape[0])[None]
        with torch.inference_mode():
            own = self._model(input_ids=ids).logits[0].float()
            if not own.isfinite().all():
                raise CheckpointError(f"the logits of {name} are not numbers; {NARROW}")
            if keeps_state(self._model):
                return f"{name} keeps a state in place of each token's keys and values"
            storage = Storage(int(self._model.config.get_text_config().num_hidden_layers), 1, _TRIED)
            try:
                half = _TRIED // 2
                parts = [
                    self._model(input_ids=part, past_key_values=storage.view(slice(0, 1), 0, used), use_cache=True)
                    for part, used in ((ids[:, :half], 0), (ids[:, half:], half))
                ]
            except Exception as error:  # an architecture of any kind may fail in any way
                return f"{name} does not run on evalkit's cache ({type(error).__name__}: {first_line(error)[:120]})"
        size = sum(s[0, :, 0].numel() * s.element_size() for s in (*storage.keys, *storage.values) if s is not None)
        if not size:
            return f"{name} keeps no keys and values"
        ours = torch.cat([part.logits[0].float() for part in parts])
        gap = ours.amax(-1) - ours.gather(-1, own.argmax(-1, keepdim=True))[:, 0]
        # Written so that what is not a number is too far
        if not (gap <= _CACHE_TOLERANCE * (ours.amax(-1) - ours.mean(-1))).all():
            return f"{name} gives other logits on a cache of keys and values than without one"
        self.token_bytes = size
        return ""

    def generate(self, prompts: Sequence[Prompt], say: Callable[[str], None] = lambda _: None) -> list[Generation]:
        """Continue every prompt of a batch; in order.

        Args:
            prompts: of one batch; split where memory runs out.
            say: called where that happens.

        Raises:
            ScoringError: out of memory on a single prompt, or logits that are not numbers.
            UsageError: a prompt asks for a choice of tokens that is not served (`choosing.py`).
        """
        if self.alone and len(prompts) > 1:
            return [one for prompt in prompts for one in self.generate([prompt], say)]
        try:
            with attending_in_chunks(self._model):
                return self._generate(prompts)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if len(prompts) == 1:
                raise ScoringError(
                    f"a prompt of {len(prompts[0].tokens)} tokens is more than memory holds; "
                    "free some, or use a smaller dtype or --max-prompt-tokens"
                ) from error
        # Outside the handler, so that the traceback no longer holds the tensors
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        half = len(prompts) // 2
        say(f"out of memory on {len(prompts)} prompts: going on with {half}")
        return self.generate(prompts[:half], say) + self.generate(prompts[half:], say)

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Prompt]) -> list[Generation]:
        rows = [GenerationRow(prompt, chooser_of(self._model, prompt), self._tokenizer) for prompt in prompts]
        if self.without_cache:
            for row in rows:
                continue_alone(self._model, row)
            return [row.generation() for row in rows]
        longest = max(len(prompt.tokens) for prompt in prompts)
        columns = longest + max(prompt.max_new_tokens for prompt in prompts)
        layers = int(self._model.config.get_text_config().num_hidden_layers)
        batch = _Batch(Storage(layers, len(prompts), columns), longest)
        for place, row in enumerate(rows):
            started = time.perf_counter()
            row.place = place
            row.reused, logits = self._prefill(batch, prompts, place)
            row.take(*choose([row], logits))
            row.seconds = row.prompt_seconds = time.perf_counter() - started
        batch.rows = list(rows)
        while batch.drop_ended():
            self._step(batch)
        return [row.generation() for row in rows]

    def _prefill(self, batch: _Batch, prompts: Sequence[Prompt], number: int) -> tuple[int, torch.Tensor]:
        """Put a prompt into its row; (tokens that were copied, logits of what follows it, [1, vocabulary])."""
        tokens = prompts[number].tokens
        start = batch.longest - len(tokens)
        shared = [shared_tokens(earlier.tokens, tokens, self.chunk) for earlier in prompts[:number]]
        done = max(shared, default=0)
        if done:
            source = shared.index(done)
            place = (source, batch.longest - len(prompts[source].tokens))
            batch.storage.copy_tokens(place, (number, start), done)
        forget_lengths(self._dynamic)
        cache = batch.storage.view(slice(number, number + 1), start, done)
        return done, self._read(cache, tokens, done)

    def _read(self, cache: Any, tokens: Ints, done: int) -> Any:
        """Compute the keys and values of tokens from `done` on, in chunks; logits [1, vocabulary] after the last."""
        ids = torch.from_numpy(tokens[None]).to(self.device)
        logits = None
        for begin in range(done, len(tokens), self.chunk):
            part = ids[:, begin : begin + self.chunk]
            positions = torch.arange(begin, begin + part.shape[1], device=self.device)[None]
            logits = self._logits(input_ids=part, position_ids=positions, past_key_values=cache)
        return logits

    def _step(self, batch: _Batch) -> None:
        """One more token for every row that has not ended."""
        started = time.perf_counter()
        live = batch.rows
        if live[0].length in self._anew:  # where it is by itself
            logits = self._read(batch.storage.view(slice(0, 1), 0, 0), live[0].text, 0)
        else:
            logits = self._logits(
                input_ids=torch.tensor([[row.tokens[-1]] for row in live], device=self.device),
                position_ids=torch.tensor([[row.length - 1] for row in live], device=self.device),
                attention_mask=batch.mask(self.device),
                past_key_values=batch.storage.view(slice(0, len(live)), 0, batch.used),
            )
        chosen = choose(live, logits)
        batch.used += 1
        share = (time.perf_counter() - started) / len(live)
        for row, token in zip(live, chosen, strict=True):
            row.take(token)
            row.seconds += share

    def _logits(self, **inputs: Any) -> torch.Tensor:
        """What follows the last of some tokens [rows, tokens]: [rows, vocabulary]."""
        logits: torch.Tensor = self._model(**inputs, use_cache=True, **self._last).logits[:, -1].float()
        return logits


def generator_of(loaded: LoadedModel, say: Callable[[str], None]) -> Generator:
    """The generator of a loaded model; says so where its texts are generated one by one."""
    generator = Generator(loaded.model, tokenizer=loaded.tokenizer)
    if generator.without_cache:
        say(f"{generator.without_cache}: its texts are generated one by one, by transformers")
    return generator


class _Batch:
    """Rows of a storage, the live ones in front."""

    def __init__(self, storage: Storage, longest: int) -> None:
        self.storage = storage
        self.longest = longest
        self.used = longest
        self.rows: list[GenerationRow] = []

    def drop_ended(self) -> bool:
        """Let live rows take the places of ended ones; whether any is left."""
        live = [row for row in self.rows if not row.ended]
        free = sorted(set(range(len(live))) - {row.place for row in live})
        for row in live:
            if row.place >= len(live):
                # Not the row's whole room: what stands left of it is masked
                start = self.longest - len(row.prompt.tokens)
                target = free.pop()
                self.storage.copy_tokens((row.place, start), (target, start), self.used - start)
                row.place = target
        self.rows = sorted(live, key=lambda row: row.place)
        return bool(live)

    def mask(self, device: Any) -> torch.Tensor | None:
        """[rows, used + 1] ones where there are tokens; None where there is nothing else."""
        starts = np.array([self.longest - len(row.prompt.tokens) for row in self.rows])
        if not starts.any():
            return None
        return torch.from_numpy((np.arange(self.used + 1) >= starts[:, None]).astype(np.int64)).to(device)
