"""lm-eval's requests and their answers, as the journal stores them.

In: lm-eval's requests. Out: their keys and digests, and those without an answer. A key identifies a request within
its document. An answer is stored with the digest of the request's text, so that it is never used for another text.
lm-eval itself is not imported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from evalkit.runs.journal import FinishedRows, Key

_PER_TEXT = 2000
"""Cost of generating one text, in scored characters."""


class RequestKey(NamedTuple):
    """The key of a request of a run, or of one part of it."""

    kind: str
    """lm-eval's request type: "loglikelihood", "loglikelihood_rolling" or "generate_until"."""
    task: str
    doc_id: int
    number: int
    """Index of the request among those of its document."""
    part: int
    """Index of the window of a text, or of the sample of a repeated request."""

    @property
    def journal(self) -> str:
        """The task name in the journal."""
        return f"{self.kind} {self.task}"


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


class LMEvalRequest(NamedTuple):
    """A request of lm-eval with its key."""

    key: RequestKey
    request: Any
    digest: str
    """Digest of its text."""


KEY = ("doc_id", "number", "part", "digest")
"""Columns that identify a row within its task."""


def journal_key(key: RequestKey, digest: str) -> Key:
    """Return the journal's key of the answer to a request with this key and digest."""
    return key.journal, key.doc_id, key.number, key.part, digest


def with_keys(requests: Sequence[Any]) -> Iterator[tuple[RequestKey, Any]]:
    """Yield requests with their keys. Repetitions of a request are separate samples only where text is generated."""
    seen: dict[RequestKey, int] = {}
    for request in requests:
        key = RequestKey(request.request_type, request.task_name, request.doc_id, request.idx, 0)
        if key.kind == "generate_until":
            sample = seen.get(key, 0)
            seen[key] = sample + 1
            key = key._replace(part=sample)
        yield key, request


def digest_of(request: Any) -> str:
    """Return the digest of a request's arguments."""
    text = json.dumps(list(request.args), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def unanswered(finished: FinishedRows, requests: Sequence[LMEvalRequest]) -> list[LMEvalRequest]:
    """Return the requests of a task whose answers in the journal are missing or incomplete."""
    windows: dict[tuple[Any, ...], int] = {}
    if requests and requests[0].key.kind == "loglikelihood_rolling":
        journal = requests[0].key.journal
        windows = {(journal, *(getattr(row, name) for name in KEY)): row.parts for row in finished.rows(journal)}

    def is_answered(key: RequestKey, digest: str) -> bool:
        parts = max(1, windows.get(journal_key(key, digest), 1))
        return all(journal_key(key._replace(part=key.part + part), digest) in finished for part in range(parts))

    return [one for one in requests if not is_answered(one.key, one.digest)]


def label_of(request: Any) -> str:
    """Return the name of a request for messages."""
    if request.task_name is None:
        return "a request"
    return f"{request.task_name} document {request.doc_id}"


def owner_of(request: Any) -> Hashable:
    """Return the document of a request, whose requests stay in one batch; or the request's own id if it has none."""
    return id(request) if request.task_name is None else (request.task_name, request.doc_id)


def group_by_task(requests: Sequence[Any]) -> dict[str, list[LMEvalRequest]]:
    """Return the task name in the journal → its distinct requests, in lm-eval's order."""
    grouped: dict[str, dict[RequestKey, LMEvalRequest]] = {}
    repeated = [request for request in requests for _ in range(request.repeats or 1)]
    for kind in dict.fromkeys(request.request_type for request in requests):
        for key, request in with_keys([one for one in repeated if one.request_type == kind]):
            grouped.setdefault(key.journal, {}).setdefault(key, LMEvalRequest(key, request, digest_of(request)))
    return {journal: list(members.values()) for journal, members in grouped.items()}


def work_of(request: Any) -> float:
    """Return the cost of a request in scored characters, which approximates its share of the time."""
    return _PER_TEXT if request.request_type == "generate_until" else sum(map(len, request.args))
