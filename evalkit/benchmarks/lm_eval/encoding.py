"""Tokenisation identical to lm-eval's `tok_encode` and `_encode_pair`, in few calls of the fast tokenizer.

In: `ModelRequest`s whose texts are scored. Out: their `Continuation`s in token ids.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from evalkit.benchmarks.lm_eval.calls import tokenizer_threads
from evalkit.benchmarks.lm_eval.requests import ModelRequest, RequestRow
from evalkit.compatibility.lm_eval import rolling_windows
from evalkit.display import Say
from evalkit.errors import ScoringError
from evalkit.inputs.values import check_text, in_calls
from evalkit.runs.journal import Key

_AT_ONCE = 20_000
"""Texts in one call of the tokenizer, which bounds memory."""

Text = tuple[str, bool]
"""A text, and whether special tokens are added to it."""


@dataclass(frozen=True)
class Encoding:
    """The tokenizer and the tokenisation settings of an `HFLM`."""

    tokenizer: Any
    prefix_id: int
    """The token that precedes a text without context: BOS, or EOS if there is no BOS."""
    window: int
    """Largest number of tokens that the model reads."""
    add_bos: bool | None = None
    """Whether texts begin with the BOS token; None: the tokenizer's default."""

    @cached_property
    def prefix_text(self) -> str:
        """The text of the prefix token."""
        return str(self.tokenizer.decode(self.prefix_id))

    def special(self, text: str, prefix: str | None) -> Text:
        """Return a text to which special tokens are added unless it already begins with the prefix."""
        begins = prefix is not None and text.startswith(prefix)
        return text, not begins and (True if self.add_bos is None else self.add_bos)

    def ids(self, texts: Iterable[Text]) -> dict[Text, list[int]]:
        """Return the token ids of texts."""
        encoded: dict[Text, list[int]] = {}
        distinct = dict.fromkeys(texts)
        with tokenizer_threads():
            for special in (True, False):
                for part in in_calls([text for text, added in distinct if added is special], str, _AT_ONCE):
                    ids = self.tokenizer(part, add_special_tokens=special, return_attention_mask=False, verbose=False)
                    encoded.update(zip(((text, special) for text in part), ids["input_ids"], strict=True))
        return encoded


class Continuation(NamedTuple):
    """Tokens to score after their context: the continuation of a request, or one window of its text."""

    request: ModelRequest
    place: int
    """Index of the request among those that were encoded together."""
    window: int
    windows: int
    context: Sequence[int]
    """Never empty."""
    continuation: Sequence[int]
    """Never empty."""
    cut: int = 0
    """Context tokens truncated on the left to fit the context window."""

    @property
    def is_window(self) -> bool:
        """Whether it is a part of a text, without a context of the task's."""
        return self.request.kind == "loglikelihood_rolling"

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.request.label}, window {self.window}" if self.is_window else self.request.label

    @property
    def owner(self) -> Hashable:
        """The document whose consecutive continuations stay in one batch; windows, and what has no task, are alone."""
        alone = self.is_window or self.request.task is None
        return (self.place, self.window) if alone else (self.request.task, self.request.doc_id)

    @property
    def key(self) -> Key:
        """The journal's key of its answer."""
        return self.request.key(self.window)

    @property
    def row(self) -> RequestRow:
        """The journal's row, without the answer."""
        sizes = (len(self.context), len(self.continuation), self.cut)
        return self.request.row(*sizes, self.window, self.windows)


def continuations_of(requests: Sequence[ModelRequest], encoding: Encoding, say: Say) -> list[Continuation]:
    """Encode requests of one kind that is scored; a text without tokens has no windows.

    White space at the end of a context moves to the continuation. Both are encoded together and split at the length of
    the context's own encoding. An empty context becomes the prefix token. Two cases that fail an assertion in lm-eval
    0.4.13 are supported: if one token spans the boundary and no token is left for the continuation, the continuation is
    encoded without its context (as in lm-eval's pull request 4055); a context of white space only is treated as empty.

    Args:
        requests: of kind "loglikelihood" or "loglikelihood_rolling".
        encoding: the model's.
        say: called once if continuations were encoded without their context.

    Raises:
        ScoringError: a text is not valid, or a continuation has no tokens, or more than the context window.
    """
    if requests and requests[0].kind == "loglikelihood_rolling":
        return _windows(requests, encoding)
    moved = [_move_space(*request.arguments) for request in requests]
    for request, (context, continuation) in zip(requests, moved, strict=True):
        check_text(context + continuation, request.label)

    def of_context(text: str) -> Text:
        return encoding.special(text, encoding.prefix_text)

    joined = [of_context(text) for context, rest in moved if context for text in (context + rest, context)]
    ids = encoding.ids([*joined, *((continuation, False) for context, continuation in moved if not context)])
    continuations, spanned = [], []
    for index, (request, (context, continuation)) in enumerate(zip(requests, moved, strict=True)):
        if not context:
            head, tail = _after_prefix(encoding.prefix_id, ids[continuation, False])
        else:
            head = ids[of_context(context)]
            tail = ids[of_context(context + continuation)][len(head) :]
            if not tail and continuation:
                [tail] = encoding.ids([(continuation, False)]).values()
                spanned.append(request)
        if not tail:
            raise ScoringError(f"{request.label}: its continuation has no tokens, so there is nothing to score")
        if len(tail) > encoding.window:
            raise ScoringError(
                f"{request.label}: its continuation has {len(tail)} tokens, more than the model's window of "
                f"{encoding.window}"
            )
        # The last token is only predicted, so one more than the window fits
        cut = max(0, len(head) + len(tail) - encoding.window - 1)
        continuations.append(Continuation(request, index, 0, 1, head[cut:], tail, cut))
    if spanned:
        say(
            f"{len(spanned)} continuation(s) end inside a token that begins in their context, {spanned[0].label} "
            "for one; they are encoded without their context (lm-eval 0.4.13 fails on them)"
        )
    return continuations


def _windows(requests: Sequence[ModelRequest], encoding: Encoding) -> list[Continuation]:
    """Return the disjoint windows into which lm-eval splits texts."""
    for request in requests:
        check_text(request.arguments[0], request.label)
    texts = [encoding.special(request.arguments[0], encoding.prefix_text) for request in requests]
    ids = encoding.ids(texts)
    continuations = []
    for index, (request, text) in enumerate(zip(requests, texts, strict=True)):
        windows = rolling_windows(ids[text], encoding.prefix_id, encoding.window)
        for number, (context, continuation) in enumerate(windows):
            continuations.append(Continuation(request, index, number, len(windows), context, continuation))
    return continuations


def _move_space(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _after_prefix(prefix: int, ids: list[int]) -> tuple[list[int], list[int]]:
    """Split a continuation without context: its own first token is the context if it is the prefix token."""
    return (ids[:1], ids[1:]) if ids[:1] == [prefix] else ([prefix], ids)
