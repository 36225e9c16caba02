"""Generation inputs that can be pickled: prompts, decoding settings and stopping criteria."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Stops:
    """Stopping criteria of a prompt."""

    ends: frozenset[int] = frozenset()
    """Token ids that end the text."""
    barred_first: frozenset[int] = frozenset()
    """Token ids that are not allowed as the first generated token."""
    until: tuple[str, ...] = ()
    """Stop strings. Generation ends when the last tokens, special tokens included, contain one. As many tokens are
    searched as the stop string has, plus two, since a model may write it in other tokens than the tokenizer."""
    pattern: str = ""
    """A regular expression. Generation ends when it matches the text so far, without special tokens."""
    unsearched_tail: int = 0
    """Number of last tokens in which the pattern is not searched."""


@dataclass(frozen=True)
class Decoding:
    """Decoding settings as transformers' `generate` defines them."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Generation config settings, such as temperature or top_p; the model's generation config is the default."""
    seed: int = 0
    """Seed of this prompt's random numbers, which no other prompt uses."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, its stopping criteria and its decoding settings."""

    index: int
    """An index that the caller chooses."""
    tokens: Ints
    """[length] token ids, at least one."""
    max_new_tokens: int
    stops: Stops = Stops()
    decoding: Decoding | None = None
    """None: the argmax of the logits, whatever the model's generation config says."""

    @property
    def columns(self) -> int:
        """Largest number of tokens whose keys and values are stored."""
        return len(self.tokens) + self.max_new_tokens
