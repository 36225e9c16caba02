"""Batches of lm-eval's requests, in which sequences to score and prompts to continue share their prefixes.

In: requests, finished rows, and facts about the model. Out: the batches that are not finished. How requests are grouped
does not depend on what is finished, so a resumed run gives the answers of an uninterrupted one, bit for bit on the same
machine.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from evalkit.benchmarks.base import Batch, Batches
from evalkit.benchmarks.lm_eval.encoding import Encoding, encode_pairs, windows
from evalkit.benchmarks.lm_eval.requests import (
    LMEvalRequest,
    RequestKey,
    RequestRow,
    journal_key,
    label_of,
    owner_of,
    unanswered,
    work_of,
)
from evalkit.benchmarks.lm_eval.texts import TextFacts, prompts_of
from evalkit.benchmarks.session import prefetched
from evalkit.display import Say
from evalkit.generation.prompts import Prompt
from evalkit.runs.journal import FinishedRows
from evalkit.scoring import pack
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import SequenceSet, TreeBatch, check_budget, plan


class Continuation(NamedTuple):
    """A continuation to score, after its context."""

    context: Sequence[int]
    continuation: Sequence[int]
    label: str
    """Its name in messages."""
    owner: Hashable
    """The document or other unit it belongs to; consecutive continuations of one owner stay in one batch."""
    group: str = ""
    """A name, such as its task; members of a group often share a prefix."""


def score_all(
    engine: Engine, continuations: Sequence[Continuation], given_budget: int | None = None
) -> Iterator[tuple[int, float, bool]]:
    """Score continuations.

    Args:
        engine: an engine with `greedy=True`.
        continuations: the continuations to score.
        given_budget: the token budget that the user gave, if any.

    Yields:
        (index of the continuation, log-likelihood, is greedy) as in `likelihoods`, batch by batch.

    Raises:
        EvalkitError: the engine rejects the model or a score, or runs out of memory.
    """
    items, members = items_of(continuations)
    if not items:
        return
    if not engine.checked:
        engine.check(items)
    if engine.shares and given_budget == engine.budget:
        check_budget(items, given_budget)
    for batch in prefetched(iter(plan(items, engine.budget)), build_tree_of):
        for item, scores in likelihoods(engine, batch):
            for index, (likelihood, greedy) in zip(members[item.index], scores, strict=True):
                yield index, likelihood, greedy


def build_tree_of(batch: TreeBatch) -> None:
    """Build a batch's tree."""
    _ = batch.tree


def likelihoods(engine: Engine, batch: TreeBatch) -> Iterator[tuple[SequenceSet, list[tuple[float, bool]]]]:
    """Yield each item with its continuations' (log-likelihood in nats, summed in float64; is greedy)."""
    for item, sequences in engine.score(batch):
        pairs = zip(item.is_scored, sequences, strict=True)
        yield (
            item,
            [(float(s.logprobs[w].astype(np.float64).sum()), bool(s.greedy[w].all())) for w, s in pairs],
        )


def items_of(continuations: Sequence[Continuation]) -> tuple[list[SequenceSet], list[list[int]]]:
    """Return one item for each run of continuations with the same owner, and the indices of its continuations."""
    items: list[SequenceSet] = []
    members: list[list[int]] = []
    for _, same_owner in groupby(range(len(continuations)), key=lambda index: continuations[index].owner):
        indices = list(same_owner)
        parts = [continuations[index] for index in indices]
        sequences = [np.array((*part.context, *part.continuation), dtype=np.int32) for part in parts]
        scored = [np.arange(len(s)) >= len(part.context) for part, s in zip(parts, sequences, strict=True)]
        items.append(SequenceSet(len(items), parts[0].label, parts[0].group, tuple(sequences), tuple(scored)))
        members.append(indices)
    return items, members


EMPTY_TEXTS = -1
"""Number of the batch of a task's empty texts, which have no tokens to score."""


@dataclass(frozen=True)
class RequestFacts:
    """Facts about the model that planning needs."""

    token_budget: int
    """Most tokens of a scored batch."""
    shares: bool
    """Whether shared prefixes are computed once."""
    window: int
    prefix_id: int
    """The token that precedes a text without context."""
    prefix_text: str
    texts: TextFacts | None
    """None if no text is generated."""


@dataclass(frozen=True)
class ScoringContent:
    """Content of a batch of sequences to score."""

    batch: pack.TreeBatch
    rows: dict[int, list[RequestRow]]
    """Index of an item → a row for each of its sequences, without the scores."""

    def warm(self) -> None:
        """See `Batch.warm`."""
        _ = self.batch.tree


@dataclass(frozen=True)
class GenerationContent:
    """Content of a batch of prompts to continue."""

    prompts: list[Prompt]
    rows: list[RequestRow]
    """One for each prompt, without the text."""


def batches_of(
    requests: dict[str, list[LMEvalRequest]],
    facts: RequestFacts,
    tokenizer: Any,
    finished: FinishedRows,
    budget: int | None,
    say: Say,
) -> Batches:
    """Yield the batches of all requests without an answer.

    Args:
        requests: by task, see `group_by_task`.
        facts: about the model.
        tokenizer: the model's tokenizer.
        finished: the rows in the journal.
        budget: the token budget that the user gave, if any.
        say: called once if continuations were encoded without their context.
    """
    encoding = Encoding(tokenizer, facts.prefix_id, facts.prefix_text, facts.window)
    for members in requests.values():
        if not unanswered(finished, members):
            continue
        if members[0].key.kind == "generate_until":
            yield from _to_generate(members, facts, encoding, finished)
        else:
            yield from _to_score(members, facts, encoding, finished, budget, say)


def continuations_of(
    members: Sequence[LMEvalRequest], encoding: Encoding, say: Say
) -> Iterator[tuple[RequestKey, Continuation, RequestRow]]:
    """Yield (key, continuation for the engine, row without its score) of each request or window."""
    if members[0].key.kind == "loglikelihood":
        texts = [one.request.args for one in members]
        pairs = encode_pairs(encoding, texts, lambda index: label_of(members[index].request), say)
        for (key, request, digest), pair in zip(members, pairs, strict=True):
            continuation = Continuation(pair.context, pair.continuation, label_of(request), owner_of(request), key.task)
            yield key, continuation, _row(key, digest, 1, len(pair.context), len(pair.continuation), pair.cut)
        return
    for key, request, digest in members:
        label = label_of(request)
        parts = windows(encoding, request.args[0], label)
        for part, (context, scored) in enumerate(parts):
            window_key = key._replace(part=part)
            row = _row(window_key, digest, len(parts), len(context), len(scored))
            yield window_key, Continuation(context, scored, f"{label}, window {part}", window_key), row


def _to_score(
    members: Sequence[LMEvalRequest],
    facts: RequestFacts,
    encoding: Encoding,
    finished: FinishedRows,
    budget: int | None,
    say: Say,
) -> Iterator[Batch]:
    """Yield the unfinished batches of a task whose requests are scored."""
    task, journal = members[0].key.task, members[0].key.journal
    found = list(continuations_of(members, encoding, say))
    scored = {_whole(key) for key, _, _ in found}
    if empty := [one for one in members if one.key not in scored]:
        rows = [_row(one.key, one.digest, 0)._replace(likelihood=0.0) for one in empty]
        if unanswered(finished, empty):
            yield Batch(task, EMPTY_TEXTS, rows, *_extent(empty), journal)
    items, numbers = items_of([continuation for _, continuation, _ in found])
    if items and facts.shares and budget == facts.token_budget:
        pack.check_budget(items, budget)
    work = {one.key: work_of(one.request) for one in members}

    def done(batch: pack.TreeBatch) -> bool:
        return all(
            journal_key(found[n][0], found[n][2].digest) in finished
            for item in batch.items
            for n in numbers[item.index]
        )

    for number, batch in enumerate(pack.plan(items, facts.token_budget)):
        if done(batch):
            continue
        rows_of = {item.index: [found[n][2] for n in numbers[item.index]] for item in batch.items}
        fresh = [
            (key, row)
            for item in batch.items
            for key, _, row in (found[n] for n in numbers[item.index])
            if journal_key(key, row.digest) not in finished
        ]
        amount = sum(work[_whole(key)] / max(row.parts, 1) for key, row in fresh)
        documents = len({key.doc_id for key, _ in fresh})
        yield Batch(task, number, ScoringContent(batch, rows_of), amount, documents, journal)


def _to_generate(
    members: Sequence[LMEvalRequest], facts: RequestFacts, encoding: Encoding, finished: FinishedRows
) -> Iterator[Batch]:
    """Yield the unfinished batches of a task whose requests generate text."""
    task, journal = members[0].key.task, members[0].key.journal
    assert facts.texts is not None
    prompts = prompts_of([(one.key, one.request.args) for one in members], encoding, facts.texts)
    missing = {one.key for one in unanswered(finished, members)}
    for number, batch in enumerate(facts.texts.capacity.batches(prompts)):
        batch_requests = [members[prompt.index] for prompt in batch]
        if fresh := [one for one in batch_requests if one.key in missing]:
            rows = [
                _row(one.key, one.digest, 1, len(prompt.tokens))
                for one, prompt in zip(batch_requests, batch, strict=True)
            ]
            yield Batch(task, number, GenerationContent(batch, rows), *_extent(fresh), journal)


def _row(key: RequestKey, digest: str, parts: int, context: int = 0, continuation: int = 0, cut: int = 0) -> RequestRow:
    identity = (key.doc_id, key.number, key.part)
    return RequestRow(*identity, digest, parts, None, None, context, continuation, cut, None)


def _whole(key: RequestKey) -> RequestKey:
    """Return the key of the request that a window belongs to."""
    return key._replace(part=0) if key.kind == "loglikelihood_rolling" else key


def _extent(members: Sequence[LMEvalRequest]) -> tuple[float, int]:
    """Return (cost, number of documents) of requests."""
    return sum(work_of(one.request) for one in members), len({one.key.doc_id for one in members})
