"""A prompt while it is continued: its tokens so far, and whether they are enough."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evalkit.errors import ScoringError
from evalkit.generation.choosing import Chooser
from evalkit.generation.prompts import Ints, Prompt

NARROW = "its weights may be damaged, or its dtype too narrow: try --dtype float32"


@dataclass(frozen=True)
class Generation:
    """What a model wrote."""

    tokens: list[int]
    """The token that ended it included."""
    ended: str
    """Why: "end" token, "enough" of text, or "length"."""
    reused: int
    """Tokens of the prompt whose keys and values were another prompt's."""
    prompt_seconds: float
    """Until its first token."""
    seconds: float
    """Of its prompt, and its share of the steps that it was part of."""


class GenerationRow:
    """A prompt that is being continued.

    Args:
        prompt: what is continued.
        chooser: of its tokens; None: the argmax of the logits.
        tokenizer: of the model; needed by prompts whose stops read the text.
    """

    def __init__(self, prompt: Prompt, chooser: Chooser | None, tokenizer: Any) -> None:
        self.prompt, self.chooser = prompt, chooser
        self.place = 0
        """In the storage of its batch."""
        self.tokens: list[int] = []
        self.ended = ""
        self.reused = 0
        self.prompt_seconds = self.seconds = 0.0
        self._tokenizer = tokenizer
        self._until: dict[int, list[str]] = {}
        for text in prompt.stops.until:
            own = len(tokenizer.encode(text, add_special_tokens=False))
            self._until.setdefault(own + 2, []).append(text)

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what was generated."""
        return len(self.prompt.tokens) + len(self.tokens)

    @property
    def text(self) -> Ints:
        """[length] both."""
        return np.concatenate([self.prompt.tokens, np.array(self.tokens, dtype=np.int64)])

    def take(self, token: int) -> None:
        """Add a token, and find out whether it is the last."""
        self.tokens.append(token)
        if token in self.prompt.stops.ends:
            self.ended = "end"
        elif self._is_enough():
            self.ended = "enough"
        elif len(self.tokens) >= self.prompt.max_new_tokens:
            self.ended = "length"

    def _is_enough(self) -> bool:
        stops = self.prompt.stops
        for window, texts in self._until.items():
            last = self._tokenizer.decode(self.tokens[-window:])
            if any(text in last for text in texts):
                return True
        if not stops.pattern:
            return False
        kept = self.tokens[: len(self.tokens) - stops.held_back]
        return re.search(stops.pattern, self._tokenizer.decode(kept, skip_special_tokens=True)) is not None

    def generation(self) -> Generation:
        """What came of it."""
        return Generation(self.tokens, self.ended, self.reused, self.prompt_seconds, self.seconds)


def choose(rows: Sequence[GenerationRow], logits: torch.Tensor) -> list[int]:
    """Choose a token for each row.

    Args:
        rows: in their order.
        logits: [rows, vocabulary], in float32; of first tokens, those that are barred are changed.

    Raises:
        ScoringError: they are not numbers.
    """
    for row, own in zip(rows, logits, strict=True):
        if not row.tokens and (barred := [one for one in row.prompt.stops.barred_first if one < len(own)]):
            own[barred] = -torch.inf
    largest, tokens = logits.max(-1)
    if not largest.isfinite().all():
        raise ScoringError(f"the model's logits are not numbers (NaN or infinite); {NARROW}")
    found = [int(token) for token in tokens.tolist()]
    for place, row in enumerate(rows):
        if row.chooser is not None:
            ids = torch.from_numpy(row.text[None]).to(logits.device)
            found[place] = row.chooser(ids, logits[place : place + 1])
    return found
