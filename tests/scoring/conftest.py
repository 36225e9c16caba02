"""Tiny models, real text, and scores by a plain forward pass that shares no code with evalkit's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from evalkit.models.loading.load import LoadedModel
from evalkit.requests.encoded import EncodedDocuments, scored_rows
from evalkit.requests.requests import Encoder, Facts, Score, ScoreDocument
from evalkit.requests.rows import ScoredRow
from evalkit.scoring.engine import Engine
from evalkit.scoring.forward import Forward
from evalkit.scoring.pack import Sequences, SequenceSet, batches_of
from evalkit.scoring.tree import Tree
from evalkit.suites.choice_requests import ChoiceRequests
from evalkit.suites.questions import Question
from evalkit.suites.templates import SEGMENTS, Part, Template, load_template
from tests.models.loading import load_folder
from tests.questions import question
from tests.tiny import Family, tiny_checkpoint

PASSAGE = "The river rose in the night, and in the morning the bridge was gone. Der Fluss stieg über Nacht. "
JOINED = Template(
    "joined", "", "always", True, "", SEGMENTS, (Part("context", "{context}"), Part("continuation", "{continuation}"))
)
"""No gap: choices tokenise into their context."""
TEMPLATES = {"inst": load_template("inst"), "plain": load_template("plain"), "joined": JOINED}
RELATIVE = 1e-4
"""Largest difference of a log-likelihood in float32: sums of the same numbers in another order."""
BUDGET = 512

Key = tuple[str, int]
"""A document and its choice; after the choices come those without the question."""
Tiny = Callable[..., LoadedModel]


def questions() -> list[Question]:
    """Ragged lengths, two to five choices, one-token and repeated choices, shared passages, twins, subjects."""
    asked = [
        ("ice and wa", ["ter rose", "y", "ll", "s", "ter"]),
        ("Why does ice float on water?", ["Ice is less dense than the water below it.", "It is cold."]),
        ("Why does ice float on water", ["!", "? It is cold.", "? It is old, and niemand hörte das Geräusch."]),
        (PASSAGE + "Question: Was the bridge gone?", ["no", "yes"]),
        (PASSAGE + "Question: Did the river rise?", ["no", "yes"]),
        (PASSAGE + "Question: Was it morning?", ["no", "yes", "no"]),
        (["Ann gave Eve the coat that Ann", "Ann gave Eve the coat that Eve"], ["had worn.", "had worn."]),
        (["Ann gave Eve the coat that Eve", "Ann gave Eve the coat that Ann"], ["wanted.", "wanted."]),
        ("夜里河水上涨，清晨时", ["桥已经不见了。", "🌊", "मोर", "في الصباح"]),
        ("A", ["B", "C"]),
    ]
    return [
        question(context, choices, doc_id=i, subtask=f"subject_{i % 2}") for i, (context, choices) in enumerate(asked)
    ]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Load a tiny checkpoint of a family; its files are written once. `spread` is of its weights."""
    folders: dict[tuple[Family, float], Path] = {}

    def model(family: Family = "llama", spread: float = 0.2, **options: Any) -> LoadedModel:
        if (family, spread) not in folders:
            folders[family, spread] = tiny_checkpoint(tmp_path_factory.mktemp(family), family, spread=spread)
        return load_folder(folders[family, spread], **options)

    return model


def encode(
    loaded: LoadedModel, template: Template | None = None, unconditional: bool = False, asked: Sequence[Question] = ()
) -> list[ScoreDocument]:
    requests = ChoiceRequests(
        "made_up", template or TEMPLATES["inst"], asked or questions(), "", (), unconditional=unconditional
    )
    return list(requests.scored(Encoder(loaded.tokenizer, Facts(loaded.window))))


def sequences_of(documents: Iterable[ScoreDocument]) -> Sequences:
    return EncodedDocuments.of(documents).sequences


def score(engine: Engine, documents: Sequence[ScoreDocument], budget: int | None = None) -> dict[Key, ScoredRow]:
    encoded = EncodedDocuments.of(documents)
    rows = [
        row
        for batch in batches_of(encoded.sequences, budget or engine.budget)
        for item, scores in engine.score(batch)
        for row in scored_rows(encoded.head(item), scores)
    ]
    table = {(row.document, row.choice): row for row in rows}
    assert len(table) == len(rows) == sum(len(document.scores) for document in documents)
    return table


@torch.inference_mode()
def by_itself(model: Any, sequence: Score) -> dict[int, tuple[float, int]]:
    """(log-likelihood, tokens) of each segment from one plain forward pass over one sequence."""
    tokens = torch.from_numpy(sequence.tokens).long().to(model.device)
    logs = model(input_ids=tokens[None]).logits[0].float().log_softmax(-1)
    sums = dict.fromkeys(range(len(SEGMENTS)), (0.0, 0))
    for at in range(1, len(tokens)):
        total, count = sums[int(sequence.segments[at])]
        sums[int(sequence.segments[at])] = (total + float(logs[at - 1, tokens[at]]), count + 1)
    return sums


def largest_difference(
    model: Any, documents: Iterable[ScoreDocument], table: dict[Key, ScoredRow], template: Template
) -> float:
    """Largest relative difference of a segment's log-likelihood from `by_itself`; counts must be the same."""
    largest = 0.0
    choices = {asked.identity: len(asked.choices) for asked in questions()}
    for document in documents:
        for sequence in document.scores:
            row = table[document.document, sequence.choice]
            is_asked = sequence.choice < choices[document.document]
            scored = template.score if is_asked else ("continuation",)
            for code, (expected, count) in by_itself(model, sequence).items():
                tokens, likelihood = row.of(code)
                assert tokens == count
                assert (likelihood is None) == (SEGMENTS[code] not in scored or not count)
                if likelihood is not None:
                    largest = max(largest, abs(likelihood - expected) / max(1e-9, abs(expected)))
    return largest


# Models of any type without files

VOCABULARY = 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def model_of(kind: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SHAPE | settings))
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def with_choices(
    lengths: Iterable[int], endings: Iterable[int] = (1, 7, 19), prefix: int = 30, vocabulary: int = VOCABULARY
) -> Sequences:
    """One item for each length of its context, which follows a common prefix; choices of given lengths."""
    dice = np.random.default_rng(0)
    instruction, items = dice.integers(0, vocabulary, prefix), []
    for length in lengths:
        context = np.concatenate((instruction, dice.integers(0, vocabulary, length)))
        sequences = [np.concatenate((context, dice.integers(0, vocabulary, n))).astype(np.int32) for n in endings]
        masks = [np.arange(len(sequence)) >= len(context) for sequence in sequences]
        items.append(SequenceSet(f"document {len(items)}", "task", sequences, masks))
    return Sequences.of(items)


def sums_of(engine: Engine, sequences: Sequences, budget: int | None = None) -> dict[str, list[float]]:
    """The log-likelihood of each choice, by the item's label."""
    return {
        item.label: [
            float(scores.logprobs[mask].sum(dtype=np.float64))
            for mask, scores in zip(item.is_scored, members, strict=True)
        ]
        for batch in batches_of(sequences, budget or engine.budget)
        for item, (_, members) in zip(batch.sets, engine.score(batch), strict=True)
    }


def from_alone(engine: Engine, model: Any, sequences: Sequences, budget: int | None = None) -> float:
    """Largest difference of a choice's log-likelihood from the model's own pass; relative, or in nats below 1."""
    alone, sums, gaps = Forward(model), sums_of(engine, sequences, budget), []
    for item in (sequences[number] for number in range(len(sequences))):
        for tokens, mask, score in zip(item.sequences, item.is_scored, sums[item.label], strict=True):
            expected = float(alone.score_alone(tokens).logprobs[mask].sum(dtype=np.float64))
            gaps.append(abs(score - expected) / max(1.0, abs(expected)))
    return max(gaps)


class Scarce:
    """Memory for so many tokens of a batch, and no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int, method: str = "score") -> None:
        self.refused = 0
        real = getattr(Forward, method)

        def forward(own: Forward, tree: Tree, trunk: Any) -> Any:
            if len(tree.tokens) > tokens:
                self.refused += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return real(own, tree, trunk)

        monkeypatch.setattr(Forward, method, forward)
