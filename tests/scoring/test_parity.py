"""Shared scores equal those of each sequence alone, for any architecture, budget, order and batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest

from evalkit.benchmarks.multiple_choice.encoded import CONTINUATION
from evalkit.benchmarks.multiple_choice.templates import load_template
from evalkit.errors import ScoringError
from evalkit.models.loading.load import LoadedModel
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import batches_of, plan
from evalkit.scoring.sequences import Sequences, SequenceSet
from tests.marks import fast
from tests.scoring.conftest import ALL, JOINED, encode, items_of, largest_between, largest_difference, questions, score
from tests.tiny import Family

Tiny = Callable[..., LoadedModel]
RELATIVE = 1e-4
BUDGET = 512


def engine_of(loaded: LoadedModel, budget: int = BUDGET, kernel: str = "") -> Engine:
    """An engine that must not have anything to say."""

    def say(line: str) -> None:
        raise AssertionError(line)

    return Engine(loaded.model, budget, say, kernels=(kernel,) if kernel else None)


@pytest.mark.filterwarnings("ignore:flex_attention called without")  # on a CPU it is not compiled
@pytest.mark.parametrize(
    ("attention", "kernel"),
    [
        ("sdpa", "tiles"),
        pytest.param("sdpa", "flex", marks=pytest.mark.slow),  # compiled on a GPU only
        ("sdpa", "dense"),
        ("eager", "dense"),
    ],
)
@pytest.mark.parametrize("family", get_args(Family))
@pytest.mark.parametrize("unconditional", [False, True], ids=["", "unconditional"])
@pytest.mark.parametrize("template", fast(["inst", "plain"], ["inst", "plain", "joined"]))
def test_every_segment_as_by_itself(
    tiny: Tiny, family: Family, attention: str, kernel: str, template: str, unconditional: bool
) -> None:
    loaded = tiny(family, attention=attention)
    encoded = encode(loaded, JOINED if template == "joined" else load_template(template), unconditional)
    scored = frozenset({CONTINUATION}) if template == "plain" else ALL
    engine = engine_of(loaded, kernel=kernel)
    engine.check(items_of(encoded[:2]))
    largest = largest_difference(loaded.model, encoded, score(engine, encoded, scored), scored)
    print(f"{largest:.1e}")
    assert largest <= RELATIVE


def test_the_questions_above_hold_what_they_should(tiny: Tiny) -> None:
    """Each way of sharing really occurs, so that the test above tests it."""
    loaded = tiny()
    inst, joined = (encode(loaded, template) for template in (load_template("inst"), JOINED))
    assert {len(e.sequences) for e in inst} == {2, 3, 4, 5}
    assert sum(s.straddles for e in joined for s in e.sequences) >= 3
    batches = batches_of(items_of(inst), 200)
    assert all(len(batch.trunk) > 8 for batch in batches)
    assert not any(len(batch.trunk) for batch in batches_of(items_of(joined), 200))
    assert any({3, 4, 5} <= set(batch.items) for batch in batches)
    whole = sum(len(s.tokens) for e in inst for s in e.sequences)
    assert sum(len(batch.tree.tokens) for batch in batches) < whole / 3


@pytest.mark.parametrize("budget", [1, 64, 200, 4096])
def test_scores_do_not_depend_on_the_token_budget(tiny: Tiny, budget: int) -> None:
    loaded = tiny()
    encoded = encode(loaded, unconditional=True)
    one, other = (score(engine_of(loaded, budget=tokens), encoded) for tokens in (BUDGET, budget))
    assert largest_between(one, other) <= RELATIVE


@pytest.mark.parametrize("seed", range(3))
def test_scores_do_not_depend_on_order(tiny: Tiny, seed: int) -> None:
    loaded = tiny()
    shuffled = random.Random(seed).sample(questions(), len(questions()))
    one = score(engine_of(loaded), encode(loaded))
    other = score(engine_of(loaded), encode(loaded, asked=shuffled))
    assert largest_between(one, other) <= RELATIVE


@pytest.mark.parametrize("template", ["inst", "plain"])
def test_scores_do_not_depend_on_company(tiny: Tiny, template: str) -> None:
    """A question in a table of ten, and alone in its run: another trunk, other rows."""
    loaded = tiny()
    encoded = encode(loaded, load_template(template))
    together = score(engine_of(loaded), encoded)
    alone = {place: row for one in encoded for place, row in score(engine_of(loaded), [one]).items()}
    assert largest_between(together, alone) <= RELATIVE


def test_scores_do_not_depend_on_sharing(tiny: Tiny) -> None:
    loaded = tiny()
    encoded = encode(loaded, unconditional=True)
    shared, lone = engine_of(loaded), engine_of(loaded)
    lone.shares = False
    assert largest_between(score(shared, encoded), score(lone, encoded)) <= RELATIVE


@pytest.mark.parametrize("family", get_args(Family))
def test_bf16_differs_by_rounding_only(tiny: Tiny, family: Family) -> None:
    """bf16 keeps 8 bits: a continuation's log-likelihood moves by at most 0.01 nats a token, sharing or not."""
    loaded = tiny(family, dtype="bfloat16")
    encoded = encode(loaded)
    shared, lone = engine_of(loaded), engine_of(loaded)
    shared.check(items_of(encoded[:2]))
    lone.shares = False
    one, other = score(shared, encoded), score(lone, encoded)
    gaps = [abs(row.ll_continuation - other[place].ll_continuation) / row.n_continuation for place, row in one.items()]
    print(f"bf16, {family}: mean {np.mean(gaps):.4f}, largest {max(gaps):.4f} nats a token")
    assert 0 < max(gaps) <= 0.01


def test_a_plan_holds_every_sequence_once_within_the_budget(tiny: Tiny) -> None:
    encoded = encode(tiny(), unconditional=True)
    for budget in (1, 100, 1000):
        batches = batches_of(items_of(encoded), budget)
        assert sorted(item for batch in batches for item in batch.items) == list(range(len(encoded)))
        for batch in batches:
            assert len(batch.tree.tokens) <= budget or len(batch.items) == 1
            assert len(batch.tree.paths) == sum(len(item.sequences) for item in batch.sets)
        assert [batch.items for batch in batches] == [batch.items for batch in batches_of(items_of(encoded), budget)]


def two_groups(tail: int) -> Sequences:
    """Two groups with preambles of 60 tokens, and after them so many of each item's own."""
    rng = np.random.default_rng(0)
    preambles = rng.integers(0, 500, (2, 60))
    whole = [np.concatenate((preambles[i % 2], rng.integers(0, 500, tail))).astype(np.int32) for i in range(12)]
    return Sequences.of(
        SequenceSet(f"document {i}", str(i % 2), (s,), (np.ones(len(s), np.bool_),)) for i, s in enumerate(whole)
    )


@pytest.mark.parametrize("tail", [5, 100])
def test_the_advice_on_too_small_a_budget_is_good(tail: int) -> None:
    items = two_groups(tail)
    with pytest.raises(ScoringError, match=r"document \d+ takes \d+ tokens in one batch; give at least \d+") as caught:
        plan(items, 3, must_fit=True)
    enough = int(str(caught.value).split("give at least ")[1].split(",")[0])
    plan(items, enough, must_fit=True)
    assert all(len(batch.tree.tokens) <= enough for batch in batches_of(items, enough))


def test_a_group_has_a_trunk_of_its_own_where_that_saves_passes() -> None:
    """Two subjects with long preambles: each its own trunk in small batches, none where one batch holds everything."""
    rng = np.random.default_rng(0)
    preambles = rng.integers(0, 500, (2, 300)).astype(np.int32)
    whole = [np.concatenate((preambles[i % 2], rng.integers(0, 500, 20))).astype(np.int32) for i in range(20)]
    items = Sequences.of(SequenceSet(str(i), str(i % 2), (s,), (s > 0,)) for i, s in enumerate(whole))
    small = batches_of(items, 100)
    assert {len(batch.trunk) for batch in small} == {300}
    assert all(len({item.group for item in batch.sets}) == 1 for batch in small)
    (whole,) = batches_of(items, 5000)
    assert not len(whole.trunk)
