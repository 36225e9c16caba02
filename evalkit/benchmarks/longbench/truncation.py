"""A prompt as token ids, at most so many, cut in its middle as the official code cuts.

In: a prompt's text. Out: its ids and what was lost. The official code (THUDM/LongBench@2e00731, `pred.py`) tokenises
with special tokens; of a prompt of more than `max_prompt_tokens` the texts of the first and of the last half of so many
tokens remain, special tokens left out, and are tokenised anew.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.errors import DataError
from evalkit.generation.tokens import as_message


@dataclass(frozen=True)
class Fitted:
    """A prompt for the model."""

    text_sha256: str
    """Of the whole prompt's text, before it was cut."""
    tokens: NDArray[np.int64]
    """[length] token ids, special tokens included."""
    before: int
    """Tokens before anything was cut."""
    truncated: bool


def fit(tokenizer: Any, text: str, max_prompt_tokens: int, room: int, *, chat: bool, label: str) -> Fitted:
    """Tokenise a prompt; cut its middle where it is too long.

    Args:
        tokenizer: a transformers tokenizer.
        text: the prompt.
        max_prompt_tokens: above which it is cut.
        room: most tokens that the model can take of it. Text cut in tokens may come back as more of them; then it is
            cut shorter, which the official code does not look after.
        chat: put the prompt, once cut, into the tokenizer's chat template as one user message.
        label: names the row in errors.

    Raises:
        DataError: the chat template alone takes more than there is room for.
        TemplateError: there is no chat template, or it fails.
    """
    ids = tokenizer(text, verbose=False).input_ids  # it would warn of lengths that are cut here
    before, cut, limit = len(ids), text, max_prompt_tokens
    truncated = before > max_prompt_tokens
    while True:
        if truncated:
            half = limit // 2
            parts = (ids[:half], ids[len(ids) - half :])
            cut = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in parts)
        tokens = as_message(tokenizer, cut) if chat else tokenizer(cut, verbose=False).input_ids if truncated else ids
        if len(tokens) <= room:
            return Fitted(hashlib.sha256(text.encode()).hexdigest(), np.asarray(tokens, np.int64), before, truncated)
        truncated = True
        limit = min(limit, before) - max(2, len(tokens) - room)
        if limit < 2:
            raise DataError(f"{label}: no room for its prompt in {room} tokens; raise --context")
