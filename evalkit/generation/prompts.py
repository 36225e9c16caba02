"""Generation inputs that can be pickled: prompts, decoding settings and stopping criteria."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.errors import CheckpointError, TemplateError, first_line

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


def plan_batches(prompts: Sequence[Prompt], budget: int, chunk: int, most_rows: int) -> list[list[Prompt]]:
    """Group prompts into batches.

    Args:
        prompts: in any order.
        budget: most tokens of keys and values in a batch, padding included; a longer prompt is a batch of one.
        chunk: chunk size; shared prefixes are counted in whole chunks.
        most_rows: largest batch size.
    """
    batches: list[list[Prompt]] = []
    for group in _prefix_groups(prompts, chunk):
        for prompt in group:
            if batches and _padded_tokens([*batches[-1], prompt]) <= budget and len(batches[-1]) < most_rows:
                batches[-1].append(prompt)
            else:
                batches.append([prompt])
    return batches


def shared_tokens(one: Ints, other: Ints, chunk: int) -> int:
    """Return the length of the common prefix of two prompts, in whole chunks; always less than either prompt."""
    length = min(len(one), len(other)) - 1
    differ = np.flatnonzero(one[:length] != other[:length])
    same = int(differ[0]) if len(differ) else length
    return same - same % chunk


def _prefix_groups(prompts: Sequence[Prompt], chunk: int) -> list[list[Prompt]]:
    """Group prompts that share at least a chunk with a neighbour in lexicographic order; longest group first."""
    groups: list[list[Prompt]] = []
    for prompt in sorted(prompts, key=lambda p: p.tokens.tolist()):
        if groups and shared_tokens(groups[-1][-1].tokens, prompt.tokens, chunk):
            groups[-1].append(prompt)
        else:
            groups.append([prompt])
    # Longest first: out of memory occurs at once, and the remaining time is not underestimated
    return sorted(groups, key=lambda group: -max(len(prompt.tokens) for prompt in group))


def _padded_tokens(prompts: Sequence[Prompt]) -> int:
    """Return columns × rows of a batch."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    return (longest + max(prompt.max_new_tokens for prompt in prompts)) * len(prompts)


def as_message(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text as one user message, with the generation prompt.

    Raises:
        TemplateError: the tokenizer has no chat template, or the template fails.
    """
    if not tokenizer.chat_template:
        raise TemplateError("the tokenizer has no chat template; leave out --chat")
    try:
        turns = [{"role": "user", "content": text}]
        found = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)
    except Exception as error:  # a Jinja template may raise anything
        raise TemplateError(f"the tokenizer's chat template fails: {first_line(error)}") from error
    return list(found["input_ids"])


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the token ids that end a text: those of the generation config, else the tokenizer's EOS token.

    `generate` reads the generation config too, but continues to the maximum length if it has none.

    Raises:
        CheckpointError: the generation config's eos_token_id is neither an integer nor a list of integers.
    """
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = tokenizer.eos_token_id
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int for token in ids):
        raise CheckpointError(
            f"generation_config.json: eos_token_id is {found!r:.60}; expected a token id or a list of token ids"
        )
    return frozenset(ids)
