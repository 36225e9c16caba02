"""Generation inputs that can be pickled: prompts, decoding settings and stopping criteria."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.errors import CheckpointError, TemplateError, first_line

Ints = NDArray[np.int64]

CHUNK = 512
"""Prompt tokens in one forward pass; prompts share whole chunks."""


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


def shared_tokens(first: Ints, second: Ints, chunk: int) -> int:
    """Return the length of the common prefix of two prompts, in whole chunks; always less than either prompt."""
    length = min(len(first), len(second)) - 1
    differ = np.flatnonzero(first[:length] != second[:length])
    same = int(differ[0]) if len(differ) else length
    return same - same % chunk


def as_message(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text as one user message, with the generation prompt."""
    if not tokenizer.chat_template:
        raise TemplateError("the tokenizer has no chat template; leave out --chat")
    try:
        turns = [{"role": "user", "content": text}]
        encoding = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)
    except Exception as error:  # a Jinja template may raise anything
        raise TemplateError(f"the tokenizer's chat template fails: {first_line(error)}") from error
    return list(encoding["input_ids"])


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the token ids that end a text: those of the generation config, else the tokenizer's EOS token.

    `generate` reads the generation config too, but continues to the maximum length if it has none.
    """
    stored = getattr(model.generation_config, "eos_token_id", None)
    if stored is None:
        stored = tokenizer.eos_token_id
    ids = stored if isinstance(stored, list) else [] if stored is None else [stored]
    if not all(type(token) is int for token in ids):
        raise CheckpointError(
            f"generation_config.json: eos_token_id is {stored!r:.60}; expected a token id or a list of token ids"
        )
    return frozenset(ids)
