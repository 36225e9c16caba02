"""Token sequences whose attention is analysed. In: a plan and a tokenizer. Out: `AnalysedSequence`s, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.attention.categories import BOS, CachedTagger, categories_of, load_tagger, tagged_texts
from evalkit.benchmarks.attention.categories import SPECIAL as SPECIAL_TOKEN
from evalkit.benchmarks.attention.groups import MASS, MEASURES, RANK, RANKED_LAYERS, chosen_layers
from evalkit.benchmarks.attention.plan import TEXT, AttentionPlan
from evalkit.benchmarks.base import Batch, Batches
from evalkit.benchmarks.multiple_choice.encoded import CONTINUATION, END, SPECIAL, TokenSequence
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.request import TaskTokens, spread
from evalkit.data.sampling import DocumentSample
from evalkit.display import Say
from evalkit.errors import ScoringError
from evalkit.inputs.values import check_text
from evalkit.models.locate import silent
from evalkit.models.spec import config_of, window_of

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


_VALUE_BYTES = 22
"""Bytes of a value in journal and tables together: of runs of all measures."""
_SIZES = (64, 256, 1024)
"""Tokens of the maps whose singular values are timed."""


def task_costs(plan: AttentionPlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
    """Estimate the costs of each task from at most `sample` of its documents; a text's tokens are counted.

    Raises:
        EvalkitError: the window is unknown, the text has no tokens, or the model lacks a requested layer.
    """
    window, heads = window_of(plan.request.model, plan.checkpoint, tokenizer, say), _heads(plan)
    if plan.choices is None:
        window = min(window, plan.manifest["specification"].get("window", window))
        lengths = list(text_work(plan, window, tokenizer).values())
        return [_costs(plan, heads, TEXT, lengths, 1.0, len(lengths), len(lengths))]
    prompter = Prompter(plan.choices.template, tokenizer, window - 1, say)
    found = []
    for task, questions in plan.questions.items():
        taken = [questions[place] for place in spread(len(questions), sample)]
        lengths = [len(one.tokens) for one in sequences_of(plan, prompter, taken, None, tokenizer.bos_token_id)]
        found.append(_costs(plan, heads, task, lengths, len(questions) / len(taken), len(questions), len(taken)))
    return found


def _costs(
    plan: AttentionPlan,
    shape: tuple[int, int],
    task: str,
    lengths: Sequence[int],
    scale: float,
    documents: int,
    sampled: int,
) -> TaskTokens:
    """Return the costs of a task whose sampled sequences have these lengths, in tokens."""
    groups = plan.manifest["specification"]["measures"]
    layers, heads = shape
    tokens = scale * sum(lengths)
    measures = sum(info.group in groups for info in MEASURES.values())
    seconds = 0.0
    if RANK in groups:
        ranked = layers if plan.request.layers else min(layers, RANKED_LAYERS)
        seconds = scale * ranked * heads * float(np.sum(_rank_seconds(lengths)))
    return TaskTokens(
        task,
        documents,
        sampled,
        rows=scale * len(lengths),
        alone=tokens,
        distinct=tokens,
        row_bytes=float(layers * heads * measures * _VALUE_BYTES),
        seconds=seconds,
    )


def _heads(plan: AttentionPlan) -> tuple[int, int]:
    """Return the layers that are read, and the heads of each; 1 where the config does not say.

    Raises:
        UsageError: a layer is requested that the model does not have.
    """
    config = config_of(plan.checkpoint, silent)
    layers, heads = (config.get(name) for name in ("num_hidden_layers", "num_attention_heads"))
    requested = plan.manifest["specification"]["layers"]
    read = len(chosen_layers(requested, range(layers))) if isinstance(layers, int) and layers > 0 else 1
    return read, heads if isinstance(heads, int) else 1


def _rank_seconds(lengths: Sequence[int]) -> np.ndarray:
    """Return the time of the singular values of one map of each length, from times of three lengths."""
    sizes = np.log(_SIZES)
    found = np.interp(np.log(lengths), sizes, np.log([_timed(size) for size in _SIZES]))
    beyond = 3 * np.maximum(np.log(lengths) - sizes[-1], 0.0)
    return np.asarray(np.exp(found + beyond))


@cache
def _timed(size: int) -> float:
    """Return the seconds of a map's singular values, the faster of two."""
    import torch

    seen, times = torch.rand(size, size).tril(), []
    for _ in range(2):
        started = time.perf_counter()
        torch.linalg.svdvals(seen)
        times.append(time.perf_counter() - started)
    return min(times)
