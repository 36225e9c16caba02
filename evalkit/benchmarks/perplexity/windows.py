"""Windows of a document. In: a text, a tokenizer, a context window. Out: sequences in which each token is scored once.

Without a stride these are the windows of lm-eval's rolling log-likelihood: the tokens are those of lm-eval's
`tok_encode`, which include what the tokenizer adds by itself; a prefix token (BOS, or EOS where there is none) comes
before the first; each later window repeats one token; and the last window is as long as the others, with more context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from evalkit.benchmarks.perplexity.texts import TextDocument
from evalkit.benchmarks.perplexity.token_bytes import encoding_bytes
from evalkit.errors import ScoringError
from evalkit.scoring.tree import Ints


class WindowSettings(NamedTuple):
    """How documents are cut."""

    window: int
    """Context window in tokens: the most that the model reads at once. The last token of a sequence is only predicted,
    so a sequence has one more."""
    stride: int
    """Tokens that each window after the first scores, at most the window."""
    prefix_id: int
    """The token before a document."""
    prefix_text: str
    """Its text; a document that begins with it gets no further token by the tokenizer."""


@dataclass(frozen=True)
class TextWindow:
    """A sequence of tokens, the last of which are scored."""

    document: int
    """Number of its document in the task."""
    number: int
    """From 0, within its document."""
    is_last: bool
    """Whether it is the last of its document."""
    context: int
    """Tokens at the beginning that are not scored; at least one."""
    tokens: Ints
    """[length] token ids, at most the context window and one more."""
    bytes: Ints
    """[length - context] bytes of the text that each scored token covers."""


def windows_of(document: TextDocument, tokenizer: Any, settings: WindowSettings) -> list[TextWindow]:
    """Return the windows of a document.

    Raises:
        ScoringError: the document has no tokens.
    """
    tokens, sizes = encoded(document, tokenizer, settings.prefix_text)
    found: list[TextWindow] = []
    for start, context, stop in spans(len(tokens), settings.window, settings.stride):
        first = start + context  # the first scored token; the window before it begins with the prefix if start is -1
        sequence = tokens[max(start, 0) : stop]
        if start < 0:
            sequence = np.concatenate((np.array([settings.prefix_id], np.int32), sequence))
        last = stop == len(tokens)
        found.append(TextWindow(document.number, len(found), last, context, sequence, sizes[first:stop]))
    return found


def spans(tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, tokens of context, end) of the windows of a document; the prefix is token -1.

    Args:
        tokens: length of the document.
        window: see `WindowSettings`.
        stride: see `WindowSettings`.
    """
    done = min(window, tokens)
    if done:
        yield -1, 1, done
    while done < tokens:
        stop = min(done + stride, tokens)
        start = stop - window - 1
        yield start, done - start, stop
        done = stop


def encoded(document: TextDocument, tokenizer: Any, prefix_text: str) -> tuple[Ints, Ints]:
    """Return a document's tokens and their bytes, [tokens] each.

    Raises:
        ScoringError: see `windows_of`.
    """
    encoding = tokenizer(
        document.text,
        add_special_tokens=not document.text.startswith(prefix_text),
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        return_attention_mask=False,
        verbose=False,
    )
    tokens = np.asarray(encoding["input_ids"], np.int32)
    if not len(tokens):
        raise ScoringError(f"{document.place}: the tokenizer makes no token of this document; remove it")
    return tokens, encoding_bytes(document.text, encoding, tokenizer).astype(np.int32)
