"""Decoding of one prompt: its tokens so far, its stopping criteria, transformers' logits processors and sampling.

In: a `Prompt`, then logits step by step. Out: a `Generation`. Models that do not run in batches are decoded by
transformers' `generate`, with the same choice of tokens.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from evalkit.compatibility.transformers import generation_config_of, logits_processors, quiet
from evalkit.errors import ScoringError, UsageError, first_line
from evalkit.generation.prompts import Decoding, Ints, Prompt

_SUPPORTED = frozenset({
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens", "suppress_tokens",
    "begin_suppress_tokens", "forced_eos_token_id", "exponential_decay_length_penalty", "remove_invalid_values",
    "renormalize_logits", "eos_token_id",
    "use_cache", "pad_token_id", "bos_token_id",  # of no effect
})  # fmt: skip
"""Settings of transformers' generation config that a prompt may have."""
_ONLY_ONE = ("num_beams", "num_beam_groups", "num_return_sequences")
_UNSUPPORTED = ("penalty_alpha", "dola_layers", "stop_strings", "token_healing", "max_time", "assistant_early_exit")
"""Settings of a model's generation config with which `generate` does not choose token by token."""
_ONE_BY_ONE = "evalkit generates one text at a time, token by token"
NOT_FINITE_ADVICE = "its weights may be damaged, or its dtype too narrow: try --dtype float32"


Sampler = tuple[Any, torch.Generator | None]
"""Processors of logits, (token ids [1, length], logits [1, vocabulary]) → logits, and the random numbers of a choice
among the processed logits; without them it is the argmax."""


def sampler_of(model: Any, prompt: Prompt) -> Sampler | None:
    """Return the sampler of a prompt; None: the argmax. A setting that is not supported is a `UsageError`."""
    if prompt.decoding is None:
        return None
    for name, value in prompt.decoding.settings.items():
        if name not in _SUPPORTED and not (name in _ONLY_ONE and value in (None, 1)):
            raise UsageError(f"generation setting {name} is {value!r:.40}, which is not supported; {_ONE_BY_ONE}")
    with quiet():
        config = generation_config_of(model, dict(prompt.decoding.settings))
        names = [name for name in _UNSUPPORTED if getattr(config, name, None)]
        if names := names + ["num_beams"] * ((config.num_beams or 1) > 1):
            raise UsageError(f"the model's generation config has {names[0]}, which is not supported; {_ONE_BY_ONE}")
        config.max_length = prompt.columns
        processors = logits_processors(model, config, torch.from_numpy(prompt.tokens[None]).to(model.device))
    if not config.do_sample:
        return (processors, None) if processors else None
    return processors, torch.Generator().manual_seed(prompt.decoding.seed)


def check_settings(model: Any, settings: Mapping[str, Any]) -> None:
    """Raise a `UsageError` for settings that `sampler_of` rejects, or that fail on a first token."""
    try:
        sampler = sampler_of(model, Prompt(0, np.zeros(1, np.int64), 1, decoding=Decoding(settings)))
        if sampler is not None:
            ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            sampler[0](ids, torch.zeros(1, model.config.get_text_config().vocab_size, device=model.device))
    except (ValueError, TypeError, IndexError) as error:
        raise UsageError(f"transformers rejects its settings ({first_line(error)})") from error


class Generation:
    """The continuation of one prompt, during generation and after it; without a sampler the argmax of the logits."""

    def __init__(self, prompt: Prompt, sampler: Sampler | None, tokenizer: Any) -> None:
        self.prompt, self.sampler = prompt, sampler
        self.place = self.start = 0
        """Row and first column of its prompt in the storage of its batch."""
        self.tokens: list[int] = []
        """Generated token ids, the end token included."""
        self.ended = ""
        """Why generation stopped: "end" (end token), "enough" (stop text or pattern found) or "length"."""
        self.reused = 0
        """Prompt tokens whose keys, values and states were copied from another prompt."""
        self.logprobs: list[float] = []
        """Log-likelihood of each of the prompt's answers, in nats."""
        self.prompt_seconds = 0.0
        """Time to the first generated token."""
        self.seconds = 0.0
        """Time of the prompt plus its share of each decoding step that it was part of."""
        self._tokenizer = tokenizer
        self._until: dict[int, list[str]] = {}
        for text in prompt.stops.until:
            length = len(tokenizer.encode(text, add_special_tokens=False))
            self._until.setdefault(length + 2, []).append(text)

    @property
    def all_tokens(self) -> Ints:
        """Prompt and generated token ids, [length]."""
        return np.concatenate([self.prompt.tokens, np.array(self.tokens, dtype=np.int64)])

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if token in self.prompt.stops.ends:
            self.ended = "end"
        elif self._has_stop_text():
            self.ended = "enough"
        elif len(self.tokens) >= self.prompt.max_new_tokens:
            self.ended = "length"

    def _has_stop_text(self) -> bool:
        stops = self.prompt.stops
        for window, texts in self._until.items():
            last = self._tokenizer.decode(self.tokens[-window:])
            if any(text in last for text in texts):
                return True
        if not stops.pattern:
            return False
        searched = self.tokens[: len(self.tokens) - stops.unsearched_tail]
        return re.search(stops.pattern, self._tokenizer.decode(searched, skip_special_tokens=True)) is not None


def choose(rows: Sequence[Generation], logits: torch.Tensor) -> list[int]:
    """Choose the next token of each row; logits, [rows, vocabulary] in float32, may be modified in place."""
    for row, row_logits in zip(rows, logits, strict=True):
        if not row.tokens:
            row_logits[[token for token in row.prompt.stops.barred_first if token < len(row_logits)]] = -torch.inf
    largest, tokens = logits.max(-1)
    if not largest.isfinite().all():
        raise ScoringError(f"the model's logits are not numbers (NaN or infinite); {NOT_FINITE_ADVICE}")
    chosen = [int(token) for token in tokens.tolist()]
    for index, row in enumerate(rows):
        if row.sampler is not None:
            processors, random = row.sampler
            scores = processors(torch.from_numpy(row.all_tokens[None]).to(logits.device), logits[index : index + 1])
            if not scores.amax().isfinite():
                raise ScoringError("the generation settings leave no token to choose from")
            if random is None:
                chosen[index] = int(scores.argmax(-1))
            else:  # on the CPU, where random numbers are the same on every machine
                chosen[index] = int(torch.multinomial(scores.softmax(-1).cpu(), 1, generator=random))
    return chosen


def generate_with_transformers(model: Any, row: Generation) -> None:
    """Generate the tokens of a row until it ends, by a model that does not run in batches."""
    ids = torch.from_numpy(row.prompt.tokens[None]).to(model.device)
    config, started = model.generation_config, time.perf_counter()

    def only_chosen(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return logits [1, vocabulary], minus infinity for every token but the one that the row chooses."""
        [token] = choose([row], scores.float())
        row.append(token)
        if len(row.tokens) == 1:
            row.prompt_seconds = time.perf_counter() - started
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([token], device=scores.device), 0.0)

    def has_ended(input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.tensor([bool(row.ended)], device=input_ids.device)

    # The row already applies the model's settings
    model.generation_config = GenerationConfig()
    try:
        with quiet():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=row.prompt.max_new_tokens,
                do_sample=False,
                pad_token_id=0,
                logits_processor=[only_chosen],
                stopping_criteria=[has_ended],
            )
    finally:
        model.generation_config = config
    row.seconds = time.perf_counter() - started
