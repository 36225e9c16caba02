"""lm-eval's requests as batches: what is scored shares its prefixes, and so do the prompts of what is
generated.

The batches are the same whatever the journal holds, less those that are done: after any number of kills the answers
are those of an undisturbed run, bit for bit on the same machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from evalkit.benchmarks.base import Batch, Batches, Say
from evalkit.benchmarks.lm_eval.encoding import Encoding, encode_pairs, windows
from evalkit.benchmarks.lm_eval.requests import (
    LMEvalRequest,
    RequestKey,
    RequestRow,
    key_of,
    label_of,
    owner_of,
    unanswered,
    work_of,
)
from evalkit.benchmarks.lm_eval.scoring import Wanted, items_of
from evalkit.benchmarks.lm_eval.texts import TextFacts, prompts_of
from evalkit.generation.prompts import Prompt
from evalkit.runs.finished_rows import FinishedRows
from evalkit.scoring import pack
from evalkit.scoring.prefetch import prefetched

EMPTY = -1
"""Number of the batch of a task's empty texts, which have no token to score."""


@dataclass(frozen=True)
class RequestFacts:
    """What planning needs to know of a model that lm-eval asks."""

    token_budget: int
    """Most tokens of a batch that is scored."""
    shares: bool
    """Whether sequences share their prefixes."""
    window: int
    prefix_id: int
    """The token in front of a text without context."""
    prefix_text: str
    texts: TextFacts | None
    """None: no text is generated."""


@dataclass(frozen=True)
class ToScore:
    """Content of a batch that is scored."""

    batch: pack.TreeBatch
    rows: dict[int, list[RequestRow]]
    """Item → a row for each of its sequences, without the scores."""


@dataclass(frozen=True)
class ToGenerate:
    """Content of a batch of texts."""

    prompts: list[Prompt]
    rows: list[RequestRow]
    """One for each, without the text."""


def batches_of(
    asked: dict[str, list[LMEvalRequest]],
    facts: RequestFacts,
    tokenizer: Any,
    finished: FinishedRows,
    budget: int | None,
    say: Say,
) -> Batches:
    """The batches of all requests that are not answered.

    Args:
        asked: see `asked_of`.
        facts: of the model.
        tokenizer: of the model.
        finished: what the journal holds.
        budget: that the user gave, if any.
        say: told once of continuations that were encoded by themselves.
    """
    encoding = Encoding(tokenizer, facts.prefix_id, facts.prefix_text, facts.window)
    for members in asked.values():
        if not unanswered(finished, members):
            continue
        if members[0].place.kind == "generate_until":
            yield from _to_generate(members, facts, encoding, finished)
        else:
            yield from _to_score(members, facts, encoding, finished, budget, say)


def wanted_of(
    members: Sequence[LMEvalRequest], encoding: Encoding, say: Say
) -> Iterator[tuple[RequestKey, Wanted, RequestRow]]:
    """(place, what the engine is asked, the row but for its score) of each request or window."""
    if members[0].place.kind == "loglikelihood":
        texts = [one.request.args for one in members]
        pairs = encode_pairs(encoding, texts, lambda index: label_of(members[index].request), say)
        for (place, request, digest), pair in zip(members, pairs, strict=True):
            wanted = Wanted(pair.context, pair.continuation, label_of(request), owner_of(request), place.task)
            yield place, wanted, _row(place, digest, 1, len(pair.context), len(pair.continuation), pair.cut)
        return
    for place, request, digest in members:
        label = label_of(request)
        found = windows(encoding, request.args[0], label)
        for part, (context, continuation) in enumerate(found):
            own = place._replace(part=part)
            row = _row(own, digest, len(found), len(context), len(continuation))
            yield own, Wanted(context, continuation, f"{label}, window {part}", own), row


def _to_score(
    members: Sequence[LMEvalRequest],
    facts: RequestFacts,
    encoding: Encoding,
    finished: FinishedRows,
    budget: int | None,
    say: Say,
) -> Iterator[Batch]:
    """What is missing of a task, and with it what shares its batches."""
    task, journal = members[0].place.task, members[0].place.journal
    found = list(wanted_of(members, encoding, say))
    scored = {_whole(place) for place, _, _ in found}
    if empty := [one for one in members if one.place not in scored]:
        rows = [_row(one.place, one.digest, 0)._replace(likelihood=0.0) for one in empty]
        if unanswered(finished, empty):
            yield Batch(task, EMPTY, rows, *_extent(empty), journal)
    items, numbers = items_of([wanted for _, wanted, _ in found])
    if items and facts.shares and budget == facts.token_budget:
        pack.check_budget(items, budget)
    work = {one.place: work_of(one.request) for one in members}

    def done(batch: pack.TreeBatch) -> bool:
        return all(
            key_of(found[n][0], found[n][2].digest) in finished for item in batch.items for n in numbers[item.index]
        )

    for number, batch in prefetched(pack.plan(items, facts.token_budget), done):
        rows_of = {item.index: [found[n][2] for n in numbers[item.index]] for item in batch.items}
        fresh = [
            (place, row)
            for item in batch.items
            for place, _, row in (found[n] for n in numbers[item.index])
            if key_of(place, row.digest) not in finished
        ]
        amount = sum(work[_whole(place)] / max(row.parts, 1) for place, row in fresh)
        documents = len({place.doc_id for place, _ in fresh})
        yield Batch(task, number, ToScore(batch, rows_of), amount, documents, journal)


def _to_generate(
    members: Sequence[LMEvalRequest], facts: RequestFacts, encoding: Encoding, finished: FinishedRows
) -> Iterator[Batch]:
    """Prompts that begin alike or are of like length, as many as memory holds."""
    task, journal = members[0].place.task, members[0].place.journal
    assert facts.texts is not None
    prompts = prompts_of([(one.place, one.request.args) for one in members], encoding, facts.texts)
    left = {one.place for one in unanswered(finished, members)}
    for number, batch in enumerate(facts.texts.capacity.batches(prompts)):
        asked = [members[prompt.index] for prompt in batch]
        if fresh := [one for one in asked if one.place in left]:
            rows = [
                _row(one.place, one.digest, 1, len(prompt.tokens)) for one, prompt in zip(asked, batch, strict=True)
            ]
            yield Batch(task, number, ToGenerate(batch, rows), *_extent(fresh), journal)


def _row(
    place: RequestKey, digest: str, parts: int, context: int = 0, continuation: int = 0, cut: int = 0
) -> RequestRow:
    where = (place.doc_id, place.number, place.part)
    return RequestRow(*where, digest, parts, None, None, context, continuation, cut, None)


def _whole(place: RequestKey) -> RequestKey:
    """The request that a window belongs to."""
    return place._replace(part=0) if place.kind == "loglikelihood_rolling" else place


def _extent(members: Sequence[LMEvalRequest]) -> tuple[float, int]:
    """(work, documents) of requests."""
    return sum(work_of(one.request) for one in members), len({one.place.doc_id for one in members})
