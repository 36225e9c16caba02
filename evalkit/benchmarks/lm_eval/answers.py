"""An lm-eval model that answers from what the journal holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lm_eval.api.model import LM

from evalkit.benchmarks.lm_eval.requests import RequestKey, RequestRow, digest_of, places
from evalkit.runs.finished_rows import FinishedRows


class Answers(LM):  # type: ignore[misc]
    """The model that lm-eval's `evaluate` is given.

    Args:
        finished: all answers of the run.
    """

    def __init__(self, finished: FinishedRows) -> None:
        super().__init__()
        self._held = finished
        self._task = ""
        self._rows: dict[tuple[Any, ...], RequestRow] = {}
        """Of one task of the journal at a time, since lm-eval asks task by task."""

    def of(self, request: Any) -> RequestRow:
        """The answer to a scored request."""
        place = RequestKey(request.request_type, request.task_name, request.doc_id, request.idx, 0)
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

    def _parts(self, request: Any) -> Iterator[RequestRow]:
        first, digest = self.of(request), digest_of(request)
        [(place, _)] = places([request])
        for part in range(max(first.parts, 1)):
            yield self._row(place._replace(part=part), digest)

    def _row(self, place: RequestKey, digest: str) -> RequestRow:
        if place.journal != self._task:
            self._task, self._rows = place.journal, {}
            for row in self._held.rows(place.journal):
                self._rows.setdefault((row.doc_id, row.number, row.part, row.digest), row)
        return self._rows[place.doc_id, place.number, place.part, digest]


def _likelihood(row: RequestRow) -> float:
    return float(row.likelihood or 0.0)
