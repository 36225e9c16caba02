"""Shared scores equal those of each sequence alone on every kind of device, with the kernel used there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from evalkit.benchmarks.multiple_choice.encoded import EncodedQuestion
from evalkit.benchmarks.multiple_choice.templates import load_template
from evalkit.models.loading.load import LoadedModel
from evalkit.scoring.engine import Engine
from evalkit.scoring.forward import Forward
from evalkit.scoring.pack import TreeBatch, batches_of
from evalkit.scoring.sequences import Sequences, SequenceSet
from tests.devices import DEVICES, KERNELS, cuda_memory_of, most_cuda_memory
from tests.models.loading import load_folder
from tests.questions import question
from tests.scoring.conftest import JOINED, encode, items_of, largest_difference, questions, score
from tests.scoring.test_engine import Scarce
from tests.scoring.test_parity import engine_of
from tests.tiny import TRAINING_TEXT, Family, tiny_checkpoint

Tiny = Callable[..., LoadedModel]
RELATIVE = 1e-4
TILE = 128
"""Tokens of a block of FlexAttention's mask; tiles of the processor's way to attend end at multiples of 64."""
TEMPLATES = {"trunk": load_template("inst"), "no trunk": JOINED}


BUDGETS = pytest.mark.parametrize("budget", [100, 600], ids=["one tile", "several tiles"])


def encoded_for(loaded: LoadedModel, template: str, budget: int) -> list[EncodedQuestion]:
    """Questions whose batches are what the test's name says."""
    more = [
        question(line, [*TRAINING_TEXT[n : n + 2], "no"], doc_id=n, subtask="more")
        for n, line in enumerate(TRAINING_TEXT)
    ]
    encoded = encode(loaded, TEMPLATES[template], asked=[*questions(), *more])
    batches = batches_of(items_of(encoded), budget)
    assert len(batches) > 1
    assert all((len(batch.trunk) > 8) == (template == "trunk") for batch in batches)
    largest = max(len(batch.tree.tokens) for batch in batches)
    assert largest > 3 * TILE if budget > TILE else largest < 2 * TILE
    return encoded


@BUDGETS
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("family", get_args(Family))
@pytest.mark.parametrize("device", DEVICES)
def test_float32_scores_are_those_of_each_sequence_by_itself(
    tiny: Tiny, device: str, family: Family, template: str, budget: int
) -> None:
    loaded = tiny(family, device=device, dtype="float32")
    encoded = encoded_for(loaded, template, budget)
    engine = engine_of(loaded, budget)
    engine.check(items_of(encoded[:2]))
    assert (engine.shares, engine.kernel) == (True, KERNELS[device])
    assert largest_difference(loaded.model, encoded, score(engine, encoded)) <= RELATIVE


@BUDGETS
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_scores_are_as_near_to_float32_as_without_sharing(
    tiny: Tiny, device: str, template: str, budget: int
) -> None:
    """Both round to 8 bits, in another order: the mean distance, in nats a token, is the same."""
    exact, loaded = tiny(device=device, dtype="float32"), tiny(device=device, dtype="bfloat16")
    encoded = encoded_for(loaded, template, budget)
    shared, lone = engine_of(loaded, budget), engine_of(loaded, budget)
    shared.check(items_of(encoded[:2]))
    assert (shared.shares, shared.kernel) == (True, KERNELS[device])
    lone.shares = False
    reference = score(engine_of(exact, budget), encoded)
    distances = []
    for engine in (shared, lone):
        rows = score(engine, encoded)
        gaps = [abs(r.ll_continuation - reference[at].ll_continuation) / r.n_continuation for at, r in rows.items()]
        distances.append(np.array(gaps))
    by_sharing, alone = distances
    print(f"{device}, {template}: mean {by_sharing.mean():.5f} and {alone.mean():.5f} nats a token")
    assert 0 < by_sharing.mean() <= 1.5 * alone.mean()
    assert by_sharing.max() <= 2 * alone.max()


def ragged(number: int) -> Sequences:
    """So many questions of four choices, about 250 tokens each in a tree."""
    dice = np.random.default_rng(0)
    items = []
    for index in range(number):
        stem = dice.integers(1, 500, dice.integers(100, 140))
        choices = tuple(
            np.concatenate((stem, dice.integers(1, 500, dice.integers(20, 45)))).astype(np.int32) for _ in range(4)
        )
        mask = tuple(np.arange(len(choice)) >= len(stem) for choice in choices)
        items.append(SequenceSet(f"document {index}", "", choices, mask))
    return Sequences.of(items)


def log_likelihoods(engine: Engine, batch: TreeBatch) -> np.ndarray:
    """[choices of every item, in the items' order] float64."""
    scored = zip(batch.items, batch.sets, engine.score(batch), strict=True)
    found = [(item, members) for _, item, (_, members) in sorted(scored, key=lambda scores: scores[0])]
    return np.array(
        [
            scores.logprobs[mask].sum(dtype=np.float64)
            for item, members in found
            for mask, scores in zip(item.is_scored, members, strict=True)
        ]
    )


@contextmanager
def little_memory(device: str, engine: Engine, batch: TreeBatch, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory for about half of a batch: what a CUDA device refuses by itself, or the same error made up."""
    if device == "cpu":
        Scarce(monkeypatch, len(batch.tree.tokens) // 2 + 300)
        yield
    else:
        engine.score(batch)  # compares sharing at this length and compiles, neither of which is to be measured
        with most_cuda_memory(int(0.6 * cuda_memory_of(lambda: engine.score(batch)))):
            yield


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_that_memory_does_not_hold_is_halved_and_scored_alike(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a CUDA device large enough for its activations to be most of what is allocated
    number, hidden = (8, 64) if device == "cpu" else (128, 1024)
    folder = tiny_checkpoint(tmp_path / "model", hidden=hidden, heads=hidden // 16, key_value_heads=2, spread=0.05)
    loaded = load_folder(folder, device=device, dtype="float32")
    [batch] = batches_of(ragged(number), 10**6)
    plenty = engine_of(loaded, 10**6)
    expected = log_likelihoods(plenty, batch)
    said: list[str] = []
    engine = Engine(loaded.model, 10**6, said.append)
    assert engine.kernel == KERNELS[device]
    with little_memory(device, engine, batch, monkeypatch):
        found = log_likelihoods(engine, batch)
    assert len(said) == 1
    assert re.fullmatch(rf"out of memory at {len(batch.tree.tokens)} tokens a batch: such batches are halved", said[0])
    np.testing.assert_allclose(found, expected, rtol=RELATIVE)
    forward = Forward(loaded.model)
    for item, ours in zip(batch.sets[::7], found.reshape(number, 4)[list(batch.items[::7])], strict=True):
        with torch.inference_mode():
            alone = [forward.score_alone(tokens).logprobs for tokens in item.sequences]
        sums = [one[mask].sum(dtype=np.float64) for one, mask in zip(alone, item.is_scored, strict=True)]
        np.testing.assert_allclose(ours, sums, rtol=RELATIVE)
