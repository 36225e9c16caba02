"""Generation of a batch: prefill of one prompt after the other, then decoding of all prompts together.

In: a model and a batch of prompts. Out: a `Generation` for each. What the model keeps of the tokens is in evalkit's
columns of keys and values, or else in the model's own caches (`storage.py`); rows that have ended leave the batch. A
model that does not reproduce its own logits from either generates one prompt at a time with transformers' `generate`
(`rows.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from evalkit.compatibility.transformers import keeps_state
from evalkit.display import Say
from evalkit.errors import CheckpointError, ScoringError, first_line
from evalkit.generation.prompts import CHUNK, Ints, Prompt
from evalkit.generation.rows import NOT_FINITE_ADVICE, Generation, choose, generate_with_transformers, sampler_of
from evalkit.generation.storage import Behind, Calls, Columns, OwnCaches, Sizes, Storage
from evalkit.models.loading.load import LoadedModel
from evalkit.models.loading.tokenizer import refuse_tokens_without_rows
from evalkit.models.memory import check_room, is_out_of_memory, refuse_to_split
from evalkit.models.parts import dynamic_modules, forget_lengths
from evalkit.scoring.architecture import memory_beside_weights, rotary_lengths

_CHECKED_TOKENS, _SHORTER = 16, 11
"""Tokens of the two texts of the cache check; the shorter one's prompt is shorter than a convolution's kernel."""
_CHECKED_STEPS, _CHECKED_CHUNK = 8, 4
_CACHE_TOLERANCE, _LEAST_EPSILON = 0.6, 2.0**-16
"""Tolerance of the cache check, in units of rounding: the deviation of the logits that rounding the embeddings once
more causes in this model, times √(2 layers), since each layer adds twice to what is rounded. The cache's own rounding
gives 0 to 0.25 in every dtype; positions that are off by one give 1 to 8 in bfloat16, and more in others. Kernels of
float32 differ by more than its epsilon."""


def _deviation(logits: torch.Tensor, others: torch.Tensor) -> float:
    """Return the deviation of logits [tokens, vocabulary] from others, as a share of theirs, at half of the tokens.

    The others' last tokens are those of the logits.
    """
    others = others[-len(logits) :]
    return float(((logits - others).std(-1) / others.std(-1)).median())


class Generator:
    """A generator of a causal language model, whose tokenizer is needed by stop texts and patterns only."""

    def __init__(self, model: Any, chunk: int = CHUNK, tokenizer: Any = None) -> None:
        self._model, self._tokenizer, self.chunk = model, tokenizer, chunk
        head = model.get_output_embeddings().weight
        self.device, self._dtype, self._vocabulary = head.device, model.dtype, head.shape[0]
        self._dynamic = dynamic_modules(model)
        self._layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0))
        self._calls = Calls(model)
        self.memory = memory_beside_weights(model)
        """Bytes of memory beside the weights, by device."""
        self.sizes = Sizes({}, {}, 0)
        """Sizes of what the model keeps of a row; 0 if its texts are generated one by one."""
        self.storage: Callable[..., Storage] | None = None
        self.without_cache = self._choose_storage()
        """Reason why texts are generated one by one; empty if they are generated in batches."""
        self.token_bytes = sum(self.sizes.token_bytes.values())
        """Bytes of one token's keys and values, in all layers."""
        self.row_bytes = sum(self.sizes.row_bytes.values())
        """Bytes of a row's states, which do not grow with its tokens."""

    def _choose_storage(self) -> str:
        """Choose the first storage that gives the logits of plain passes on a few tokens; return why none does, or ""."""
        name = type(self._model).__name__
        ids = torch.arange(_CHECKED_TOKENS, device=self.device) % self._vocabulary
        texts = [ids, ids.flip(0)[:_SHORTER]]
        with torch.inference_mode():
            plain = [self._model(input_ids=text[None], use_cache=False).logits[0].float() for text in texts]
            if not all(logits.isfinite().all() for logits in plain):
                raise CheckpointError(f"the logits of {name} are not numbers; {NOT_FINITE_ADVICE}")
            if rotary_lengths(self._model.config):
                return f"the rotary frequencies of {name} depend on the length of a text"
            tolerance = _CACHE_TOLERANCE * (2 * self._layers) ** 0.5 * self._rounding(texts[0], plain[0])
            why_not = ""
            for storage, is_chunked in self._storages():
                try:
                    found, sizes = self._decoded(texts, partial(storage, chunk=_CHECKED_CHUNK if is_chunked else 0))
                except Exception as error:  # an architecture of any kind may fail in any way
                    why_not = f"{name} does not run in batches ({type(error).__name__}: {first_line(error)[:120]})"
                    continue
                # Written so that NaN exceeds the tolerance
                if all(_deviation(*pair) <= tolerance for pair in zip(found, plain, strict=True)):
                    self.storage = partial(storage, chunk=self.chunk if is_chunked else 0)
                    self.sizes = sizes
                    return ""
                why_not = f"{name} gives different logits with a cache than without one"
        return why_not

    def _storages(self) -> Iterator[tuple[Callable[..., Storage], bool]]:
        """Yield the forms of storage, the fastest first, and whether prompts are run in chunks."""
        if not keeps_state(self._model):
            yield partial(Columns, layers=self._layers), True
        yield OwnCaches, True
        yield OwnCaches, False

    def _decoded(
        self, texts: Sequence[torch.Tensor], storage_of: Callable[..., Storage]
    ) -> tuple[list[torch.Tensor], Sizes]:
        """Return the logits [tokens, vocabulary] of the last tokens of each text, which are run one by one in a batch.

        The tokens before them are prompts of different lengths.
        """
        rows = []
        for text in texts:
            prompt = Prompt(len(rows), text[:-_CHECKED_STEPS].cpu().numpy(), 1 + _CHECKED_STEPS)
            rows.append(Generation(prompt, None, None))
        storage = storage_of(self._calls, rows)
        for index in range(len(rows)):
            storage.prefill(index)
        storage.without_ended(rows)
        steps = []
        for step in range(_CHECKED_STEPS):
            for row, text in zip(rows, texts, strict=True):
                row.append(int(text[step - _CHECKED_STEPS]))
            steps.append(storage.step(rows))
        return list(torch.stack(steps, 1)), storage.sizes()

    def _rounding(self, ids: torch.Tensor, logits: torch.Tensor) -> float:
        """Return the deviation of logits [tokens, vocabulary] at the last tokens, if the embeddings are rounded again."""
        epsilon = max(torch.finfo(self._dtype).eps, _LEAST_EPSILON)

        def rounded(_: Any, __: Any, embeddings: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(embeddings.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
            return embeddings * (1 + epsilon * noise).to(embeddings)

        hook = self._model.get_input_embeddings().register_forward_hook(rounded)
        try:
            with torch.inference_mode():
                again = self._model(input_ids=ids[None], use_cache=False).logits[0, -_CHECKED_STEPS:].float()
        finally:
            hook.remove()
        return max(_deviation(again, logits), epsilon)

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
        if self.storage is None:
            for row in rows:
                forget_lengths(self._dynamic)
                generate_with_transformers(self._model, row)
                row.logprobs = [self._logprob(row, answer) for answer in row.prompt.answers]
            return rows
        columns = max(len(prompt.tokens) for prompt in prompts)
        columns += max(prompt.columns - len(prompt.tokens) for prompt in prompts)
        check_room(self.device, len(prompts) * (columns * self.token_bytes + self.row_bytes))
        storage = self.storage(self._calls, rows)
        for index, row in enumerate(rows):
            started = time.perf_counter()
            row.append(*choose([row], storage.prefill(index)))
            row.prompt_seconds = time.perf_counter() - started
            if row.prompt.answers:
                with storage.before_answers(index) as behind:
                    row.logprobs = [self._logprob(row, answer, behind) for answer in row.prompt.answers]
            row.seconds = time.perf_counter() - started
        live = storage.without_ended(rows)
        while live:
            self._step(storage, live)
            live = storage.without_ended(live)
        return rows

    def _logprob(self, row: Generation, answer: Ints, behind: Behind | None = None) -> float:
        """Return the log-likelihood of an answer in nats, behind the prompt's stored tokens or else by a plain pass."""
        prompt = row.prompt
        # The token from which the answer's first one is predicted is not among the stored ones
        stored = 0 if behind is None else prompt.shared - 1
        ids = np.concatenate([prompt.tokens[stored : prompt.shared], answer[:-1]])
        if behind is None:
            forget_lengths(self._dynamic)
            logits, _ = self._calls.run(ids, None, len(answer), use_cache=False)
        else:
            logits = behind(ids)
        targets = torch.from_numpy(answer).to(logits.device)[:, None]
        total = float(logits[0].log_softmax(-1).gather(-1, targets).double().sum())
        if not math.isfinite(total):
            raise ScoringError(f"the log-likelihood of an answer is not a finite number; {NOT_FINITE_ADVICE}")
        return total

    def _step(self, storage: Storage, live: Sequence[Generation]) -> None:
        started = time.perf_counter()
        chosen = choose(live, storage.step(live))
        share = (time.perf_counter() - started) / len(live)
        for row, token in zip(live, chosen, strict=True):
            row.append(token)
            row.seconds += share


def generator_of(loaded: LoadedModel, say: Say) -> Generator:
    """Return the generator of a loaded model; report if it generates texts one by one."""
    generator = Generator(loaded.model, tokenizer=loaded.tokenizer)
    if generator.without_cache:
        say(f"{generator.without_cache}: its texts are generated one by one with transformers")
    return generator
