"""The state of one prompt during generation: its tokens so far and its stopping criteria.

In: a `Prompt`, then logits step by step. Out: a `Generation`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from evalkit.compatibility.transformers import quiet
from evalkit.errors import ScoringError
from evalkit.generation.prompts import Ints, Prompt
from evalkit.generation.sampling import Sampler

NOT_FINITE_ADVICE = "its weights may be damaged, or its dtype too narrow: try --dtype float32"


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt."""

    tokens: list[int]
    """Generated token ids, the end token included."""
    ended: str
    """Why generation stopped: "end" (end token), "enough" (stop text or pattern found) or "length"."""
    reused: int
    """Prompt tokens whose keys and values were copied from another prompt."""
    prompt_seconds: float
    """Time to the first generated token."""
    seconds: float
    """Time of the prompt plus its share of each decoding step that it was part of."""


class GenerationRow:
    """A prompt during generation.

    Args:
        prompt: the prompt to continue.
        sampler: chooses its tokens; None: the argmax of the logits.
        tokenizer: the model's; needed by prompts with stop texts or a stop pattern.
    """

    def __init__(self, prompt: Prompt, sampler: Sampler | None, tokenizer: Any) -> None:
        self.prompt, self.sampler = prompt, sampler
        self.place = 0
        """Row index in the batch's `Storage`."""
        self.tokens: list[int] = []
        self.ended = ""
        self.reused = 0
        self.prompt_seconds = self.seconds = 0.0
        self._tokenizer = tokenizer
        self._until: dict[int, list[str]] = {}
        for text in prompt.stops.until:
            length = len(tokenizer.encode(text, add_special_tokens=False))
            self._until.setdefault(length + 2, []).append(text)

    @property
    def length(self) -> int:
        """Number of prompt and generated tokens."""
        return len(self.prompt.tokens) + len(self.tokens)

    @property
    def all_tokens(self) -> Ints:
        """Prompt and generated token ids, [length]."""
        return np.concatenate([self.prompt.tokens, np.array(self.tokens, dtype=np.int64)])

    def append(self, token: int) -> None:
        """Append a generated token and check the stopping criteria."""
        self.tokens.append(token)
        if token in self.prompt.stops.ends:
            self.ended = "end"
        elif self._is_complete():
            self.ended = "enough"
        elif len(self.tokens) >= self.prompt.max_new_tokens:
            self.ended = "length"

    def _is_complete(self) -> bool:
        stops = self.prompt.stops
        for window, texts in self._until.items():
            last = self._tokenizer.decode(self.tokens[-window:])
            if any(text in last for text in texts):
                return True
        if not stops.pattern:
            return False
        searched = self.tokens[: len(self.tokens) - stops.unsearched_tail]
        return re.search(stops.pattern, self._tokenizer.decode(searched, skip_special_tokens=True)) is not None

    def generation(self) -> Generation:
        """Return the finished continuation."""
        return Generation(self.tokens, self.ended, self.reused, self.prompt_seconds, self.seconds)


def choose(rows: Sequence[GenerationRow], logits: torch.Tensor) -> list[int]:
    """Choose the next token of each row.

    Args:
        rows: rows of the batch.
        logits: [rows, vocabulary], float32; modified in place where a row's first token is restricted.

    Raises:
        ScoringError: a row has NaN or infinite logits.
    """
    for row, row_logits in zip(rows, logits, strict=True):
        stops = row.prompt.stops
        if not row.tokens and (barred := [token for token in stops.barred_first if token < len(row_logits)]):
            row_logits[barred] = -torch.inf
    largest, tokens = logits.max(-1)
    if not largest.isfinite().all():
        raise ScoringError(f"the model's logits are not numbers (NaN or infinite); {NOT_FINITE_ADVICE}")
    chosen = [int(token) for token in tokens.tolist()]
    for index, row in enumerate(rows):
        if row.sampler is not None:
            ids = torch.from_numpy(row.all_tokens[None]).to(logits.device)
            chosen[index] = row.sampler(ids, logits[index : index + 1])
    return chosen


def generate_with_transformers(model: Any, row: GenerationRow) -> None:
    """Generate the tokens of a row until it ends.

    Raises:
        ScoringError: the logits are NaN or infinite.
    """
    ids = torch.from_numpy(row.prompt.tokens[None]).to(model.device)
    config, started = model.generation_config, time.perf_counter()
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
                logits_processor=[_RowProcessor(row, started)],
                stopping_criteria=[_RowStoppingCriteria(row)],
            )
    finally:
        model.generation_config = config
    row.seconds = time.perf_counter() - started


class _RowProcessor(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that makes `generate` take the token that the row chooses."""

    def __init__(self, row: GenerationRow, started: float) -> None:
        self._row, self._started = row, started

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return logits [1, vocabulary], minus infinity for every token but the chosen one."""
        row = self._row
        [token] = choose([row], scores.float())
        row.append(token)
        if len(row.tokens) == 1:
            row.prompt_seconds = time.perf_counter() - self._started
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([token], device=scores.device), 0.0)


class _RowStoppingCriteria(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that is met when the row has ended."""

    def __init__(self, row: GenerationRow) -> None:
        self._row = row

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return whether the row has ended, [1]."""
        return torch.tensor([bool(self._row.ended)], device=input_ids.device)
