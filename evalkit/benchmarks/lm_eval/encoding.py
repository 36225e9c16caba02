"""Texts to token ids, as lm-eval's `tok_encode` and `_encode_pair` give them, in a few calls of the fast tokenizer.

In: (context, continuation) texts and lm-eval's model class, for its tokenizer and settings. Out: a `Pair` each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from evalkit.compatibility.lm_eval import rolling_windows
from evalkit.errors import ScoringError
from evalkit.inputs.texts import check_text, in_calls

_AT_ONCE = 20_000
"""Texts in one call of the tokenizer, so that memory does not grow with the task."""


@dataclass(frozen=True)
class Encoding:
    """What turning texts to token ids needs of an `HFLM`."""

    tokenizer: Any
    prefix_token_id: int
    prefix_text: str
    max_length: int
    add_bos_token: bool | None = None

    def length(self, text: str) -> int:
        """Tokens of a text."""
        key = (text, _adds_special(self, text))
        return len(encode_texts(self.tokenizer, {key: None})[key])


class Pair(NamedTuple):
    """One request in token ids."""

    context: list[int]
    """Never empty."""
    continuation: list[int]
    """Never empty."""
    cut: int
    """Context tokens dropped on the left to fit the window."""


def encode_pairs(
    model: Any, texts: Sequence[tuple[str, str]], label: Callable[[int], str], say: Callable[[str], None]
) -> list[Pair]:
    """Encode (context, continuation) texts.

    White space at a context's end moves to the continuation, and the two are encoded together and cut at the length of
    the context's own encoding. An empty context becomes the tokenizer's BOS, or EOS where it has no BOS. Two cases in
    which lm-eval 0.4.13 fails by an assertion are served: where one token spans the join and nothing is left for the
    continuation, the continuation is encoded by itself (lm-eval's pull request 4055 does the same); a context of
    white space only counts as empty.

    Args:
        model: an `Encoding` or an `HFLM`, for its tokenizer, prefix token, BOS setting and window.
        texts: the requests.
        label: how messages name the request of that index.
        say: told once of continuations that were encoded by themselves.

    Raises:
        ScoringError: a continuation without any token, or with more than the window takes.
    """
    moved = [_moved(context, continuation) for context, continuation in texts]
    for index, (context, continuation) in enumerate(moved):
        check_text(context + continuation, label(index))
    wanted: dict[tuple[str, bool], None] = {}
    for context, continuation in moved:
        if context:
            wanted[context + continuation, _adds_special(model, context + continuation)] = None
            wanted[context, _adds_special(model, context)] = None
        else:
            wanted[continuation, False] = None
    ids = encode_texts(model.tokenizer, wanted)
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
        pairs.append(_fitted(head, tail, model.max_length, label, index))
    if spanned:
        say(
            f"{len(spanned)} continuation(s) end inside a token that begins in their context, {label(spanned[0])} "
            "for one; they are encoded by themselves (lm-eval 0.4.13 stops there)"
        )
    return pairs


def encode_texts(tokenizer: Any, wanted: dict[tuple[str, bool], None]) -> dict[tuple[str, bool], list[int]]:
    """Token ids of (text, with special tokens?), each distinct text once."""
    found: dict[tuple[str, bool], list[int]] = {}
    with _threads():
        for special in (True, False):
            texts = [text for text, with_special in wanted if with_special is special]
            for part in in_calls(texts, str, _AT_ONCE):
                ids = tokenizer(part, add_special_tokens=special, return_attention_mask=False, verbose=False)
                found.update(zip(((text, special) for text in part), ids["input_ids"], strict=True))
    return found


def windows(encoding: Any, text: str, label: str) -> list[tuple[list[int], list[int]]]:
    """(context, continuation) token ids of the disjoint windows in which lm-eval takes a text apart.

    Args:
        encoding: an `Encoding`, or an `HFLM`.
        text: of a `loglikelihood_rolling` request.
        label: how messages name it.
    """
    check_text(text, label)
    key = (text, _adds_special(encoding, text))
    ids = encode_texts(encoding.tokenizer, {key: None})[key]
    return rolling_windows(ids, encoding.prefix_token_id, encoding.max_length)


def _moved(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _adds_special(model: Any, text: str) -> bool:
    """lm-eval's rule: as the tokenizer does by itself or as was asked, but never in front of a BOS already there."""
    if text.startswith(model.prefix_text):
        return False
    return True if model.add_bos_token is None else bool(model.add_bos_token)


def _after_prefix(prefix: int, ids: list[int]) -> tuple[list[int], list[int]]:
    """A continuation without context stands after the prefix token, its own if it begins with it."""
    return (ids[:1], ids[1:]) if ids[:1] == [prefix] else ([prefix], ids)


def _fitted(head: list[int], tail: list[int], window: int, label: Callable[[int], str], index: int) -> Pair:
    if not tail:
        raise ScoringError(f"{label(index)}: its continuation has no token, so there is nothing to score")
    if len(tail) > window:
        raise ScoringError(
            f"{label(index)}: its continuation has {len(tail)} tokens, more than the model's window of {window}"
        )
    # The last token is only predicted, so one more than the window fits
    cut = max(0, len(head) + len(tail) - window - 1)
    return Pair(head[cut:], tail, cut)


@contextmanager
def _threads() -> Iterator[None]:
    """Let the tokenizer use all cores; lm-eval's command line forbids it."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before
