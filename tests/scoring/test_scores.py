"""Shared scores equal those of each sequence alone, for any architecture, kernel, budget, order and batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evalkit.errors import ScoringError
from evalkit.models.context.extension import ContextSettings
from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from evalkit.models.loading.spec import extension_of
from evalkit.scoring.engine import Engine
from evalkit.scoring.forward import Forward
from evalkit.scoring.pack import Sequences, SequenceSet, TreeBatch, batches_of
from tests.devices import DEVICES, KERNELS, cuda_memory_of, most_cuda_memory
from tests.marks import fast
from tests.models.loading import load_folder
from tests.models.variants.building import FAMILIES, VARIANTS, VOCABULARY
from tests.models.variants.building import model_of as variant_of
from tests.scoring.conftest import (
    BUDGET,
    RELATIVE,
    TEMPLATES,
    Scarce,
    Tiny,
    encode,
    from_alone,
    largest_difference,
    model_of,
    score,
    sequences_of,
    sums_of,
    with_choices,
)
from tests.tiny import Family, tiny_checkpoint

TILE = 128
"""Tokens of a block of FlexAttention's mask; tiles of the processor's way to attend end at multiples of 64."""


@pytest.mark.filterwarnings("ignore:flex_attention called without")  # it is compiled on a GPU only
@pytest.mark.parametrize(
    ("family", "attention", "kernel", "template"),
    [
        ("llama", "sdpa", "tiles", "joined"),
        ("gpt_neox", "eager", "dense", "inst"),
        ("qwen2", "sdpa", "dense", "plain"),
        pytest.param("llama", "sdpa", "flex", "joined", marks=pytest.mark.slow),
    ],
)
def test_every_segment_as_by_itself(tiny: Tiny, family: Family, attention: str, kernel: str, template: str) -> None:
    loaded = tiny(family, attention=attention)
    encoded = encode(loaded, TEMPLATES[template], unconditional=True)
    engine = Engine(loaded.model, BUDGET, pytest.fail, kernels=(kernel,))
    engine.check(sequences_of(encoded[:2]))
    assert engine.way == "tree"
    assert largest_difference(loaded.model, encoded, score(engine, encoded), TEMPLATES[template]) <= RELATIVE


def test_scores_do_not_depend_on_budget_order_company_or_sharing() -> None:
    model = model_of("llama")
    sequences = with_choices(range(3, 40, 3))
    expected = sums_of(Engine(model, BUDGET, pytest.fail), sequences)
    items = [sequences[number] for number in range(len(sequences))]
    shuffled = Sequences.of(random.Random(0).sample(items, len(items)))
    cases = [sums_of(Engine(model, budget, pytest.fail), sequences) for budget in (1, 64, 4096)]
    cases.append(sums_of(Engine(model, BUDGET, pytest.fail), shuffled))
    alone = (sums_of(Engine(model, BUDGET, pytest.fail), Sequences.of([item])) for item in items)
    cases.append({label: sums for case in alone for label, sums in case.items()})
    lone = Engine(model, BUDGET, pytest.fail)
    lone.way = "alone"
    cases.append(sums_of(lone, sequences))
    for case in cases:
        assert case.keys() == expected.keys()
        assert all(case[label] == pytest.approx(sums, rel=RELATIVE) for label, sums in expected.items())


@pytest.mark.parametrize("kernel", ["tiles", "dense"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", fast(["llama"], FAMILIES))
def test_the_papers_attentions(family: str, variant: str, kernel: str) -> None:
    model = variant_of(family, VARIANTS[variant])
    # Cog attention jumps where a logit changes its sign by rounding, which is rare
    sequences = with_choices(range(6, 30, 2), (2, 5, 1, 8), 40, VOCABULARY)
    engine = Engine(model, 200, pytest.fail, kernels=(kernel,))
    engine.check(sequences)
    assert (engine.way, engine.kernel, engine.dropped) == ("tree", kernel, [])
    batches = batches_of(sequences, engine.budget)
    assert any(len(batch.trunk) for batch in batches) and len(batches) > 1
    assert from_alone(engine, model, sequences) <= RELATIVE


@pytest.mark.parametrize("device", DEVICES)
def test_half_precision_is_as_near_to_float32_as_without_sharing(device: str) -> None:
    """bf16 rounds to 8 bits, in another order: the mean distance, in nats a token, is the same."""
    exact, half = model_of("llama").to(device), model_of("llama", torch.bfloat16).to(device)
    half.load_state_dict(exact.state_dict())
    exact.load_state_dict(half.state_dict())
    sequences = with_choices(range(5, 60, 3), (2, 5, 9))
    batches = batches_of(sequences, 600)
    assert max(len(batch.tree.tokens) for batch in batches) > 3 * TILE
    assert len(batches) > 1 and all(len(batch.trunk) > 8 for batch in batches)
    reference, shared, lone = (Engine(model, 600, pytest.fail) for model in (exact, half, half))
    for engine in (reference, shared):
        engine.check(sequences)
        assert (engine.way, engine.kernel) == ("tree", KERNELS[device])
    lone.way = "alone"
    assert from_alone(reference, exact, sequences) <= RELATIVE
    tokens = np.tile([2, 5, 9], len(sequences))
    expected, by_sharing, alone = (
        np.concatenate([*sums_of(engine, sequences).values()]) / tokens for engine in (reference, shared, lone)
    )
    distances = [np.abs(sums - expected) for sums in (by_sharing, alone)]
    assert 0 < distances[0].mean() <= 1.5 * distances[1].mean() and distances[0].max() <= 2 * distances[1].max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_head_that_is_split_by_columns_shares(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a vocabulary of 49,152 tokens is, which the check of the head must compute in float32 too."""
    monkeypatch.setattr("evalkit.scoring.forward._CPU_LOGITS", 2**10)
    monkeypatch.setattr("evalkit.scoring.forward._MIN_COLUMNS", 16)
    engine = Engine(model_of("llama", dtype), 600, pytest.fail)
    engine.check(with_choices(range(5, 60, 3), (2, 5, 9)))
    assert (engine.way, engine.why) == ("tree", "")


# Windows, and lengths on which rotary embeddings depend


@pytest.mark.parametrize("length", [16, 48])
@pytest.mark.parametrize("kind", ["sliding", "longrope", "dynamic"])
def test_sequences_share_only_within_a_window(kind: str, length: int) -> None:
    """Sequences longer than the model was trained for do not share a batch, where they would change the others."""
    if kind == "sliding":
        model = model_of("mistral", sliding_window=length)
    else:
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": length}
        rope |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8} if kind == "longrope" else {}
        model = model_of("llama", rope_parameters=rope, max_position_embeddings=4 * length)
    sequences = with_choices((2, 5, 30, 20, 9), (1, 3, 5), prefix=8)
    engine = Engine(model, BUDGET, lambda _: None)
    engine.check(sequences)
    assert engine.way == "tree"
    assert from_alone(engine, model, sequences) <= RELATIVE


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn", "ntk", "linear"])
def test_stretched_contexts_share_what_they_may(tmp_path: Path, method: str) -> None:
    """Under "dynamic-yarn" frequencies depend on each sequence's own length past the original window."""
    checkpoint = locate(str(tiny_checkpoint(tmp_path / "tiny", window=16)))
    loaded = load(
        checkpoint, device="cpu", extension=extension_of(checkpoint, ContextSettings(context=256, method=method))
    )
    sequences = with_choices((40, 3, 2, 20), (1, 3, 5), prefix=8)
    engine = Engine(loaded.model, BUDGET, lambda _: None)
    engine.check(sequences)
    assert engine.way == "tree"
    assert from_alone(engine, loaded.model, sequences) <= RELATIVE


def test_a_longer_sequence_before_changes_no_score() -> None:
    """Though transformers' own module keeps the frequencies of the longest one."""
    rope = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}

    def fresh() -> Any:
        return model_of("llama", max_position_embeddings=16, **rope)

    dice = np.random.default_rng(0)
    long, short = (dice.integers(1, 256, size).astype(np.int32) for size in (60, 20))
    expected = Forward(fresh()).score_alone(short).logprobs
    forward = Forward(fresh())
    forward.score_alone(long)
    np.testing.assert_allclose(forward.score_alone(short).logprobs, expected, rtol=1e-5)
    engine = Engine(fresh(), BUDGET, pytest.fail)
    engine.way = "alone"
    for tokens in (long, short):
        mask = np.arange(len(tokens)) > 0
        [batch] = batches_of(Sequences.of([SequenceSet("a document", "", [tokens], [mask])]), BUDGET)
        [(_, [scores])] = engine.score(batch)
    np.testing.assert_allclose(scores.logprobs[1:], expected[1:], rtol=1e-5)


# Memory, and numbers that are not finite


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
    sequences = with_choices([100 + 5 * (n % 8) for n in range(number)], (20, 30, 40, 45), prefix=0)
    [batch] = batches_of(sequences, 10**6)
    said: list[str] = []
    engine = Engine(loaded.model, 10**6, said.append)
    assert engine.kernel == KERNELS[device]
    with little_memory(device, engine, batch, monkeypatch):
        assert from_alone(engine, loaded.model, sequences, 10**6) <= RELATIVE
        first = engine.score(batch)
        # Batches are independent: a repetition is split the same way, to the same bits
        for (_, left), (_, right) in zip(first, engine.score(batch), strict=True):
            assert all(np.array_equal(a.logprobs, b.logprobs, equal_nan=True) for a, b in zip(left, right, strict=True))
    assert said == [f"out of memory at {len(batch.tree.tokens)} tokens a batch: such batches are halved"]
    assert engine.budget == 10**6
    if device == "cpu":  # down to single documents
        pair = with_choices([100, 105], (20, 30), prefix=0)
        [of_two] = batches_of(pair, 10**6)
        Scarce(monkeypatch, len(of_two.tree.tokens) - 1)
        assert from_alone(engine, loaded.model, pair, 10**6) <= RELATIVE


@pytest.mark.parametrize("method", ["score", "score_pass", "trunk"])
def test_memory_that_lacks_for_one_document_names_it(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    loaded = tiny()
    engine = Engine(loaded.model, 1, print)
    engine.check(sequences_of(encode(loaded)[:2]))
    engine.way = "rows" if method == "score_pass" else "tree"
    monkeypatch.setattr(Forward, method, fail)
    with pytest.raises(ScoringError, match=r"subject_\d document \d: out of memory on \d+ tokens") as caught:
        score(engine, encode(loaded))
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(Forward, method, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score(engine, encode(loaded))
