"""What an analysis of attention reads: its plan, its token sequences and what they cost. Without torch.

In: an `AttentionRequest`. Out: an `AttentionPlan` with its manifest; with a tokenizer, batches of `AnalysedSequence`s.
"""

from __future__ import annotations

import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from evalkit.attention import ATTENTION
from evalkit.attention.categories import (
    Piece,
    Tagger,
    categories_of,
    load_tagger,
    tagged_texts,
    tagger_identity,
)
from evalkit.attention.groups import GROUPS, MASS, RANK, RANKED_LAYERS, AttentionRow, chosen_layers
from evalkit.benchmarks.base import Plan
from evalkit.benchmarks.request import Request, SuiteRequest, numerics, plain_manifest
from evalkit.benchmarks.suite_plan import ChoicePlan, plan_suite
from evalkit.data.sampling import DocumentSample, spread
from evalkit.display import Say
from evalkit.errors import ScoringError, UsageError, check_known
from evalkit.inputs.reading import read_given_text
from evalkit.inputs.settings import setting
from evalkit.inputs.values import check_text, text_digest
from evalkit.models.context.extension import configured_layers
from evalkit.models.loading.locate import Checkpoint, silent
from evalkit.models.loading.spec import config_of, window_of
from evalkit.requests.batches import Batch, Batches, Planned, TaskTokens
from evalkit.runs.continuous import outcome_of
from evalkit.runs.finding import run_folder
from evalkit.runs.score_table import CONTINUATION, END, SPECIAL
from evalkit.suites.prompts import Prompter
from evalkit.suites.suites import DEFAULT_SUITE, choose_tasks, load_suite

if TYPE_CHECKING:
    from evalkit.attention.measures import AttentionFacts
    from evalkit.runs.journal import FinishedRows, Key
    from evalkit.suites.questions import Question

TEXT = "text"
"""Name of the task of a user's text, and of its template."""
VERSION = 2
"""Increased with every change of evalkit that changes a measure or a sample."""
_OF_DOCUMENTS = ("tasks", "template", "num_fewshot", "data_dir", "allow_unofficial_data")
"""Settings that a text does not have."""
MOST_LAYERS = 10_000
_BATCH = 4
_TIMED = 256
"""Tokens of the map whose singular values are timed."""


@dataclass(frozen=True)
class AttentionRequest(Request):
    """Settings of an analysis of attention."""

    measures: tuple[str, ...] = setting((), f"Of {', '.join(GROUPS)}.", "all", metavar="NAMES")
    layers: tuple[int, ...] = setting(
        (),
        "From 0, or from -1 for the last one backwards.",
        "all; rank: the last four; bos_tokens: the last",
        metavar="NUMBERS",
        least=-MOST_LAYERS,
    )
    sample: int = setting(200, "Random documents of each task, or windows of a text.", metavar="N", shows_least=True)
    seed: int = setting(0, "Seed of the random sample.", metavar="N", least=0, shows_least=True)
    continuation: Literal["gold", "all"] = setting(
        "gold", "Continuation that is read: the gold answer's, or every choice's."
    )
    questions: str | None = setting(
        None, "Suite whose documents are read.", "zeroshot8", metavar="SUITE", names="name or file"
    )
    tasks: tuple[str, ...] = setting((), "Tasks of that suite.", "all", metavar="NAMES")
    template: str | None = setting(
        None, "How prompts are written (evalkit ls templates), or a YAML file.", "inst", names="file"
    )
    num_fewshot: int | None = setting(None, "Solved examples before each question.", "0", least=0)
    data_dir: Path | None = setting(
        None, "Folder of <task>.jsonl files, searched before other sources.", names="folder"
    )
    allow_unofficial_data: bool = setting(False, "Accept documents that are not the pinned ones; results are marked.")
    text: Path | None = setting(None, "Text file to read in windows of the context, in place of the tasks' documents.")


@dataclass(frozen=True)
class AttentionPlan(Plan):
    """A validated request with its documents and manifest."""

    request: AttentionRequest
    checkpoint: Checkpoint
    manifest: dict[str, Any]
    choices: ChoicePlan | None
    """Plan of the suite whose documents are read; None for a text."""
    text: str = ""

    @property
    def tasks(self) -> Mapping[str, Sequence[Question]]:
        """Built at the first use. A text has none, since its windows are known after planning."""
        return {TEXT: ()} if self.choices is None else self.choices.questions

    @property
    def folder(self) -> Path:
        template = self.manifest["template"]["name"]
        return run_folder(self.request.output, self.checkpoint, ATTENTION, template, self.manifest)

    @property
    def work(self) -> dict[Key, int]:
        """Key of each document in the journal → its characters, and a few."""
        questions = chain.from_iterable(self.tasks.values())
        return {_key(asked): len(asked.contexts[0]) + len(asked.continuations[0]) + 4 for asked in questions}


def _key(question: Question) -> Key:
    return question.task, question.subtask, question.doc_id


def is_missing(plan: AttentionPlan, finished: FinishedRows) -> bool:
    """Return whether a document has no rows. Of a text it is true, since its windows are known after planning only."""
    return plan.choices is None or any(key not in finished for key in plan.work)


def plan_attention(request: AttentionRequest, say: Say) -> AttentionPlan:
    check_known("measure", [name for name in request.measures if name != "all"], GROUPS)
    every = not request.measures or "all" in request.measures
    groups = [name for name in GROUPS if every or name in request.measures]
    settings: dict[str, Any] = {
        "suite": ATTENTION,
        "measures": groups,
        "layers": sorted({*request.layers}),
        "sample": request.sample,
        "seed": request.seed,
        "version": VERSION,
    }
    if MASS in groups:
        settings["tagger"] = tagger_identity()
    if request.text is not None:
        return _plan_text(request, request.text, settings, say)
    suite = choose_tasks(load_suite(request.questions or DEFAULT_SUITE), request.tasks)
    shared = {name: getattr(request, name) for name in ("model", "output", "sample", "seed", *_OF_DOCUMENTS)}
    # Of documents with one gold answer the suite's own outcome is bits per byte
    rule = suite.rule if outcome_of(suite.rule or "") else "acc"
    choices = plan_suite(SuiteRequest(**shared, suite=request.questions, rule=rule), suite, say)
    _check_layers(settings["layers"], choices.checkpoint)
    of_choices = {name: value for name, value in choices.manifest["specification"].items() if name != "unconditional"}
    settings = of_choices | settings | {"questions": suite.name, "continuation": request.continuation}
    names = ("documents", "template", "labels", "short")
    more = {name: choices.manifest[name] for name in names if name in choices.manifest}
    manifest = plain_manifest(ATTENTION, request, choices.checkpoint, settings, **more)
    return AttentionPlan(request, choices.checkpoint, manifest, choices)


def _check_layers(numbers: Sequence[int], checkpoint: Checkpoint) -> None:
    """Raise a `UsageError` for a number that is beyond the layers of a checkpoint's config."""
    if not numbers or checkpoint.gguf is not None:  # a GGUF file's config is made when it is dequantised
        return
    if layers := configured_layers(checkpoint.config()):
        chosen_layers(numbers, range(layers))


def _plan_text(request: AttentionRequest, path: Path, settings: dict[str, Any], say: Say) -> AttentionPlan:
    used = [name for name in ("questions", *_OF_DOCUMENTS) if getattr(request, name)]
    if used or request.continuation != "gold":
        option = [*used, "continuation"][0].replace("_", "-")
        raise UsageError(f"--{option}: is for the documents of tasks, which a text has not; leave it out, or --text")
    _, text = read_given_text(path)
    checkpoint = request.model.locate(say)
    _check_layers(settings["layers"], checkpoint)
    digest = text_digest(text)
    settings = {**numerics(request.model, checkpoint, None, say), **settings, "documents": {TEXT: digest}}
    if request.model.context not in (None, "none"):
        # Windows may be shorter than the model's, which no extension shortens
        settings["window"] = int(request.model.context)
    source = {"source": str(path), "official": None, "count": 1, "total": 1}
    about = {"documents": {TEXT: source}, "template": {"name": TEXT}}
    manifest = plain_manifest(ATTENTION, request, checkpoint, settings, **about)
    return AttentionPlan(request, checkpoint, manifest, None, text)


@dataclass(frozen=True)
class Reading:
    """What is read of a sequence's maps."""

    categories: NDArray[np.int8] | None
    """[tokens] index into `CATEGORIES`; None: the measures of mass are not requested."""
    readers: NDArray[np.int64]
    """Positions whose rows are read for mass: the continuation's; of a text, all but the first."""
    last: int
    """Position whose row's entropy is read."""
    bos: bool
    """Whether the first token is a BOS token."""


@dataclass(frozen=True)
class AnalysedSequence(Reading):
    """A sequence of tokens and its document; of a text, the number of its window."""

    subtask: str
    doc_id: int
    choice: int
    """Number of the continuation; 0 of a text."""
    cluster: int
    """See `AttentionRow`."""
    truncated: int
    """Number of context tokens truncated to fit the window."""
    tokens: NDArray[np.int32]
    """[n] token ids, at most the context window."""


def planned_batches(
    plan: AttentionPlan, facts: AttentionFacts, tokenizer: Any, finished: FinishedRows, say: Say
) -> Planned:
    """Plan the batches of the documents that have no rows; work is counted in characters, of a text in tokens."""
    work = plan.work
    if plan.choices is None:
        windows = _windows(plan, facts.window, tokenizer)
        work = {(TEXT, TEXT, sequence.doc_id): len(sequence.tokens) for sequence, *_ in windows}
    done = sum(size for key, size in work.items() if key in finished)
    return Planned(batches_of(plan, facts.window, tokenizer, finished, say), sum(work.values()), done)


def batches_of(plan: AttentionPlan, window: int, tokenizer: Any, finished: FinishedRows, say: Say) -> Batches:
    """Yield the batches that have documents without rows, task by task."""
    tagger = load_tagger(say) if MASS in plan.manifest["specification"]["measures"] else None
    if plan.choices is None:
        for part in _windows(plan, window, tokenizer):
            if (TEXT, TEXT, part[0].doc_id) not in finished:
                [sequence] = _categorised([part], tagger)
                yield Batch(TEXT, sequence.doc_id, (sequence,), AttentionRow, float(len(sequence.tokens)), 1)
        return
    prompter, work = Prompter(plan.choices.template, tokenizer, window - 1, say, characters=True), plan.work
    for task, questions in plan.tasks.items():
        for number, start in enumerate(range(0, len(questions), _BATCH)):
            members = questions[start : start + _BATCH]
            keys = list(map(_key, members))
            # A finished batch is left out as a whole: the others' numbers stay the same
            if any(key not in finished for key in keys):
                content = tuple(sequences_of(plan, prompter, members, tagger, tokenizer.bos_token_id))
                yield Batch(task, number, content, AttentionRow, float(sum(work[key] for key in keys)), len(members))


Tokenised = tuple[AnalysedSequence, Sequence[Piece], Any]
"""A sequence without categories, the pieces of its text, and its tokens' characters, [tokens, 2]."""


def _categorised(parts: Sequence[Tokenised], tagger: Tagger | None) -> list[AnalysedSequence]:
    if tagger is None:
        return [sequence for sequence, *_ in parts]
    words = tagger(chain.from_iterable(tagged_texts(pieces) for _, pieces, _ in parts)).__getitem__
    return [
        replace(sequence, categories=categories_of(pieces, characters, words, sequence.bos))
        for sequence, pieces, characters in parts
    ]


def sequences_of(
    plan: AttentionPlan, prompter: Prompter, questions: Sequence[Question], tagger: Tagger | None, bos: int | None
) -> list[AnalysedSequence]:
    """Return the sequences of documents: of the gold choice, or of every choice."""
    every = plan.request.continuation == "all"
    chosen = [
        (question, n) for question in questions for n in (range(len(question.contexts)) if every else (question.gold,))
    ]
    fields = ("contexts", "continuations", "gaps", "choices")
    # Questions with one choice each
    alone = [
        replace(question, **{name: getattr(question, name)[n : n + 1] for name in fields}, gold=0)
        for question, n in chosen
    ]
    rendered = [[(code in (SPECIAL, END), text) for code, text in prompter.render(question, 0)] for question in alone]
    parts = []
    for (question, choice), pieces, encoded in zip(chosen, rendered, prompter.encode(alone), strict=True):
        [sequence] = encoded.sequences
        # BOS is added as an id, or written by a chat template
        has_bos = bos is not None and int(sequence.tokens[0]) == bos
        readers = np.flatnonzero(sequence.segments == CONTINUATION)
        about = question.subtask, question.doc_id, choice, question.cluster, sequence.truncated
        analysed = AnalysedSequence(None, readers, int(readers[-1]), has_bos, *about, sequence.tokens)
        parts.append((analysed, pieces, sequence.characters))
    return _categorised(parts, tagger)


def _windows(plan: AttentionPlan, window: int, tokenizer: Any) -> list[Tokenised]:
    """Return the sampled windows of a text, which do not overlap.

    A last window that is shorter is left out, unless it is the only one.
    """
    check_text(plan.text, f"--text {plan.request.text}")
    encoding = tokenizer(plan.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens = np.asarray(encoding["input_ids"], np.int32)
    if len(tokens) < 2:
        raise ScoringError(f"--text {plan.request.text}: has {len(tokens)} tokens; give a longer text")
    characters = np.asarray(encoding["offset_mapping"], np.int64).reshape(-1, 2)
    special = np.isin(tokens, tokenizer.all_special_ids)
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size = window - len(bos)
    sample = DocumentSample(plan.request.sample, plan.request.seed)
    windows: list[Tokenised] = []
    for number in sample.places(TEXT, [TEXT] * max(1, len(tokens) // size)):
        span = slice(number * size, (number + 1) * size)
        ids = np.concatenate((bos, tokens[span])).astype(np.int32)
        first, after = int(characters[span][0, 0]), int(characters[span][-1, 1])
        own = np.where(special[span, None], -1, characters[span] - first)
        spans = np.pad(own, ((len(bos), 0), (0, 0)), constant_values=-1)
        readers = np.arange(1, len(ids))
        sequence = AnalysedSequence(None, readers, len(ids) - 1, bool(bos), TEXT, number, 0, number, 0, ids)
        windows.append((sequence, [(False, plan.text[first:after])], spans))
    return windows


def task_costs(plan: AttentionPlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
    """Estimate the costs of each task from at most `sample` of its documents; a text's tokens are counted."""
    window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
    if plan.choices is None:
        window = min(window, plan.manifest["specification"].get("window", window))
        lengths = [len(sequence.tokens) - sequence.bos for sequence, *_ in _windows(plan, window, tokenizer)]
        return [_costs(plan, TEXT, lengths, len(lengths), len(lengths))]
    prompter = Prompter(plan.choices.template, tokenizer, window - 1, say)
    costs = []
    for task, questions in plan.tasks.items():
        sampled = [questions[number] for number in spread(len(questions), sample)]
        sequences = sequences_of(plan, prompter, sampled, None, tokenizer.bos_token_id)
        lengths = [len(sequence.tokens) for sequence in sequences]
        costs.append(_costs(plan, task, lengths, len(questions), len(sampled)))
    return costs


def _costs(plan: AttentionPlan, task: str, lengths: Sequence[int], documents: int, sampled: int) -> TaskTokens:
    """Costs of a task, of whose documents the sampled ones have sequences of these lengths, in tokens."""
    scale, seconds = documents / sampled, 0.0
    config, requested = config_of(plan.checkpoint, silent), plan.manifest["specification"]["layers"]
    # 1 where the config does not say
    layers, heads = configured_layers(config), config.get("num_attention_heads")
    read = len(chosen_layers(requested, range(layers))) if layers else 1
    if RANK in plan.manifest["specification"]["measures"]:
        maps = (read if requested else min(read, RANKED_LAYERS)) * (heads if isinstance(heads, int) else 1)
        # The time of a map's singular values grows with the cube of its length
        seconds = scale * maps * _timed() * sum((length / _TIMED) ** 3 for length in lengths)
    tokens = scale * sum(lengths)
    return TaskTokens(task, documents, sampled, scale * len(lengths), tokens, tokens, seconds=seconds)


@cache
def _timed() -> float:
    import torch

    seen = torch.rand(_TIMED, _TIMED).tril()
    return min(timeit.repeat(lambda: torch.linalg.svdvals(seen), number=1, repeat=2))
