"""lm-eval's requests, and their answers as the journal stores them.

In: lm-eval's `Instance`s. Out: a `ModelRequest` each, and those without an answer. An answer is stored with the digest
of its request's texts, so that it is never used for another text. lm-eval itself is not imported.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from evalkit.runs.journal import FinishedRows, Key

GENERATED = "generate_until"
_PER_TEXT = 2000
"""Cost of generating one text, in scored characters."""


class RequestRow(NamedTuple):
    """A row of the journal: the key within its task, and the answer."""

    doc_id: int
    number: int
    part: int
    digest: str
    """Digest of the request's text."""
    parts: int
    """Number of windows of the text; 1 for a request that is not split, 0 for a text without tokens."""
    likelihood: float | None
    greedy: bool | None
    context_tokens: int
    continuation_tokens: int
    cut: int
    """Context tokens truncated on the left to fit the context window."""
    text: str | None
    """The generated text."""


KEY = ("doc_id", "number", "part", "digest")
"""Columns that identify a row within its task."""


class ModelRequest(NamedTuple):
    """A request to the model."""

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
        """The task name in the journal."""
        return f"{self.kind} {self.task}"

    @property
    def label(self) -> str:
        """Its name in messages."""
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
    if requests and requests[0].kind == "loglikelihood_rolling":
        journal = requests[0].journal
        windows = {(journal, *(getattr(row, name) for name in KEY)): row.parts for row in finished.rows(journal)}
    return [
        request
        for request in requests
        if any(request.key(window) not in finished for window in range(max(1, windows.get(request.key(), 1))))
    ]
