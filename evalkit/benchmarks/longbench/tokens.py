"""Tokenisation of prompts, with truncation in the middle as in the official code.

In: a prompt's text. Out: its token ids and its length before truncation. The official code (THUDM/LongBench@2e00731,
`pred.py`) tokenises with special tokens. Of a prompt longer than `max_prompt_tokens`, it decodes the first and the last
max_prompt_tokens / 2 tokens without special tokens, joins the texts, and tokenises them again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.longbench.protocol import Task
from evalkit.errors import DataError
from evalkit.generation.prompts import Stops, as_message


@dataclass(frozen=True)
class FittedPrompt:
    """The token ids of a prompt, truncated if necessary."""

    text_sha256: str
    """SHA-256 of the prompt's text before truncation."""
    tokens: NDArray[np.int64]
    """[length] token ids, special tokens included."""
    before: int
    """Number of tokens before truncation."""
    truncated: bool


def fit_prompt(tokenizer: Any, text: str, max_prompt_tokens: int, most: int, *, chat: bool, label: str) -> FittedPrompt:
    """Tokenise a prompt; truncate it in the middle if it is too long.

    Args:
        tokenizer: a transformers tokenizer.
        text: the prompt.
        max_prompt_tokens: longer prompts are truncated to this length.
        most: most tokens of a prompt that the context window allows. A truncated text may be tokenised to more tokens
            than before; it is then truncated further, which the official code does not do.
        chat: apply the tokenizer's chat template to the truncated prompt, as one user message.
        label: the row's name in messages.

    Raises:
        DataError: the chat template alone has more than `most` tokens.
        TemplateError: the tokenizer has no chat template, or the template fails.
    """
    ids = tokenizer(text, verbose=False).input_ids  # no warning about long texts, which are truncated here
    before, kept, limit = len(ids), text, max_prompt_tokens
    truncated = before > max_prompt_tokens
    while True:
        if truncated:
            half = limit // 2
            parts = (ids[:half], ids[len(ids) - half :])
            kept = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in parts)
        tokens = as_message(tokenizer, kept) if chat else tokenizer(kept, verbose=False).input_ids if truncated else ids
        if len(tokens) <= most:
            return FittedPrompt(
                hashlib.sha256(text.encode()).hexdigest(), np.asarray(tokens, np.int64), before, truncated
            )
        truncated = True
        limit = min(limit, before) - max(2, len(tokens) - most)
        if limit < 2:
            raise DataError(f"{label}: no room for its prompt in {most} tokens; raise --context")


FIRST_LINE = r"\A\n*[^\n]+\n"
"""Matches when the first line after leading newlines is complete (`metrics.first_line`)."""
CODE_LINE = r"\A\n*(?=[^\n])(?:[^\n]*\n)*?(?:(?!//)[^\n`#])*\n"
"""Matches when a line without a backtick, "#" or "//" is complete (`metrics.code_line`); an empty line counts."""


def stops_of(task: Task, ends: frozenset[int], tokenizer: Any) -> Stops:
    """Return the stopping criteria of a task.

    Args:
        task: the task. samsum ends at a newline too, and must start with neither a newline nor the EOS token.
        ends: the model's end tokens (`generation.tokens.end_tokens`).
        tokenizer: the model's tokenizer.
    """
    barred: frozenset[int] = frozenset()
    if task.newline_ends:
        # The official code uses the tokenizer's EOS token here, not the model's end tokens
        eos = ends if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])
        ends = barred = eos | frozenset(tokenizer("\n", add_special_tokens=False).input_ids[-1:])
    if task.first_line_only:
        return Stops(ends, barred, pattern=FIRST_LINE)
    return Stops(ends, barred, pattern=CODE_LINE if task.metric == "edit_similarity" else "")
