"""Token sequences whose attention is analysed, and what they cost. In: a plan and a tokenizer. Out: batches of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.attention.categories import BOS, Tagger, categories_of, load_tagger, tagged_texts
from evalkit.benchmarks.attention.categories import SPECIAL as SPECIAL_TOKEN
from evalkit.benchmarks.attention.groups import MASS, RANK, RANKED_LAYERS, chosen_layers
from evalkit.benchmarks.attention.plan import TEXT, AttentionPlan, key_of, work_of
from evalkit.benchmarks.base import Batch, Batches, Planned
from evalkit.benchmarks.multiple_choice.encoded import CONTINUATION, END, SPECIAL
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.request import TaskTokens, spread
from evalkit.data.sampling import DocumentSample
from evalkit.display import Say
from evalkit.errors import ScoringError
from evalkit.inputs.values import check_text
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import config_of, window_of

if TYPE_CHECKING:
    from evalkit.benchmarks.attention.computing import AttentionFacts
    from evalkit.benchmarks.multiple_choice.tasks import Question
    from evalkit.runs.journal import FinishedRows


_BATCH = 4
"""Documents of a batch."""
_MARKERS = frozenset({SPECIAL, END})
_SIZES = (64, 256, 1024)
"""Tokens of the maps whose singular values are timed."""


@dataclass(frozen=True)
class AnalysedSequence:
    """A sequence with what the measures need to know of its tokens. Of a text, its window's number is its document."""

    subtask: str
    doc_id: int
    """With `subtask` and `choice`, identifies it in its task."""
    choice: int
    """Number of the continuation; 0 of a text."""
    cluster: int
    """See `AttentionRow`."""
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


def planned_batches(
    plan: AttentionPlan, facts: AttentionFacts, tokenizer: Any, finished: FinishedRows, say: Say
) -> Planned:
    """Plan the batches of the documents that have no rows; work is counted in characters, of a text in tokens."""
    work = plan.work
    if plan.choices is None:
        work = {(TEXT, TEXT, number): len(tokens) for number, tokens, _ in _windows(plan, facts.window, tokenizer)}
    done = sum(size for key, size in work.items() if key in finished)
    return Planned(batches_of(plan, facts.window, tokenizer, finished, say), sum(work.values()), done)


def batches_of(plan: AttentionPlan, window: int, tokenizer: Any, finished: FinishedRows, say: Say) -> Batches:
    """Yield the batches that have documents without rows, task by task."""
    tagger = load_tagger(say) if MASS in plan.groups else None
    if plan.choices is None:
        for number, tokens, characters in _windows(plan, window, tokenizer):
            if (TEXT, TEXT, number) not in finished:
                sequence = _window_sequence(plan, number, tokens, characters, tagger, tokenizer)
                yield Batch(TEXT, number, (sequence,), float(len(sequence.tokens)), 1)
        return
    prompter = Prompter(plan.choices.template, tokenizer, window - 1, say, characters=True)
    for task, questions in plan.questions.items():
        for number, start in enumerate(range(0, len(questions), _BATCH)):
            members = questions[start : start + _BATCH]
            # A finished batch is left out as a whole: the others' numbers stay the same
            if any(key_of(question) not in finished for question in members):
                content = tuple(sequences_of(plan, prompter, members, tagger, tokenizer.bos_token_id))
                yield Batch(task, number, content, float(sum(map(work_of, members))), len(members))


def sequences_of(
    plan: AttentionPlan, prompter: Prompter, questions: Sequence[Question], tagger: Tagger | None, bos: int | None
) -> Iterator[AnalysedSequence]:
    """Yield the sequences of documents: of the gold choice, or of every choice."""
    every = plan.request.continuation == "all"
    chosen = [
        (question, choice)
        for question in questions
        for choice in (range(len(question.contexts)) if every else (question.gold,))
    ]
    alone = [_with_choice(question, choice) for question, choice in chosen]
    rendered = [[(code in _MARKERS, text) for code, text in prompter.render(question, 0)] for question in alone]
    words = None if tagger is None else tagger(chain(*map(tagged_texts, rendered)))
    for (question, choice), pieces, encoded in zip(chosen, rendered, prompter.encode(alone), strict=True):
        [sequence] = encoded.sequences
        tokens, characters = sequence.tokens, sequence.characters
        # BOS is added as an id, or written by a chat template
        has_bos = bos is not None and int(tokens[0]) == bos
        categories = None
        if words is not None and characters is not None:
            # Tokens that are added as ids are BOS or special
            in_text = characters[:, 0] >= 0
            categories = np.full(len(tokens), SPECIAL_TOKEN, np.int8)
            categories[in_text] = categories_of(pieces, characters[in_text], words.__getitem__)
            if has_bos:
                categories[0] = BOS
        readers = np.flatnonzero(sequence.segments == CONTINUATION)
        about = question.subtask, question.doc_id, choice, question.cluster
        yield AnalysedSequence(*about, tokens, readers, has_bos, sequence.truncated, categories)


def _with_choice(question: Question, choice: int) -> Question:
    """Return a question with one choice only."""
    only = slice(choice, choice + 1)
    parts = {name: getattr(question, name)[only] for name in ("contexts", "continuations", "gaps", "choices")}
    return replace(question, **parts, gold=0)


def _windows(
    plan: AttentionPlan, window: int, tokenizer: Any
) -> list[tuple[int, NDArray[np.int32], NDArray[np.int32]]]:
    """Return (number, tokens, their characters) of the sampled windows of a text, which do not overlap, without BOS.

    A last window that is shorter is left out, unless it is the only one.
    """
    check_text(plan.text, f"--text {plan.request.text}")
    encoding = tokenizer(plan.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens = np.asarray(encoding["input_ids"], np.int32)
    if len(tokens) < 2:
        raise ScoringError(f"--text {plan.request.text}: has {len(tokens)} tokens; give a longer text")
    characters = np.asarray(encoding["offset_mapping"], np.int32).reshape(-1, 2)
    size = window - (tokenizer.bos_token_id is not None)
    sample = DocumentSample(plan.request.sample, plan.request.seed)
    numbers = sample.places(TEXT, [TEXT] * max(1, len(tokens) // size))
    spans = ((number, slice(number * size, (number + 1) * size)) for number in numbers)
    return [(number, tokens[span], characters[span]) for number, span in spans]


def _window_sequence(
    plan: AttentionPlan,
    number: int,
    tokens: NDArray[np.int32],
    characters: NDArray[np.int32],
    tagger: Tagger | None,
    tokenizer: Any,
) -> AnalysedSequence:
    bos: int | None = tokenizer.bos_token_id
    added = [] if bos is None else [bos]
    categories = None
    if tagger is not None:
        first, last = int(characters[0, 0]), int(characters[-1, 1])
        pieces = [(False, plan.text[first:last])]
        categories = categories_of(pieces, characters - first, tagger(tagged_texts(pieces)).__getitem__)
        categories[np.isin(tokens, tokenizer.all_special_ids)] = SPECIAL_TOKEN
        categories = np.concatenate(([BOS] * len(added), categories)).astype(np.int8)
    tokens = np.concatenate((added, tokens)).astype(np.int32)
    return AnalysedSequence(TEXT, number, 0, number, tokens, np.arange(1, len(tokens)), bos is not None, 0, categories)


def task_costs(plan: AttentionPlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
    """Estimate the costs of each task from at most `sample` of its documents; a text's tokens are counted."""
    window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
    if plan.choices is None:
        window = min(window, plan.manifest["specification"].get("window", window))
        lengths = [len(tokens) for _, tokens, _ in _windows(plan, window, tokenizer)]
        return [_costs(plan, TEXT, lengths, len(lengths), len(lengths))]
    prompter = Prompter(plan.choices.template, tokenizer, window - 1, say)
    costs = []
    for task, questions in plan.questions.items():
        sampled = [questions[place] for place in spread(len(questions), sample)]
        sequences = sequences_of(plan, prompter, sampled, None, tokenizer.bos_token_id)
        lengths = [len(sequence.tokens) for sequence in sequences]
        costs.append(_costs(plan, task, lengths, len(questions), len(sampled)))
    return costs


def _costs(plan: AttentionPlan, task: str, lengths: Sequence[int], documents: int, sampled: int) -> TaskTokens:
    """Return the costs of a task, of whose documents the sampled ones have sequences of these lengths, in tokens."""
    scale, seconds = documents / sampled, 0.0
    config, requested = config_of(plan.checkpoint, silent), plan.manifest["specification"]["layers"]
    # 1 where the config does not say
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    read = len(chosen_layers(requested, range(layers))) if isinstance(layers, int) and layers > 0 else 1
    if RANK in plan.groups:
        ranked = read if requested else min(read, RANKED_LAYERS)
        seconds = scale * ranked * (heads if isinstance(heads, int) else 1) * float(np.sum(_rank_seconds(lengths)))
    tokens = scale * sum(lengths)
    return TaskTokens(task, documents, sampled, scale * len(lengths), tokens, tokens, seconds=seconds)


def _rank_seconds(lengths: Sequence[int]) -> np.ndarray:
    """Return the time of the singular values of one map of each length, from times of three lengths."""
    sizes = np.log(_SIZES)
    within = np.interp(np.log(lengths), sizes, np.log([_timed(size) for size in _SIZES]))
    beyond = 3 * np.maximum(np.log(lengths) - sizes[-1], 0.0)
    return np.asarray(np.exp(within + beyond))


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
