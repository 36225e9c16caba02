"""Greedy generation of a batch: prompt after prompt in chunks, then all of them token by token.

A prompt goes through the model by itself, in chunks of a fixed size that begin at multiples of it, so its keys and
values are the same whatever batch it is in; what it shares with an earlier prompt of the batch is copied. Rows that
have ended leave the batch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evalkit.errors import CheckpointError, ScoringError, first_line
from evalkit.generation.attention import attending_in_chunks
from evalkit.generation.batches import Ints, Prompt, shared_tokens
from evalkit.generation.cache import Storage
from evalkit.models.dynamic import dynamic_modules, forget_lengths, lengths_computed_anew
from evalkit.models.parts import base_of
from evalkit.scoring.architecture import rotary_lengths
from evalkit.scoring.memory import is_out_of_memory

CHUNK = 512
"""Tokens of a prompt that go through the model at a time."""
_TRIED = 16
"""Tokens on which a model is tried before it generates."""
_NARROW = "its weights may be damaged, or its dtype too narrow: try --dtype float32"
_HEAD_TOLERANCE = 0.05
"""How far the likeliest token of the model itself may be from ours, of the range from our mean logit to the largest.
Rounding leaves 0.01 in bfloat16; another head is off by about 1."""


@dataclass(frozen=True)
class Generation:
    """What a model wrote."""

    tokens: list[int]
    """The token that ended it included."""
    ended: str
    """Why: "end" token, "enough" read, or "length"."""
    reused: int
    """Tokens of the prompt whose keys and values were another prompt's."""
    prompt_seconds: float
    """Until its first token."""
    seconds: float
    """Of its prompt, and its share of the steps that it was part of."""


class Generator:
    """Continues prompts with the likeliest token, again and again.

    Args:
        model: a Hugging Face causal language model in evaluation mode, with a cache of keys and values.
        chunk: tokens of a prompt at a time.
        tokenizer: of the model; needed by prompts that say when it is `enough`.

    Raises:
        CheckpointError: the model keeps a state in place of keys and values, does not run on a cache of them, gives no
            numbers, or does more after its base model than its output head.
    """

    def __init__(self, model: Any, chunk: int = CHUNK, tokenizer: Any = None) -> None:
        if getattr(model, "_is_stateful", False):
            raise CheckpointError(
                f"{type(model).__name__} keeps a state in place of each token's keys and values (as Mamba does), and "
                "evalkit generates from those alone"
            )
        # Frequencies that depend on the longest position of what is computed are those of the whole prompt, by itself
        trained = rotary_lengths(model.config)
        self.alone = bool(trained)
        """Whether prompts go through the model one by one and in one piece."""
        self.chunk = sys.maxsize if self.alone else chunk
        self._tokenizer = tokenizer
        self._model = model
        self._base = base_of(model)
        self._layers = int(model.config.get_text_config().num_hidden_layers)
        self._head = model.get_output_embeddings()
        self._device = self._head.weight.device
        self._dynamic = dynamic_modules(model)
        self._anew = lengths_computed_anew(model, trained)
        self.token_bytes = self._try()
        """Bytes of a token's keys and values, in all layers."""

    def _try(self) -> int:
        """Run a few tokens, hold what follows them against the model's own answer; bytes of each in the cache."""
        name = type(self._model).__name__
        ids = (torch.arange(_TRIED, device=self._device) % self._head.weight.shape[0])[None]
        storage = Storage(self._layers, 1, _TRIED)
        try:
            with torch.inference_mode():
                cache = storage.view(slice(0, 1), 0, 0)
                hidden = self._base(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
                ours, own = self._head(hidden)[0].float(), self._model(input_ids=ids).logits[0].float()
        except Exception as error:  # an architecture of any kind may fail in any way
            raise CheckpointError(
                f"{name} does not run as evalkit generates, on a cache of keys and values "
                f"({type(error).__name__}: {first_line(error)[:120]})"
            ) from error
        if not ours.isfinite().all():
            raise CheckpointError(f"the logits of {name} are not numbers; {_NARROW}")
        # The model may scale its logits or cap them, which moves none past another
        gap = ours.amax(-1) - ours.gather(-1, own.argmax(-1, keepdim=True))[:, 0]
        if (gap > _HEAD_TOLERANCE * (ours.amax(-1) - ours.mean(-1))).any():
            raise CheckpointError(
                f"{name} does more after its base model than its output head, so evalkit cannot generate with it"
            )
        size = sum(s.numel() * s.element_size() for s in (*storage.keys, *storage.values) if s is not None)
        if not size:
            raise CheckpointError(f"{name} keeps no keys and values, and evalkit generates from those alone")
        return size // _TRIED

    def generate(self, prompts: Sequence[Prompt], say: Callable[[str], None] = lambda _: None) -> list[Generation]:
        """Continue every prompt of a batch; in order.

        Args:
            prompts: of one batch; parted where memory runs out.
            say: told of that.

        Raises:
            ScoringError: out of memory on a single prompt.
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
                    "free some, or use a smaller dtype or --window"
                ) from error
        # Outside the handler, so that the traceback no longer holds the tensors
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        half = len(prompts) // 2
        say(f"out of memory on {len(prompts)} prompts: going on with {half}")
        return self.generate(prompts[:half], say) + self.generate(prompts[half:], say)

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Prompt]) -> list[Generation]:
        longest = max(len(prompt.tokens) for prompt in prompts)
        columns = longest + max(prompt.max_new_tokens for prompt in prompts)
        batch = _Batch(Storage(self._layers, len(prompts), columns), longest)
        rows = []
        for number, prompt in enumerate(prompts):
            started = time.perf_counter()
            reused, logits = self._prefill(batch, prompts, number)
            row = _Row(number, prompt, reused, self._tokenizer)
            row.take(_first(logits, prompt))
            row.seconds = row.prompt_seconds = time.perf_counter() - started
            rows.append(row)
        batch.rows = rows
        while batch.drop_ended():
            self._step(batch)
        return [row.generation() for row in rows]

    def _prefill(self, batch: _Batch, prompts: Sequence[Prompt], number: int) -> tuple[int, torch.Tensor]:
        """Put a prompt into its row; (tokens that were copied, logits of what follows it, [vocabulary])."""
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
        return done, self._logits(self._read(cache, tokens, done))[0]

    def _read(self, cache: Any, tokens: Ints, done: int) -> Any:
        """Compute the keys and values of tokens from `done` on, in chunks; [1, 1, d_model] of the last."""
        ids = torch.from_numpy(tokens[None]).to(self._device)
        hidden = None
        for begin in range(done, len(tokens), self.chunk):
            part = ids[:, begin : begin + self.chunk]
            positions = torch.arange(begin, begin + part.shape[1], device=self._device)[None]
            hidden = self._base(
                input_ids=part, position_ids=positions, past_key_values=cache, use_cache=True
            ).last_hidden_state[:, -1:]
        return hidden

    def _step(self, batch: _Batch) -> None:
        """One more token for every row that has not ended."""
        started = time.perf_counter()
        live = batch.rows
        if live[0].length in self._anew:  # where it is by itself
            hidden = self._read(batch.storage.view(slice(0, 1), 0, 0), live[0].text, 0)
        else:
            hidden = self._base(
                input_ids=torch.tensor([[row.tokens[-1]] for row in live], device=self._device),
                position_ids=torch.tensor([[row.length - 1] for row in live], device=self._device),
                attention_mask=batch.mask(self._device),
                past_key_values=batch.storage.view(slice(0, len(live)), 0, batch.used),
                use_cache=True,
            ).last_hidden_state
        likeliest = _likeliest(self._logits(hidden))
        batch.used += 1
        share = (time.perf_counter() - started) / len(live)
        for row, token in zip(live, likeliest, strict=True):
            row.take(token)
            row.seconds += share

    def _logits(self, hidden: Any) -> torch.Tensor:
        """[rows, 1, d_model] → [rows, vocabulary]; in the model's order (`_try`), if not of its size."""
        logits: torch.Tensor = self._head(hidden)[:, -1].float()
        return logits


class _Row:
    """A prompt that is being continued."""

    def __init__(self, number: int, prompt: Prompt, reused: int, tokenizer: Any) -> None:
        self.place = number
        self.prompt = prompt
        self.tokens: list[int] = []
        self.ended = ""
        self.prompt_seconds = self.seconds = 0.0
        self._reused = reused
        self._tokenizer = tokenizer

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what was generated."""
        return len(self.prompt.tokens) + len(self.tokens)

    @property
    def text(self) -> Ints:
        """[length] both."""
        return np.concatenate([self.prompt.tokens, np.array(self.tokens, dtype=np.int64)])

    def take(self, token: int) -> None:
        self.tokens.append(token)
        if token in self.prompt.ends:
            self.ended = "end"
        elif self.prompt.enough is not None and self.prompt.enough(self._text()):
            self.ended = "enough"
        elif len(self.tokens) >= self.prompt.max_new_tokens:
            self.ended = "length"

    def _text(self) -> str:
        """What was generated, less what is held back."""
        kept = self.tokens[: len(self.tokens) - self.prompt.held_back]
        return str(self._tokenizer.decode(kept, skip_special_tokens=True))

    def generation(self) -> Generation:
        return Generation(self.tokens, self.ended, self._reused, self.prompt_seconds, self.seconds)


class _Batch:
    """Rows of a storage, the live ones in front."""

    def __init__(self, storage: Storage, longest: int) -> None:
        self.storage = storage
        self.longest = longest
        self.used = longest
        self.rows: list[_Row] = []

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


def _first(logits: torch.Tensor, prompt: Prompt) -> int:
    """The likeliest first token that is not barred."""
    barred = sorted(token for token in prompt.barred_first if token < len(logits))
    if barred:
        logits[barred] = -torch.inf
    return _likeliest(logits[None])[0]


def _likeliest(logits: torch.Tensor) -> list[int]:
    """[rows, vocabulary] → a token for each row.

    Raises:
        ScoringError: they are not numbers.
    """
    largest, tokens = logits.max(-1)
    if not largest.isfinite().all():
        raise ScoringError(f"the model's logits are not numbers (NaN or infinite); {_NARROW}")
    return [int(token) for token in tokens.tolist()]
