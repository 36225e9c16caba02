"""lm-eval's requests and their answers, as the journal of a run of lm-eval's tasks holds them.

Each request has a place (which request of which document), and each answer is kept with a digest of the request's
text, so that an answer to another question is never taken. lm-eval itself is not imported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from evalkit.runs.finished_rows import FinishedRows, Key

_PER_TEXT = 2000
"""Work of generating one text, in characters that are scored."""


class RequestKey(NamedTuple):
    """Which request of a run, or which part of one."""

    kind: str
    """lm-eval's name of it: "loglikelihood", "loglikelihood_rolling" or "generate_until"."""
    task: str
    doc_id: int
    number: int
    """Which of the document's requests."""
    part: int
    """Which window of a text, or which of several samples of the same request."""

    @property
    def journal(self) -> str:
        """What the journal calls its task."""
        return f"{self.kind} {self.task}"


class RequestRow(NamedTuple):
    """What the journal holds of a place: where in its task it is, and the answer."""

    doc_id: int
    number: int
    part: int
    digest: str
    """Of the request's text."""
    parts: int
    """How many windows the text has; 1 where the request is not taken apart, 0 where it has no token."""
    likelihood: float | None
    greedy: bool | None
    context_tokens: int
    continuation_tokens: int
    cut: int
    """Context tokens cut on the left to fit the window."""
    text: str | None
    """What was generated."""


class LMEvalRequest(NamedTuple):
    """A request of lm-eval."""

    place: RequestKey
    request: Any
    digest: str
    """Of its text."""


KEY = ("doc_id", "number", "part", "digest")
"""What a row is the answer to, in its task."""


def key_of(place: RequestKey, digest: str) -> Key:
    """What the journal calls the answer at a place to a request of that digest."""
    return place.journal, place.doc_id, place.number, place.part, digest


def places(requests: Sequence[Any]) -> Iterator[tuple[RequestKey, Any]]:
    """Requests with their places; a request that is repeated is a sample of its own only where text is generated."""
    seen: dict[RequestKey, int] = {}
    for request in requests:
        place = RequestKey(request.request_type, request.task_name, request.doc_id, request.idx, 0)
        if place.kind == "generate_until":
            sample = seen.get(place, 0)
            seen[place] = sample + 1
            place = place._replace(part=sample)
        yield place, request


def digest_of(request: Any) -> str:
    """Of what a request asks."""
    text = json.dumps(list(request.args), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def unanswered(finished: FinishedRows, asked: Sequence[LMEvalRequest]) -> list[LMEvalRequest]:
    """Those requests of a task of which the journal does not have all parts of the answer."""
    windows: dict[tuple[Any, ...], int] = {}
    if asked and asked[0].place.kind == "loglikelihood_rolling":
        journal = asked[0].place.journal
        windows = {(journal, *(getattr(row, name) for name in KEY)): row.parts for row in finished.rows(journal)}

    def is_held(place: RequestKey, digest: str) -> bool:
        parts = max(1, windows.get(key_of(place, digest), 1))
        return all(key_of(place._replace(part=place.part + part), digest) in finished for part in range(parts))

    return [one for one in asked if not is_held(one.place, one.digest)]


def label_of(request: Any) -> str:
    """How messages name an lm-eval request."""
    if request.task_name is None:
        return "a request"
    return f"{request.task_name} document {request.doc_id}"


def owner_of(request: Any) -> Hashable:
    """What keeps requests together: the document, or the request itself where lm-eval does not say."""
    return id(request) if request.task_name is None else (request.task_name, request.doc_id)


def asked_of(requests: Sequence[Any]) -> dict[str, list[LMEvalRequest]]:
    """What the journal calls a task → its requests, each once, in the order in which lm-eval asks."""
    found: dict[str, dict[RequestKey, LMEvalRequest]] = {}
    repeated = [request for request in requests for _ in range(request.repeats or 1)]
    for kind in dict.fromkeys(request.request_type for request in requests):
        for place, request in places([one for one in repeated if one.request_type == kind]):
            found.setdefault(place.journal, {}).setdefault(place, LMEvalRequest(place, request, digest_of(request)))
    return {journal: list(members.values()) for journal, members in found.items()}


def work_of(request: Any) -> float:
    """Characters, or what generating takes as long as: near enough to a request's share of the time."""
    return _PER_TEXT if request.request_type == "generate_until" else sum(map(len, request.args))
