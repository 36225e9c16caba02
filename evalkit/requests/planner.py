"""The batches of a run: order, token budgets, resumption, and estimates without a model.

In: the requests of a run, facts about the loaded model, a tokenizer, and the finished rows. Out: the batches that are
missing. Batches are planned whatever is finished, so a resumed run gives the same numbers bit for bit. While the model
computes a task, a thread encodes and plans the next ones. Neither torch nor a model is needed.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from evalkit.cache import remembered
from evalkit.generation.prompts import CHUNK, Prompt, Speed, estimate_line
from evalkit.requests.batches import Batch, Batches, Planned, TaskTokens
from evalkit.requests.encoded import DocumentHead, EmptyTexts, EncodedDocuments, ScoreBatch, empty_rows
from evalkit.requests.requests import Encoder, RunRequests, ScoreDocument, TaskRequests
from evalkit.requests.rows import Finished, GeneratedRow, ScoredRow, is_finished, key_of
from evalkit.runs.traits import NO_BATCH
from evalkit.scoring.pack import PlannedBatch, SampledGroup, TreeBatch, estimated_tokens
from evalkit.scoring.pack import plan as plan_batches
from evalkit.scoring.tree import Ints

LONG = 2048
"""Tokens from which a sequence of a task in order is scored alone, by the model's own attention: a batch of several is
not faster."""
_MOST_AHEAD = 2**24
"""Characters of all tasks that are encoded ahead, unless it is one task. MMLU's are 7.8 million, and its tokens take
60 MB; a fast GPU scores the small tasks before it in less time than it takes to encode."""
_TASKS_KEPT = 16
"""Tasks whose tokens are kept for the next checkpoint with the same tokenizer."""


class Stopped(Exception):
    """The batches are not needed any more."""


@dataclass(frozen=True)
class _PlannedTask:
    """A task whose scored sequences are sorted."""

    encoded: EncodedDocuments
    batches: list[PlannedBatch]
    empty: list[ScoredRow]


def planned(requests: RunRequests, encoder: Encoder, finished: Finished) -> Planned:
    """Plan the batches of all requests without rows."""
    missing = [task for task in requests.tasks if is_missing(task, finished)]
    if missing and all(task.generates and encoder.facts.speed for task in missing):
        return _timed(missing, encoder, finished)
    work = {key: size for task in requests.tasks for key, size in task.costs()}
    done = sum(size for key, size in work.items() if is_finished(key, finished))
    stopped = threading.Event()
    batches = _Planner(requests, encoder, finished, stopped).batches(missing)
    return Planned(batches, sum(work.values()), done, requests.message, stopped.set)


def is_missing(task: TaskRequests, finished: Finished) -> bool:
    """Whether a request of a task has no answer."""
    return any(not is_finished(key, finished) for key, _ in task.costs())


def _timed(tasks: Sequence[TaskRequests], encoder: Encoder, finished: Finished) -> Planned:
    """Plan the batches of generated texts, whose work is in measured seconds."""
    encoder.say(f"tokenising the prompts of {len(tasks)} task{'s' * (len(tasks) > 1)}")
    batches = [batch for task in tasks for batch in _generated(task, encoder, finished, encoder.facts.speed)]
    prompts = [asked.prompt for batch in batches for asked in batch.content]
    facts = encoder.facts
    assert facts.capacity is not None and facts.speed is not None
    message = estimate_line(prompts, facts.capacity, facts.speed) if prompts else ""
    return Planned((batch for batch in batches), sum(batch.work for batch in batches), 0.0, message)


def _generated(task: TaskRequests, encoder: Encoder, finished: Finished, speed: Speed | None = None) -> Iterator[Batch]:
    """Yield the batches of a task's prompts that are not finished; their work is in seconds if a speed is given."""
    capacity = encoder.facts.capacity
    assert capacity is not None
    asked = task.generated(encoder)
    by_index = {each.prompt.index: each for each in asked}
    costs = dict(task.costs())
    for number, prompts in enumerate(capacity.batches([each.prompt for each in asked])):
        members = [by_index[prompt.index] for prompt in prompts]
        # A finished batch is left out as a whole: the others' texts stay the same
        if all((*each.key(task.journal), each.part) in finished for each in members):
            continue
        if speed is None:
            work = sum(costs[each.key(task.journal)] / each.parts for each in members)
        else:
            work = sum(speed.seconds(each.prompt, capacity) for each in members)
        documents = len({each.document for each in members})
        yield Batch(task.task, number, tuple(members), GeneratedRow, work, documents, task.journal)


def _held(task: TaskRequests) -> float:
    """Return the characters of a task whose tokens are kept until its turn."""
    if task.generates or task.in_order:
        return 0.0
    return sum(size for _, size in task.costs())


class _Planner:
    """Plans the tasks of a run ahead of the batches that are taken."""

    def __init__(self, requests: RunRequests, encoder: Encoder, finished: Finished, stopped: threading.Event) -> None:
        self._requests, self._encoder, self._finished, self._stopped = requests, encoder, finished, stopped

    def batches(self, missing: Sequence[TaskRequests]) -> Batches:
        tasks = [task.without(self._finished.without_batch) for task in missing]
        requested = self._requests.budget
        # A started run keeps its budget, so one that is too small for a later task fails before scoring
        most = _MOST_AHEAD if requested is None else math.inf
        rest = deque(tasks)
        queue = deque[tuple[Future[_PlannedTask | None], float]]()
        with ThreadPoolExecutor(1, "evalkit-encode") as thread:

            def fill() -> None:
                waiting = sum(size for _, size in queue)
                while rest:
                    size = _held(rest[0])
                    waiting += size
                    if queue and waiting > most:
                        break
                    future = thread.submit(self._prepared, rest.popleft())
                    queue.append((future, size))

            try:
                fill()
                for future, _ in list(queue) if requested is not None else ():
                    future.result()
                for task in tasks:
                    future, _ = queue.popleft()
                    prepared = future.result()
                    fill()
                    for batch in self._of_task(task, prepared):
                        yield batch
                        following = queue[0][0] if queue else None
                        if following is not None and following.done():
                            following.result()  # a failure is reported before the task's turn
            finally:
                self._stopped.set()

    def _prepared(self, task: TaskRequests) -> _PlannedTask | None:
        """Encode and plan a task whose sequences are sorted; within `remembering`, that of an earlier run."""
        if task.generates or task.in_order:
            return None
        if self._stopped.is_set():
            raise Stopped
        facts = self._encoder.facts
        must_fit = facts.way == "tree" and self._requests.budget == facts.token_budget

        def make() -> _PlannedTask:
            documents = list[ScoreDocument]()

            def until_stopped() -> Iterator[ScoreDocument]:
                for document in task.scored(self._encoder):
                    if self._stopped.is_set():
                        raise Stopped
                    if any(not len(score.tokens) for score in document.scores):
                        documents.append(document)
                    yield document

            encoded = EncodedDocuments.of(until_stopped())
            batches = plan_batches(encoded.sequences, facts.token_budget, must_fit)
            return _PlannedTask(encoded, batches, empty_rows(documents))

        contents = task.contents
        if contents is None:
            return make()
        key = (contents, self._requests.tokenizer, facts.window, facts.token_budget, must_fit)
        return remembered("batches", key, make, most=_TASKS_KEPT)

    def _of_task(self, task: TaskRequests, prepared: _PlannedTask | None) -> Iterator[Batch]:
        if task.generates:
            yield from _generated(task, self._encoder, self._finished)
        elif prepared is None:
            yield from self._in_order(task)
        else:
            yield from self._sorted(task, prepared)

    def _sorted(self, task: TaskRequests, prepared: _PlannedTask) -> Iterator[Batch]:
        if prepared.empty:
            rows = [row for row in prepared.empty if (task.journal, *key_of(row)) not in self._finished]
            if rows:
                documents = len({row.document for row in rows})
                yield Batch(task.task, NO_BATCH, EmptyTexts(rows), ScoredRow, 0.0, documents, task.journal)
        encoded = prepared.encoded
        facts = self._encoder.facts
        for number, batch in enumerate(prepared.batches, task.first):
            heads = [encoded.head(item) for item in batch.items]
            if self._lacks(task, heads):
                content = ScoreBatch(batch.of(encoded.sequences), heads, facts.way, facts.pass_tokens)
                work = sum(encoded.work[item] for item in batch.items)
                documents = sum(encoded.is_last[item] for item in batch.items)
                yield Batch(task.task, number, content, ScoredRow, work, documents, task.journal)

    def _in_order(self, task: TaskRequests) -> Iterator[Batch]:
        facts = self._encoder.facts
        groups = packed(task.scored(self._encoder), facts.token_budget)
        for number, members in enumerate(groups, task.first):
            encoded = EncodedDocuments.of(members)
            heads = [encoded.head(item) for item in range(len(members))]
            if self._lacks(task, heads):
                tree = TreeBatch(np.empty(0, np.int32), tuple(range(len(members))), encoded.sequences)
                way = "alone" if len(members) == 1 else facts.way
                content = ScoreBatch(tree, heads, way, facts.pass_tokens)
                work = sum(encoded.work)
                yield Batch(task.task, number, content, ScoredRow, work, sum(encoded.is_last), task.journal)

    def _lacks(self, task: TaskRequests, heads: Iterable[DocumentHead]) -> bool:
        """Whether a batch has a row that is not in the journal. A finished batch is left out as a whole."""
        return any(key not in self._finished for head in heads for key in head.keys(task.journal))


def packed(documents: Iterable[ScoreDocument], budget: int) -> Iterator[tuple[ScoreDocument, ...]]:
    """Group documents of one sequence, in order, up to a token budget; those of `longest_shared` tokens stay alone."""
    members: list[ScoreDocument] = []
    tokens = 0
    for document in documents:
        size = len(document.scores[0].tokens) - 1
        if size >= longest_shared(budget):
            size = budget  # a batch by itself
        if members and tokens + size > budget:
            yield tuple(members)
            members = []
            tokens = 0
        members.append(document)
        tokens += size
    if members:
        yield tuple(members)


def longest_shared(budget: int) -> int:
    """Return the tokens from which a sequence in order is a batch by itself."""
    return min(LONG, budget // 2)


def token_counts(requests: RunRequests, encoder: Encoder) -> list[TaskTokens]:
    """Estimate the tokens of each task from a sample of its documents; `TaskRequests.sizes` are those of all.

    No tree joins two prompts, so those of a task under several prompts are added.
    """
    by_task: dict[str, TaskTokens] = {}
    for task in requests.tasks:
        tokens = _of_generated(task, encoder) if task.generates else _of_scored(task, encoder)
        if before := by_task.get(task.task):
            names = ("rows", "alone", "distinct", "generated")
            sums = {name: getattr(before, name) + getattr(tokens, name) for name in names}
            tokens = replace(before, **sums)
        by_task[task.task] = tokens
    return list(by_task.values())


def _of_scored(task: TaskRequests, encoder: Encoder) -> TaskTokens:
    by_group: dict[str, dict[str, list[Ints]]] = {}
    for document in task.scored(encoder):
        of_group = by_group.setdefault(document.group, {})
        sequences = of_group.setdefault(document.document, [])
        sequences += [score.tokens for score in document.scores if len(score.tokens)]
    groups = []
    rows = 0.0
    sampled = 0
    sizes = task.sizes or {name: len(documents) for name, documents in by_group.items()}
    for name, documents in by_group.items():
        sequences = [tokens for of_document in documents.values() for tokens in of_document]
        rows += len(sequences) * sizes[name] / len(documents)
        sampled += len(documents)
        if sequences:
            groups.append(SampledGroup(sequences, len(documents), sizes[name]))
    alone, distinct = estimated_tokens(groups) if groups else (0.0, 0.0)
    return TaskTokens(task.task, sum(sizes.values()), sampled, rows, alone, alone if task.in_order else distinct)


def _of_generated(task: TaskRequests, encoder: Encoder) -> TaskTokens:
    """Estimate the tokens of prompts and answers. Prompts share whole chunks, as they are batched."""
    asked = task.generated(encoder)
    prompts = [each.prompt for each in asked]
    sampled = len({each.document for each in asked})
    documents = sum(task.sizes.values()) if task.sizes else sampled
    scale = documents / sampled
    alone = sum(len(prompt.tokens) for prompt in prompts)
    # Everything up to the end of each whole chunk that another prompt could share
    beginnings = [beginning for prompt in prompts for beginning in _beginnings(prompt)]
    repeated = CHUNK * (len(beginnings) - len(set(beginnings)))
    new = sum(prompt.max_new_tokens for prompt in prompts)
    sums = (scale * len(prompts), scale * alone, scale * (alone - repeated), scale * new)
    return TaskTokens(task.task, documents, sampled, *sums)


def _beginnings(prompt: Prompt) -> list[bytes]:
    return [prompt.tokens[:end].tobytes() for end in range(CHUNK, len(prompt.tokens), CHUNK)]
