"""Generation of a batch: prefill of one prompt after the other, then decoding of all prompts together.

In: a model and a batch of prompts. Out: a `Generation` for each. What the model keeps of the tokens is in evalkit's
columns of keys and values (`columns.py`), or else in the model's own caches (`own_caches.py`); rows that have ended
leave the batch. A model that does not give its own logits from either generates one prompt at a time with transformers'
`generate` (`rows.py`).
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
from evalkit.errors import ScoringError
from evalkit.generation.checking import StorageCheck
from evalkit.generation.columns import Columns
from evalkit.generation.own_caches import OwnCaches
from evalkit.generation.prompts import CHUNK, Ints, Prompt
from evalkit.generation.rows import NOT_FINITE_ADVICE, Generation, choose, generate_with_transformers, sampler_of
from evalkit.generation.storage import NOTHING, Behind, Calls, Storage
from evalkit.models.loading.load import LoadedModel
from evalkit.models.loading.tokenizer import refuse_tokens_without_rows
from evalkit.models.memory import check_room, is_out_of_memory, refuse_to_split
from evalkit.models.parts import dynamic_modules, forget_lengths
from evalkit.scoring.architecture import memory_beside_weights, rotary_lengths


class Generator:
    """A generator of a causal language model, whose tokenizer is needed by stop texts and patterns only."""

    def __init__(self, model: Any, chunk: int = CHUNK, tokenizer: Any = None) -> None:
        self._model, self._tokenizer, self.chunk = model, tokenizer, chunk
        self._calls = Calls(model)
        self.device = self._calls.device
        self._dynamic = dynamic_modules(model)
        self.memory = memory_beside_weights(model)
        """Bytes of memory beside the weights, by device."""
        self.sizes = NOTHING
        """Sizes of what the model keeps of a row; 0 if its texts are generated one by one."""
        self.storage: Callable[..., Storage] | None = None
        self.without_cache = self._choose_storage()
        """Reason why texts are generated one by one; empty if they are generated in batches."""
        self.token_bytes = sum(self.sizes.token_bytes.values())
        """Bytes of one token's keys and values, in all layers."""
        self.row_bytes = sum(self.sizes.row_bytes.values())
        """Bytes of a row's states, which do not grow with its tokens."""

    def _choose_storage(self) -> str:
        """Choose the first form of storage from which the model gives its own logits; return why none is."""
        name = type(self._model).__name__
        with torch.inference_mode():
            check = StorageCheck(self._model, self._calls)
            if rotary_lengths(self._model.config):
                return f"the rotary frequencies of {name} depend on the length of a text"
            why_not = ""
            for form, is_chunked in self._forms():
                why_not = check.why_not(form, is_chunked)
                if not why_not:
                    self.storage = partial(form, chunk=self.chunk if is_chunked else 0)
                    self.sizes = check.sizes
                    return ""
        return f"{name} {why_not}"

    def _forms(self) -> Iterator[tuple[Callable[..., Storage], bool]]:
        """Yield the forms of storage, the fastest first, and whether prompts are run in chunks."""
        if not keeps_state(self._model):
            layers = int(getattr(self._model.config.get_text_config(), "num_hidden_layers", 0))
            yield partial(Columns, layers=layers), True
        yield OwnCaches, True
        yield OwnCaches, False

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
