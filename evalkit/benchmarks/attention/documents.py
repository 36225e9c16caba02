"""Token sequences whose attention is analysed. In: a plan and a tokenizer. Out: `AnalysedSequence`s, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evalkit.analysis.categories import BOS, categories_of, tagged_texts
from evalkit.analysis.categories import SPECIAL as SPECIAL_TOKEN
from evalkit.analysis.groups import MASS
from evalkit.analysis.tagger import CachedTagger, load_tagger
from evalkit.benchmarks.attention.plan import TEXT, AttentionPlan
from evalkit.benchmarks.base import Batch, Batches, Say
from evalkit.benchmarks.multiple_choice.encoded import CONTINUATION, END, SPECIAL, TokenSequence
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.data.sampling import DocumentSample
from evalkit.errors import ScoringError
from evalkit.inputs.texts import check_text

if TYPE_CHECKING:
    from evalkit.benchmarks.multiple_choice.tasks import Question
    from evalkit.runs.finished_rows import FinishedRows, Key

_BATCH = 4
"""Documents of a batch."""
_MARKERS = frozenset({SPECIAL, END})


@dataclass(frozen=True)
class AnalysedSequence:
    """A sequence with what the measures need to know of its tokens."""

    subtask: str
    doc_id: int
    """With `subtask` and `choice`, identifies it in its task; of a text, the number of the window."""
    choice: int
    """Number of the continuation; 0 of a text."""
    cluster: int
    """See `AttentionRow`; of a text, the number of the window."""
    tokens: NDArray[np.int32]
    """[n] token ids, at most the context window."""
    readers: NDArray[np.int64]
    """Places of the continuation's tokens; of a text, of all tokens but the first."""
    has_bos: bool
    """Whether the first token is BOS."""
    truncated: int
    """Number of context tokens truncated to fit the window."""
    categories: NDArray[np.int8] | None = None
    """[n] index into `CATEGORIES`; None unless a measure needs it."""


def batches_of(plan: AttentionPlan, window: int, tokenizer: Any, finished: FinishedRows, say: Say) -> Batches:
    """Yield the batches that have documents without rows, task by task.

    Raises:
        EvalkitError: a document does not fit the window, or its words cannot be tagged.
    """
    tagger = load_tagger(say) if MASS in plan.groups else None
    if plan.choices is None:
        yield from _text_batches(plan, window, tokenizer, tagger, finished)
        return
    prompter = Prompter(plan.choices.template, tokenizer, window - 1, say, characters=True)
    for task, questions in plan.questions.items():
        for number, start in enumerate(range(0, len(questions), _BATCH)):
            members = questions[start : start + _BATCH]
            # A finished batch is left out as a whole: the others' numbers stay the same
            if any(key_of(one) not in finished for one in members):
                content = tuple(sequences_of(plan, prompter, members, tagger, tokenizer.bos_token_id))
                yield Batch(task, number, content, float(sum(map(work_of, members))), len(members))


def sequences_of(
    plan: AttentionPlan, prompter: Prompter, questions: Sequence[Question], tagger: CachedTagger | None, bos: int | None
) -> Iterator[AnalysedSequence]:
    """Yield the sequences of documents: of the gold choice, or of every choice."""
    chosen = [(one, choice) for one in questions for choice in _choices(plan, one)]
    alone = [_with_choice(one, choice) for one, choice in chosen]
    rendered = [[(code in _MARKERS, text) for code, text in prompter.render(one, 0)] for one in alone]
    if tagger is not None:
        tagger.prepare(chain(*map(tagged_texts, rendered)))
    for (question, choice), pieces, encoded in zip(chosen, rendered, prompter.encode(alone), strict=True):
        [sequence] = encoded.sequences
        readers = np.flatnonzero(sequence.segments == CONTINUATION)
        yield AnalysedSequence(
            question.subtask,
            question.doc_id,
            choice,
            question.cluster,
            sequence.tokens,
            readers,
            _starts_with(sequence.tokens, bos),
            sequence.truncated,
            None if tagger is None else _categories(sequence, pieces, tagger, bos),
        )


def key_of(question: Question) -> Key:
    """Return a document's key in the journal."""
    return question.task, question.subtask, question.doc_id


def work_of(question: Question) -> int:
    """Return the characters of a document, which approximate its share of the time."""
    return len(question.contexts[0]) + len(question.continuations[0]) + _BATCH


def text_tokens(plan: AttentionPlan, tokenizer: Any) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the tokens of a plan's text, [n], and their characters, [n, 2].

    Raises:
        ScoringError: the text has no tokens, or is too long.
    """
    check_text(plan.text, f"--text {plan.request.text}")
    encoding = tokenizer(plan.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens = np.asarray(encoding["input_ids"], np.int32)
    if len(tokens) < 2:
        raise ScoringError(f"--text {plan.request.text}: has {len(tokens)} tokens; give a longer text")
    return tokens, np.asarray(encoding["offset_mapping"], np.int32).reshape(-1, 2)


def window_starts(plan: AttentionPlan, tokens: int, size: int) -> list[tuple[int, int]]:
    """Return (number, first token) of the sampled windows of a text, which do not overlap.

    A last window that is shorter is left out, unless it is the only one.

    Args:
        plan: the plan of a text.
        tokens: length of the text.
        size: tokens of a window.
    """
    count = max(1, tokens // size)
    sample = DocumentSample(plan.request.sample, plan.request.seed)
    return [(number, number * size) for number in sample.places(TEXT, [TEXT] * count)]


def text_work(plan: AttentionPlan, window: int, tokenizer: Any) -> dict[Key, int]:
    """Return the key of each window of a text → its tokens."""
    tokens, _ = text_tokens(plan, tokenizer)
    size = window - (tokenizer.bos_token_id is not None)
    return {(TEXT, TEXT, number): min(size, len(tokens)) for number, _ in window_starts(plan, len(tokens), size)}


def _text_batches(
    plan: AttentionPlan, window: int, tokenizer: Any, tagger: CachedTagger | None, finished: FinishedRows
) -> Batches:
    tokens, characters = text_tokens(plan, tokenizer)
    bos: int | None = tokenizer.bos_token_id
    size = window - (bos is not None)
    for number, start in window_starts(plan, len(tokens), size):
        if (TEXT, TEXT, number) in finished:
            continue
        part, spans = tokens[start : start + size], characters[start : start + size]
        categories = None
        if tagger is not None:
            first, last = int(spans[0, 0]), int(spans[-1, 1])
            categories = categories_of([(False, plan.text[first:last])], spans - first, tagger)
            categories[np.isin(part, tokenizer.all_special_ids)] = SPECIAL_TOKEN
        if bos is not None:
            part = np.concatenate(([bos], part)).astype(np.int32)
            if categories is not None:
                categories = np.concatenate(([BOS], categories)).astype(np.int8)
        readers = np.arange(1, len(part))
        one = AnalysedSequence(TEXT, number, 0, number, part, readers, bos is not None, 0, categories)
        yield Batch(TEXT, number, (one,), float(len(part)), 1)


def _choices(plan: AttentionPlan, question: Question) -> Sequence[int]:
    return range(len(question.contexts)) if plan.request.continuation == "all" else (question.gold,)


def _with_choice(question: Question, choice: int) -> Question:
    """Return a question with one choice only."""
    return replace(
        question,
        contexts=(question.contexts[choice],),
        continuations=(question.continuations[choice],),
        gaps=(question.gaps[choice],),
        choices=(question.choices[choice],),
        gold=0,
    )


def _categories(
    sequence: TokenSequence, pieces: Sequence[tuple[bool, str]], tagger: CachedTagger, bos: int | None
) -> NDArray[np.int8]:
    """Return the category of each token; tokens that are added as ids are BOS or special."""
    assert sequence.characters is not None
    added = sequence.characters[:, 0] < 0
    found = np.full(len(sequence.tokens), SPECIAL_TOKEN, np.int8)
    found[~added] = categories_of(pieces, sequence.characters[~added], tagger)
    if _starts_with(sequence.tokens, bos):
        found[0] = BOS
    return found


def _starts_with(tokens: NDArray[np.int32], bos: int | None) -> bool:
    """Return whether the first token is BOS, added as an id or written by a chat template."""
    return bos is not None and int(tokens[0]) == bos
