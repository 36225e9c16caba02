"""An lm-eval model that returns the answers stored in the journal.

In: the finished rows of a run, and lm-eval's requests. Out: the answers, as lm-eval's `evaluate` expects them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lm_eval.api.model import LM

from evalkit.benchmarks.lm_eval.requests import RequestKey, RequestRow, digest_of, with_keys
from evalkit.runs.journal import FinishedRows


class StoredAnswers(LM):  # type: ignore[misc]
    """An lm-eval model that returns stored answers, for lm-eval's `evaluate`.

    Args:
        finished: the rows of all requests of the run.
    """

    def __init__(self, finished: FinishedRows) -> None:
        super().__init__()
        self._finished = finished
        self._task = ""
        self._rows: dict[tuple[Any, ...], RequestRow] = {}
        """Rows of the current task; lm-eval requests one task after the other."""

    def of(self, request: Any) -> RequestRow:
        """Return the row of a scored request."""
        key = RequestKey(request.request_type, request.task_name, request.doc_id, request.idx, 0)
        return self._row(key, digest_of(request))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of computation by task, over all sessions."""
        totals: dict[str, float] = {}
        for journal, spent in self._finished.seconds.items():
            task = journal.partition(" ")[2]
            totals[task] = totals.get(task, 0.0) + spent
        return totals

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Return (log-likelihood, is greedy) of each request."""
        return [(_likelihood(found), bool(found.greedy)) for found in map(self.of, requests)]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Return the log-likelihood of each text, summed over its windows."""
        return [sum(map(_likelihood, self._parts(request))) for request in requests]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return the generated text of each request."""
        return [str(self._row(key, digest_of(request)).text) for key, request in with_keys(requests)]

    def _parts(self, request: Any) -> Iterator[RequestRow]:
        first, digest = self.of(request), digest_of(request)
        [(key, _)] = with_keys([request])
        for part in range(max(first.parts, 1)):
            yield self._row(key._replace(part=part), digest)

    def _row(self, key: RequestKey, digest: str) -> RequestRow:
        if key.journal != self._task:
            self._task, self._rows = key.journal, {}
            for row in self._finished.rows(key.journal):
                self._rows.setdefault((row.doc_id, row.number, row.part, row.digest), row)
        return self._rows[key.doc_id, key.number, key.part, digest]


def _likelihood(row: RequestRow) -> float:
    return float(row.likelihood or 0.0)
