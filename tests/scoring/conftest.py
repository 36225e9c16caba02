"""Tiny models, real text, and scores by a plain forward pass that shares no code with evalkit's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from evalkit.benchmarks.multiple_choice.encoded import EncodedQuestion, TokenSequence, question_rows, question_sequences
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.benchmarks.multiple_choice.templates import SEGMENTS, Part, Template, load_template
from evalkit.models.loading.load import LoadedModel
from evalkit.runs.score_table import ScoreRow
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import batches_of
from evalkit.scoring.sequences import Sequences
from tests.models.loading import load_folder
from tests.questions import question
from tests.tiny import Family, tiny_checkpoint

ALL = frozenset(range(len(SEGMENTS)))
PASSAGE = "The river rose in the night, and in the morning the bridge was gone. Der Fluss stieg über Nacht. "
JOINED = Template(
    "joined", "", "always", True, "", SEGMENTS, (Part("context", "{context}"), Part("continuation", "{continuation}"))
)
"""No gap: choices tokenise into their context."""

Place = tuple[str, int, int]


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
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadedModel]:
    """Load a tiny checkpoint of a family; its files are written once. `spread` is of its weights."""
    folders: dict[tuple[Family, float], Path] = {}

    def model(family: Family = "llama", spread: float = 0.2, **options: Any) -> LoadedModel:
        if (family, spread) not in folders:
            folders[family, spread] = tiny_checkpoint(tmp_path_factory.mktemp(family), family, spread=spread)
        return load_folder(folders[family, spread], **options)

    return model


def encode(
    loaded: LoadedModel, template: Template | None = None, unconditional: bool = False, asked: Sequence[Question] = ()
) -> list[EncodedQuestion]:
    prompter = Prompter(template or load_template("inst"), loaded.tokenizer, loaded.window)
    return list(prompter.encode(asked or questions(), unconditional))


def items_of(encoded: Sequence[EncodedQuestion], scored: frozenset[int] = ALL) -> Sequences:
    return question_sequences(encoded, scored)


def score(
    engine: Engine, encoded: Sequence[EncodedQuestion], scored: frozenset[int] = ALL, budget: int | None = None
) -> dict[Place, ScoreRow]:
    """The score table by (subtask, document, choice)."""
    rows = [
        row
        for batch in batches_of(items_of(encoded, scored), budget or engine.budget)
        for item, scores in engine.score(batch)
        for row in question_rows(encoded[item], scores, scored)
    ]
    table = {(row.subtask, row.doc_id, row.choice): row for row in rows}
    assert len(table) == len(rows) == sum(len(e.sequences) for e in encoded)
    return table


@torch.inference_mode()
def by_itself(model: Any, sequence: TokenSequence) -> dict[str, tuple[float, int]]:
    """(log-likelihood, tokens) of each segment from one plain forward pass over one sequence."""
    tokens = torch.from_numpy(sequence.tokens).long().to(model.device)
    logs = model(input_ids=tokens[None]).logits[0].float().log_softmax(-1)
    sums = dict.fromkeys(SEGMENTS, (0.0, 0))
    for at in range(1, len(tokens)):
        name = SEGMENTS[sequence.segments[at]]
        total, count = sums[name]
        sums[name] = (total + float(logs[at - 1, tokens[at]]), count + 1)
    return sums


def largest_difference(
    model: Any, encoded: Iterable[EncodedQuestion], table: dict[Place, ScoreRow], scored: frozenset[int] = ALL
) -> float:
    """Largest relative difference of a segment's log-likelihood from `by_itself`; counts must be the same."""
    largest = 0.0
    for one in encoded:
        for choice, sequence in enumerate(one.sequences):
            row = table[one.question.subtask, one.question.doc_id, choice]
            for code, (segment, (ll, count)) in enumerate(by_itself(model, sequence).items()):
                assert getattr(row, f"n_{segment}") == count
                found = getattr(row, f"ll_{segment}")
                assert (found is None) == (code not in scored)
                if found is not None:
                    largest = max(largest, relative(found, ll))
            if one.unconditional:
                assert row.ll_unconditional is not None
                ll, _ = by_itself(model, one.unconditional[choice])["continuation"]
                largest = max(largest, relative(row.ll_unconditional, ll))
    return largest


def relative(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected) if expected else abs(found)


def largest_between(one: dict[Place, ScoreRow], other: dict[Place, ScoreRow]) -> float:
    """Largest relative difference of two tables; everything but log-likelihoods must be equal."""
    assert one.keys() == other.keys()
    largest = 0.0
    for place, row in one.items():
        for name, a, b in zip(ScoreRow._fields, row, other[place], strict=True):
            if name.startswith("ll_") and a is not None and b is not None:
                largest = max(largest, relative(a, b))
            else:
                assert a == b, (place, name)
    return largest
