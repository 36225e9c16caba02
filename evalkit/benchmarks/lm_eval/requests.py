"""lm-eval's requests: their texts, their tokens as `HFLM` splits them, and their answers as the journal stores them.

In: lm-eval's `Instance`s, and a tokenizer. Out: `ModelRequest`s, those without an answer, and the `Continuation`s of
those that are scored. An answer is stored with the digest of its request's texts, so that it is never used for another
text. lm-eval itself is not imported.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from evalkit.compatibility.lm_eval import rolling_windows
from evalkit.display import Say
from evalkit.errors import ScoringError
from evalkit.inputs.values import check_text, in_calls
from evalkit.runs.journal import FinishedRows, Key

GENERATED, ROLLING = "generate_until", "loglikelihood_rolling"
_PER_TEXT = 2000
"""Cost of generating one text, in scored characters."""
_AT_ONCE = 20_000
"""Texts in one call of the tokenizer, which bounds memory."""


class RequestRow(NamedTuple):
    """A row of the journal: the key within its task, and the answer."""

    doc_id: int
    number: int
    part: int
    digest: str
    parts: int
    """Number of windows of the text; 1 for a request that is not split, 0 for a text without tokens."""
    likelihood: float | None
    greedy: bool | None
    context_tokens: int
    continuation_tokens: int
    cut: int
    """Context tokens truncated on the left to fit the context window."""
    text: str | None


KEY = RequestRow._fields[:4]
"""Columns that identify a row within its task."""


class ModelRequest(NamedTuple):
    kind: str
    """lm-eval's request type: "loglikelihood", "loglikelihood_rolling" or "generate_until"."""
    task: str | None
    """None for a request that belongs to no task."""
    doc_id: int
    number: int
    """Index of the request among those of its document."""
    sample: int
    """Index among the repetitions of the request, which are different texts."""
    arguments: tuple[Any, ...]
    """Context and continuation, one text, or context and generation_kwargs."""
    digest: str

    @property
    def journal(self) -> str:
        return f"{self.kind} {self.task}"

    @property
    def label(self) -> str:
        return "a request" if self.task is None else f"{self.task} document {self.doc_id}"

    @property
    def work(self) -> float:
        """Its cost in scored characters, which approximates its share of the time."""
        return _PER_TEXT if self.kind == GENERATED else sum(map(len, self.arguments))

    def key(self, window: int = 0) -> Key:
        """Return the journal's key of its answer, or of the answer to one window of its text."""
        return self.journal, self.doc_id, self.number, self.sample + window, self.digest

    def row(
        self, context_tokens: int, continuation_tokens: int = 0, cut: int = 0, window: int = 0, windows: int = 1
    ) -> RequestRow:
        """Return the journal's row with the key `self.key(window)`, without an answer."""
        identity = (self.doc_id, self.number, self.sample + window, self.digest)
        return RequestRow(*identity, windows, None, None, context_tokens, continuation_tokens, cut, None)


def requests_of(instances: Iterable[Any]) -> list[ModelRequest]:
    """Return lm-eval's requests, in order. Repetitions are separate samples only where text is generated."""
    seen: Counter[tuple[Any, ...]] = Counter()
    requests = []
    for instance in instances:
        identity = (instance.request_type, instance.task_name, instance.doc_id, instance.idx)
        sample = seen[identity] if instance.request_type == GENERATED else 0
        seen[identity] += 1
        text = json.dumps(list(instance.args), sort_keys=True, default=str)
        requests.append(ModelRequest(*identity, sample, instance.args, hashlib.sha256(text.encode()).hexdigest()[:16]))
    return requests


def group_by_task(instances: Iterable[Any]) -> dict[str, list[ModelRequest]]:
    """Return the task name in the journal → its distinct requests, in lm-eval's order, one kind after the other."""
    requests = requests_of(instance for instance in instances for _ in range(instance.repeats or 1))
    kinds = list(dict.fromkeys(request.kind for request in requests))
    grouped: dict[str, dict[tuple[Any, ...], ModelRequest]] = {}
    for request in sorted(requests, key=lambda request: kinds.index(request.kind)):
        grouped.setdefault(request.journal, {}).setdefault(request[:5], request)
    return {journal: list(members.values()) for journal, members in grouped.items()}


def unanswered(finished: FinishedRows, requests: Sequence[ModelRequest]) -> list[ModelRequest]:
    """Return the requests of a task whose answers in the journal are missing, or lack a window."""
    windows: dict[Key, int] = {}
    if requests and requests[0].kind == ROLLING:
        journal = requests[0].journal
        windows = {(journal, *row[: len(KEY)]): row.parts for row in finished.rows(journal)}
    return [
        request
        for request in requests
        if any(request.key(window) not in finished for window in range(max(1, windows.get(request.key(), 1))))
    ]


Text = tuple[str, bool]
"""A text, and whether special tokens are added to it."""


@dataclass(frozen=True)
class Encoding:
    """The tokenizer and the tokenisation settings of an `HFLM`."""

    tokenizer: Any
    prefix_id: int
    """The token that precedes a text without context: BOS, or EOS if there is no BOS."""
    window: int
    add_bos: bool | None = None
    """Whether texts begin with the BOS token; None: the tokenizer's default."""

    @cached_property
    def prefix_text(self) -> str:
        return str(self.tokenizer.decode(self.prefix_id))

    def special(self, text: str, prefix: str | None) -> Text:
        """Return a text to which special tokens are added unless it already begins with the prefix."""
        begins = prefix is not None and text.startswith(prefix)
        return text, not begins and (True if self.add_bos is None else self.add_bos)

    def ids(self, texts: Iterable[Text]) -> dict[Text, list[int]]:
        encoded: dict[Text, list[int]] = {}
        distinct = dict.fromkeys(texts)
        with _tokenizer_threads():
            for special in (True, False):
                for part in in_calls([text for text, added in distinct if added is special], str, _AT_ONCE):
                    ids = self.tokenizer(part, add_special_tokens=special, return_attention_mask=False, verbose=False)
                    encoded.update(zip(((text, special) for text in part), ids["input_ids"], strict=True))
        return encoded


@contextmanager
def _tokenizer_threads() -> Iterator[None]:
    """Enable the tokenizer's threads. A variable that was not set stays: the library would warn about later forks."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


class Continuation(NamedTuple):
    """Tokens to score after their context: the continuation of a request, or one window of its text."""

    request: ModelRequest
    position: int
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
        return self.request.kind == ROLLING

    @property
    def owner(self) -> Hashable:
        """The document whose consecutive continuations stay in one batch; windows, and what has no task, are alone."""
        alone = self.is_window or self.request.task is None
        return (self.position, self.window) if alone else (self.request.task, self.request.doc_id)

    @property
    def row(self) -> RequestRow:
        return self.request.row(len(self.context), len(self.continuation), self.cut, self.window, self.windows)


def continuations_of(requests: Sequence[ModelRequest], encoding: Encoding, say: Say) -> list[Continuation]:
    """Encode requests of one kind that is scored; a text without tokens has no windows.

    White space at the end of a context moves to the continuation. Both are encoded together and split at the length of
    the context's own encoding. An empty context becomes the prefix token. Two cases that fail an assertion in lm-eval
    0.4.13 are supported: if one token spans the boundary and no token is left for the continuation, the continuation is
    encoded without its context (as in lm-eval's pull request 4055), which `say` reports once; a context of white space
    only is treated as empty. A continuation without tokens, or longer than the context window, is a `ScoringError`.
    """
    for request in requests:
        check_text("".join(request.arguments), request.label)
    if requests and requests[0].kind == ROLLING:
        return _windows(requests, encoding)
    moved = []
    for request in requests:
        context, continuation = request.arguments
        kept = context.rstrip()
        moved.append((kept, context[len(kept) :] + continuation))

    def of_context(text: str) -> Text:
        return encoding.special(text, encoding.prefix_text)

    joined = [of_context(text) for context, rest in moved if context for text in (context + rest, context)]
    ids = encoding.ids([*joined, *((continuation, False) for context, continuation in moved if not context)])
    continuations, spanned = [], []
    for index, (request, (context, continuation)) in enumerate(zip(requests, moved, strict=True)):
        if context:
            head = ids[of_context(context)]
            tail = ids[of_context(context + continuation)][len(head) :]
            if not tail and continuation:
                [tail] = encoding.ids([(continuation, False)]).values()
                spanned.append(request)
        else:
            tail = ids[continuation, False]
            # Its own first token is the context if it is the prefix token
            head, tail = (tail[:1], tail[1:]) if tail[:1] == [encoding.prefix_id] else ([encoding.prefix_id], tail)
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
    texts = [encoding.special(request.arguments[0], encoding.prefix_text) for request in requests]
    ids = encoding.ids(texts)
    continuations = []
    for index, (request, text) in enumerate(zip(requests, texts, strict=True)):
        windows = rolling_windows(ids[text], encoding.prefix_id, encoding.window)
        for number, (context, continuation) in enumerate(windows):
            continuations.append(Continuation(request, index, number, len(windows), context, continuation))
    return continuations
