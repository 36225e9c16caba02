"""What is to be continued, how its tokens are chosen, and when it is complete: data, which can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Stops:
    """What ends a text."""

    ends: frozenset[int] = frozenset()
    """Token ids that end it."""
    barred_first: frozenset[int] = frozenset()
    """Token ids that may not come first."""
    until: tuple[str, ...] = ()
    """Texts that end it as soon as the last tokens hold one: as many as the text's own tokens and two more, special
    tokens included. Two, since a model may write what ends it in other tokens than the tokenizer."""
    pattern: str = ""
    """A regular expression that ends it as soon as it is found in the text so far, special tokens apart."""
    held_back: int = 0
    """Last tokens of the text in which the pattern is not looked for."""


@dataclass(frozen=True)
class Decoding:
    """How transformers' `generate` would choose each token."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of a generation config, such as do_sample, temperature or top_p; what is not given is the model's own setting."""
    seed: int = 0
    """Of this prompt's random numbers, which no other prompt has a part in."""


@dataclass(frozen=True)
class Prompt:
    """What is to be continued, and when that is enough."""

    index: int
    """The caller's."""
    tokens: Ints
    """[length] token ids, at least one."""
    max_new_tokens: int
    stops: Stops = Stops()
    decoding: Decoding | None = None
    """None: the argmax of the logits, whatever the model's generation config says."""

    @property
    def columns(self) -> int:
        """Tokens that its keys and values may need room for."""
        return len(self.tokens) + self.max_new_tokens
