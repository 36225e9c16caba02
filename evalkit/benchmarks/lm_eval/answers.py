"""What the journal of a run of lm-eval's tasks holds, and an lm-eval model that answers from it.

lm-eval's requests have places (which request of which document), and each answer is kept with a digest of the
request's text, so that an answer to another question is never taken.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lm_eval.api.model import LM

from evalkit.benchmarks.base import Held


class Place(NamedTuple):
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


class Row(NamedTuple):
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


Key = tuple[Place, str]
"""A place and the digest of what was asked there."""


def key_of(journal: str, row: Row) -> Key:
    """What a row of the journal is the answer to."""
    kind, _, task = journal.partition(" ")
    return Place(kind, task, row.doc_id, row.number, row.part), row.digest


def places(requests: Sequence[Any]) -> Iterator[tuple[Place, Any]]:
    """Requests with their places; a request that is repeated is a sample of its own only where text is generated."""
    seen: dict[Place, int] = {}
    for request in requests:
        place = Place(request.request_type, request.task_name, request.doc_id, request.idx, 0)
        if place.kind == "generate_until":
            sample = seen.get(place, 0)
            seen[place] = sample + 1
            place = place._replace(part=sample)
        yield place, request


def digest_of(request: Any) -> str:
    """Of what a request asks."""
    text = json.dumps(list(request.args), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_held(held: Held, place: Place, request: Any) -> bool:
    """Whether the journal has all parts of a request's answer."""
    digest = digest_of(request)
    if (place, digest) not in held:
        return False
    if place.kind != "loglikelihood_rolling":
        return True
    parts = held.rows[place, digest][0].parts
    return all((place._replace(part=part), digest) in held for part in range(1, parts))


class Answers(LM):  # type: ignore[misc]
    """The model that lm-eval's `evaluate` is given.

    Args:
        held: all answers of the run.
    """

    def __init__(self, held: Held) -> None:
        super().__init__()
        self._held = held

    def of(self, request: Any) -> Row:
        """The answer to a scored request."""
        place = Place(request.request_type, request.task_name, request.doc_id, request.idx, 0)
        return self._row(place, digest_of(request))

    @property
    def seconds(self) -> dict[str, float]:
        """Spent on each task, in all sessions."""
        found: dict[str, float] = {}
        for journal, spent in self._held.seconds.items():
            task = journal.partition(" ")[2]
            found[task] = found.get(task, 0.0) + spent
        return found

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """(log-likelihood, greedy?) of each request."""
        return [(_likelihood(found), bool(found.greedy)) for found in map(self.of, requests)]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Log-likelihood of each text: the sum over its windows."""
        return [sum(map(_likelihood, self._parts(request))) for request in requests]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """What the model says after each text."""
        return [str(self._row(place, digest_of(request)).text) for place, request in places(requests)]

    def _parts(self, request: Any) -> Iterator[Row]:
        first, digest = self.of(request), digest_of(request)
        [(place, _)] = places([request])
        for part in range(max(first.parts, 1)):
            yield self._row(place._replace(part=part), digest)

    def _row(self, place: Place, digest: str) -> Row:
        row: Row = self._held.rows[place, digest][0]
        return row


def _likelihood(row: Row) -> float:
    return float(row.likelihood or 0.0)
