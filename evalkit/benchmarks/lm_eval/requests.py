"""lm-eval's requests, and their answers as the journal stores them.

In: lm-eval's `Instance`s. Out: `ModelRequest`s; and from rows of the journal the answers that lm-eval's models return.
An answer is stored with the digest of its request's texts, so that it is never used for another text. lm-eval itself is
not imported.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from evalkit.compatibility.names import replaced
from evalkit.errors import DataError, RunError, ScoringError, reading_as
from evalkit.inputs.values import check_text, text_digest
from evalkit.requests.rows import GeneratedRow, RequestKey, ScoredRow, key_of
from evalkit.runs.journal import FinishedRows, Key
from evalkit.runs.score_table import CONTINUATION
from evalkit.suites.lm_eval_tasks import quiet_lm_eval
from evalkit.suites.task_identity import SEEDS

GENERATED, ROLLING = "generate_until", "loglikelihood_rolling"
KINDS = ("loglikelihood", ROLLING, GENERATED)
_PER_TEXT = 2000
"""Cost of generating one text, in scored characters."""

AnswerRow: TypeAlias = ScoredRow | GeneratedRow
Rows = Mapping[Key, AnswerRow]
"""Rows of the journal by their keys."""


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

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.journal, str(self.doc_id), self.number, self.digest)


def build_requests(task: Any, limit: int | None, places: Collection[int] | None = None) -> list[Any]:
    """Let lm-eval build the requests of a task's first documents, or of those at some places among them."""
    with quiet_lm_eval(), reading_as(f"task {task.task_name}", "documents to request", DataError):
        chosen = list(task.doc_iterator(rank=0, limit=limit, world_size=1))
        if places is not None:
            chosen = [document for position, document in enumerate(chosen) if position in places]
        visited = chosen
        if task.config.num_fewshot and places is None and "doc_iterator" in vars(task):
            # A document's examples depend on those drawn before it, so for a sample they are drawn for all before it
            visited = list(type(task).doc_iterator(task, rank=0, limit=chosen[-1][0] + 1, world_size=1))
        # Again, since the sampler's state changes with every document
        task.set_fewshot_seed(SEEDS["fewshot"])
        with replaced(task, doc_iterator=lambda _: lambda **_: visited):
            task.build_all_requests(rank=0, world_size=1)
    numbers = {number for number, _ in chosen}
    task.instances[:] = [instance for instance in task.instances if instance.doc_id in numbers]
    return list(task.instances)


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
        request = ModelRequest(*identity, sample, instance.args, text_digest(text)[:16])
        check_text("".join(part for part in instance.args if isinstance(part, str)), request.label)
        requests.append(request)
    return requests


def group_by_task(instances: Iterable[Any]) -> dict[str, list[ModelRequest]]:
    """Return the task name in the journal → its distinct requests, in lm-eval's order, one kind after the other."""
    repeated = (instance for instance in instances for _ in range(instance.repeats or 1))
    requests = distinct(requests_of(repeated))
    kinds = list(dict.fromkeys(request.kind for request in requests))
    grouped: dict[str, list[ModelRequest]] = {}
    for request in sorted(requests, key=lambda request: kinds.index(request.kind)):
        grouped.setdefault(request.journal, []).append(request)
    return grouped


def distinct(requests: Iterable[ModelRequest]) -> list[ModelRequest]:
    """Return requests without those that repeat another one."""
    return list({(*request.key, request.sample): request for request in requests}.values())


def stored_rows(finished: FinishedRows, journals: Iterable[str]) -> dict[Key, AnswerRow]:
    return {(journal, *key_of(row)): row for journal in journals for row in finished.rows(journal)}


def rows_of(request: ModelRequest, rows: Rows) -> list[AnswerRow]:
    """Return the rows of a request, one for each window of its text; none if a window is missing."""
    first = rows.get((*request.key, request.sample))
    if first is None or request.kind == GENERATED:
        return [] if first is None else [first]
    parts = range(max(1, first.parts))
    members = [row for part in parts if (row := rows.get((*request.key, part))) is not None]
    return members if len(members) == len(parts) else []


def likelihood_of(row: AnswerRow) -> float:
    """Return the log-likelihood of the continuation, in nats; 0 of a text without tokens.

    Raises a `RunError` if it is missing.
    """
    assert isinstance(row, ScoredRow)
    if not row.segments:
        return 0.0
    _, likelihood = row.of(CONTINUATION)
    if likelihood is None:
        raise RunError(f"the journal lacks a log-likelihood of document {row.document}; delete its folder, run again")
    return likelihood


def answer_in(row: AnswerRow) -> Any:
    """Return the generated text, or the log-likelihood and whether it is greedy."""
    return row.text if isinstance(row, GeneratedRow) else (likelihood_of(row), bool(row.greedy))


class AnswersFromRows(ABC):
    """The methods of an lm-eval model, whose answers are rows of the journal."""

    @abstractmethod
    def rows(self, instances: list[Any]) -> list[list[AnswerRow]]:
        """Return the rows of each request, one for each window of its text."""

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        return [answer_in(row) for [row] in self.rows(requests)]

    generate_until = loglikelihood

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, summed over lm-eval's windows, in order."""
        # Without windows it is an IndexError, not a likelihood of 0
        return [sum(map(likelihood_of, rows[1:]), likelihood_of(rows[0])) for rows in self.rows(requests)]
