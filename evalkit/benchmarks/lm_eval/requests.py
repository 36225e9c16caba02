"""lm-eval's requests, and their answers as the journal stores them.

In: lm-eval's `Instance`s. Out: `ModelRequest`s; and from rows of the journal the answers that lm-eval's models return.
An answer is stored with the digest of its request's texts, so that it is never used for another text. lm-eval itself is
not imported.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from evalkit.errors import ScoringError
from evalkit.inputs.values import check_text
from evalkit.runs.journal import FinishedRows, Key

GENERATED, ROLLING = "generate_until", "loglikelihood_rolling"
KINDS = ("loglikelihood", ROLLING, GENERATED)
_PER_TEXT = 2000
"""Cost of generating one text, in scored characters."""


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
Rows = Mapping[Key, RequestRow]


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
    """Return lm-eval's requests, in order. Repetitions are separate samples only where text is generated.

    Raises a `ScoringError` for another kind of request, and for a text that is too long or not valid Unicode.
    """
    seen: Counter[tuple[Any, ...]] = Counter()
    requests = []
    for instance in instances:
        identity = (instance.request_type, instance.task_name, instance.doc_id, instance.idx)
        if instance.request_type not in KINDS or len(instance.args) > 2:
            raise ScoringError(
                f"task {instance.task_name} has requests of type '{instance.request_type}' with {len(instance.args)} "
                f"arguments; evalkit supports {', '.join(KINDS)} on text"
            )
        sample = seen[identity] if instance.request_type == GENERATED else 0
        seen[identity] += 1
        text = json.dumps(list(instance.args), sort_keys=True, default=str)
        request = ModelRequest(*identity, sample, instance.args, hashlib.sha256(text.encode()).hexdigest()[:16])
        check_text("".join(part for part in instance.args if isinstance(part, str)), request.label)
        requests.append(request)
    return requests


def group_by_task(instances: Iterable[Any]) -> dict[str, list[ModelRequest]]:
    """Return the task name in the journal → its distinct requests, in lm-eval's order, one kind after the other."""
    repeated = (instance for instance in instances for _ in range(instance.repeats or 1))
    requests = {request.key(): request for request in requests_of(repeated)}.values()
    kinds = list(dict.fromkeys(request.kind for request in requests))
    grouped: dict[str, list[ModelRequest]] = {}
    for request in sorted(requests, key=lambda request: kinds.index(request.kind)):
        grouped.setdefault(request.journal, []).append(request)
    return grouped


def stored_rows(finished: FinishedRows, journals: Iterable[str]) -> dict[Key, RequestRow]:
    return {(journal, *row[: len(KEY)]): row for journal in journals for row in finished.rows(journal)}


def rows_of(request: ModelRequest, rows: Rows) -> list[RequestRow]:
    """Return the rows of a request, one for each window of its text; none if a window is missing."""
    first = rows.get(request.key())
    windows = range(max(1, first.parts)) if first else ()
    members = [row for window in windows if (row := rows.get(request.key(window))) is not None]
    return members if len(members) == len(windows) else []


def answer_in(row: RequestRow) -> Any:
    """Return the generated text, or the log-likelihood and whether it is greedy."""
    return (row.likelihood, bool(row.greedy)) if row.text is None else row.text


class AnswersFromRows(ABC):
    """The methods of an lm-eval model, whose answers are rows of the journal."""

    @abstractmethod
    def rows(self, instances: list[Any]) -> list[list[RequestRow]]:
        """Return the rows of each request, one for each window of its text."""

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        return [answer_in(row) for [row] in self.rows(requests)]

    generate_until = loglikelihood

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, summed over lm-eval's windows, in order."""
        # Without windows it is an IndexError, not a likelihood of 0
        return [
            sum((row.likelihood or 0.0 for row in rows[1:]), rows[0].likelihood or 0.0) for rows in self.rows(requests)
        ]
