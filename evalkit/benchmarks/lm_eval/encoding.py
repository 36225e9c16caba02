"""Tokenisation identical to lm-eval's `tok_encode` and `_encode_pair`, in few calls of the fast tokenizer.

In: (context, continuation) texts, and an `Encoding` or lm-eval's model class. Out: a `Pair` of token ids each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from evalkit.compatibility.lm_eval import rolling_windows
from evalkit.errors import ScoringError
from evalkit.inputs.values import check_text, in_calls

_AT_ONCE = 20_000
"""Texts in one call of the tokenizer, which bounds memory."""


@dataclass(frozen=True)
class Encoding:
    """The tokenizer and tokenisation settings of an `HFLM`."""

    tokenizer: Any
    prefix_token_id: int
    prefix_text: str
    max_length: int
    add_bos_token: bool | None = None

    def length(self, text: str) -> int:
        """Return the number of tokens of a text."""
        key = (text, _adds_special(self, text))
        return len(encode_texts(self.tokenizer, {key: None})[key])


class Pair(NamedTuple):
    """The token ids of one request."""

    context: list[int]
    """Never empty."""
    continuation: list[int]
    """Never empty."""
    cut: int
    """Context tokens truncated on the left to fit the context window."""


def encode_pairs(
    model: Any, texts: Sequence[tuple[str, str]], label: Callable[[int], str], say: Callable[[str], None]
) -> list[Pair]:
    """Encode (context, continuation) texts.

    White space at the end of a context moves to the continuation. Both are encoded together and split at the length of
    the context's own encoding. An empty context becomes the tokenizer's BOS token, or EOS if it has no BOS. Two cases
    that fail an assertion in lm-eval 0.4.13 are supported: if one token spans the boundary and no token is left for
    the continuation, the continuation is encoded without its context (as in lm-eval's pull request 4055); a context of
    white space only is treated as empty.

    Args:
        model: an `Encoding` or an `HFLM`, for its tokenizer, prefix token, BOS setting and context window.
        texts: the requests.
        label: returns the name of the request with an index, for messages.
        say: called once if continuations were encoded without their context.

    Raises:
        ScoringError: a continuation has no tokens, or more than the context window.
    """
    moved = [_move_space(context, continuation) for context, continuation in texts]
    for index, (context, continuation) in enumerate(moved):
        check_text(context + continuation, label(index))
    inputs: dict[tuple[str, bool], None] = {}
    for context, continuation in moved:
        if context:
            inputs[context + continuation, _adds_special(model, context + continuation)] = None
            inputs[context, _adds_special(model, context)] = None
        else:
            inputs[continuation, False] = None
    ids = encode_texts(model.tokenizer, inputs)
    pairs, spanned = [], []
    for index, (context, continuation) in enumerate(moved):
        if not context:
            head, tail = _after_prefix(model.prefix_token_id, ids[continuation, False])
        else:
            whole = ids[context + continuation, _adds_special(model, context + continuation)]
            head = ids[context, _adds_special(model, context)]
            tail = whole[len(head) :]
            if not tail and continuation:
                tail = encode_texts(model.tokenizer, {(continuation, False): None})[continuation, False]
                spanned.append(index)
        pairs.append(_truncated(head, tail, model.max_length, label, index))
    if spanned:
        say(
            f"{len(spanned)} continuation(s) end inside a token that begins in their context, {label(spanned[0])} "
            "for one; they are encoded without their context (lm-eval 0.4.13 fails on them)"
        )
    return pairs


def encode_texts(tokenizer: Any, inputs: dict[tuple[str, bool], None]) -> dict[tuple[str, bool], list[int]]:
    """Return the token ids of each (text, whether to add special tokens)."""
    encoded: dict[tuple[str, bool], list[int]] = {}
    with _threads():
        for special in (True, False):
            texts = [text for text, with_special in inputs if with_special is special]
            for part in in_calls(texts, str, _AT_ONCE):
                ids = tokenizer(part, add_special_tokens=special, return_attention_mask=False, verbose=False)
                encoded.update(zip(((text, special) for text in part), ids["input_ids"], strict=True))
    return encoded


def windows(encoding: Any, text: str, label: str) -> list[tuple[list[int], list[int]]]:
    """Return (context, continuation) token ids of the disjoint windows into which lm-eval splits a text.

    Args:
        encoding: an `Encoding`, or an `HFLM`.
        text: the text of a `loglikelihood_rolling` request.
        label: the request's name in messages.
    """
    check_text(text, label)
    key = (text, _adds_special(encoding, text))
    ids = encode_texts(encoding.tokenizer, {key: None})[key]
    return rolling_windows(ids, encoding.prefix_token_id, encoding.max_length)


def _move_space(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _adds_special(model: Any, text: str) -> bool:
    """Return whether to add special tokens: the tokenizer's default or add_bos_token, but no second BOS token."""
    if text.startswith(model.prefix_text):
        return False
    return True if model.add_bos_token is None else bool(model.add_bos_token)


def _after_prefix(prefix: int, ids: list[int]) -> tuple[list[int], list[int]]:
    """Split a continuation without context: its own first token is the context if it is the prefix token."""
    return (ids[:1], ids[1:]) if ids[:1] == [prefix] else ([prefix], ids)


def _truncated(head: list[int], tail: list[int], window: int, label: Callable[[int], str], index: int) -> Pair:
    if not tail:
        raise ScoringError(f"{label(index)}: its continuation has no tokens, so there is nothing to score")
    if len(tail) > window:
        raise ScoringError(
            f"{label(index)}: its continuation has {len(tail)} tokens, more than the model's window of {window}"
        )
    # The last token is only predicted, so one more than the window fits
    cut = max(0, len(head) + len(tail) - window - 1)
    return Pair(head[cut:], tail, cut)


@contextmanager
def _threads() -> Iterator[None]:
    """Enable the tokenizer's parallelism, which lm-eval's command line disables."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before
