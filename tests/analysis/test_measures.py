"""Measures of maps: against loops in float64, closed forms, and degenerate inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from evalkit.benchmarks.attention.attention_calls import MapBlocks, WholeMap
from evalkit.benchmarks.attention.groups import CATEGORIES, GROUPS
from evalkit.benchmarks.attention.map_blocks import MapReader
from evalkit.benchmarks.attention.measures import (
    Reading,
    measures_of,
    position_edges,
    shifted_entropy,
)
from tests.analysis import plainly
from tests.models.variants.building import VANILLA, VARIANTS, model_of

N = 90


def reading(tokens: int = N, *, bos: bool = True, readers: Any = None, last: int | None = None) -> Reading:
    categories = np.random.default_rng(0).integers(0, 6, tokens).astype(np.int8)
    given = np.arange(max(0, tokens - 7), tokens - 1) if readers is None else np.array(readers, dtype=np.int64)
    return Reading(categories, given, tokens - 2 if last is None else last, bos)


def measured(seen: Any, **changes: Any) -> dict[str, Any]:
    """Measure maps, [heads, tokens, tokens], in blocks of a few rows."""
    maps = torch.as_tensor(np.asarray(seen), dtype=torch.float64)
    return measures_of(
        WholeMap(maps, elements=5 * maps.shape[0] * maps.shape[1]), reading(len(maps[0]), **changes), GROUPS
    )


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("variant", ["vanilla", *VARIANTS])
def test_measures_equal_loops_in_float64(variant: str, family: str) -> None:
    model = model_of(family, VARIANTS.get(variant, VANILLA))
    tokens = np.random.default_rng(1).integers(1, 64, N)
    # The continuation's rows lie in several blocks
    about = reading(readers=[3, 40, 41, 70, 88], last=77)

    def use(layer: int, seen: MapBlocks) -> None:
        found = measures_of(seen, about, GROUPS)
        expected = plainly.measures(seen.whole().numpy(), about.categories, about.readers, about.last, about.bos)
        assert set(found) == set(expected)
        for name, values in expected.items():
            assert found[name].shape == values.shape, name
            # Weights are float32 in both; sums over a row are float32 in one. Ranks: float32 singular values
            tolerance = {"rtol": 2e-4} if name.startswith("rank") else {"rtol": 2e-6, "atol": 2e-6}
            np.testing.assert_allclose(found[name], values, **tolerance, err_msg=f"{name}, layer {layer}")

    MapReader(model, pytest.fail, elements=3001).read(tokens, [0, 1], use)


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_gives_the_same_alone(group: str) -> None:
    seen = WholeMap(torch.randn(3, N, N).tril(), elements=1000)
    found, alone = measures_of(seen, reading(), GROUPS), measures_of(seen, reading(), [group])
    assert alone
    assert all(np.array_equal(found[name], values) for name, values in alone.items())


def test_every_measure_is_of_one_group() -> None:
    seen = WholeMap(torch.randn(3, N, N).tril())
    names = [name for group in GROUPS for name in measures_of(seen, reading(), [group])]
    assert len(names) == len(set(names))
    assert set(names) == set(measures_of(seen, reading(), GROUPS))


def test_uniform_attention() -> None:
    rows = np.arange(N)
    found = measured([np.tril(np.ones((N, N))) / (rows + 1)[:, None]] * 2)
    assert found["entropy"][0] == pytest.approx(math.log(N - 1))
    assert found["entropy_shifted"][0] == pytest.approx(math.log(N - 1))
    assert found["distance"][0] == pytest.approx((rows[1:] / 2).mean())
    assert found["bos"][0] == pytest.approx((1 / (rows[1:] + 1)).mean())
    assert found["bos_by_position"][0, :3] == pytest.approx(
        [1 / 2, (1 / 3 + 1 / 4) / 2, (1 / 5 + 1 / 6 + 1 / 7 + 1 / 8) / 4]
    )
    assert found["entropy_by_position"][0, 1] == pytest.approx((math.log(3) + math.log(4)) / 2)
    assert found["sink"][0] == pytest.approx(sum(1 / k for k in range(1, 65)) / 64)
    assert found["similarity"] == pytest.approx([1, 1])
    assert sum(found[f"mass_{name}"][0] for name in CATEGORIES) == pytest.approx(1)


def test_the_identity_has_full_rank_and_no_distance() -> None:
    found = measured([np.eye(N)])
    assert [found[name][0] for name in ("rank", "rank_squares", "rank_stable")] == pytest.approx([N] * 3)
    assert found["distance"][0] == 0
    assert found["entropy"][0] == 0
    assert found["bos"][0] == 0
    assert found["bos_all"][0] == 1 / N
    assert measured([-np.eye(N)])["bos_negative_all"][0] == 1 / N
    assert "similarity" not in found


def test_all_on_the_first_token() -> None:
    """Such a map has rank one."""
    seen = np.zeros((N, N))
    seen[:, 0] = 1
    found = measured([seen, -seen])
    for name in ("rank", "rank_squares", "rank_stable", "bos_abs", "sink_abs"):
        assert found[name] == pytest.approx([1, 1]), name
    for name in ("bos", "sink"):
        assert found[name] == pytest.approx([1, -1]), name
    assert found["bos_negative"].tolist() == [0, 1]
    assert found["bos_all"].tolist() == [1, -1]
    assert found["similarity"] == pytest.approx([-1, -1])
    assert found["distance"][0] == pytest.approx(np.arange(1, N).mean())
    assert found["entropy"].tolist() == [0, 0]
    category = CATEGORIES[reading().categories[0]]  # type: ignore[index]
    assert found[f"mass_{category}"] == pytest.approx([1, -1])
    assert found[f"mass_abs_{category}"] == pytest.approx([1, 1])


def test_ranks_of_two_singular_values() -> None:
    seen = np.zeros((N, N))
    seen[3, 1], seen[4, 2] = 3, 4
    found = measured([seen])

    def entropy(p: float) -> float:
        return -p * math.log(p) - (1 - p) * math.log(1 - p)

    assert found["rank"][0] == pytest.approx(math.exp(entropy(3 / 7)))
    assert found["rank_squares"][0] == pytest.approx(math.exp(entropy(9 / 25)))
    assert found["rank_stable"][0] == pytest.approx(25 / 16)


@pytest.mark.parametrize(("tokens", "shifted", "plain"), [(200, 5.17, 2.84), (500, 6.15, 3.74)])
def test_random_signs_lift_the_papers_entropy_to_that_of_a_uniform_row(
    tokens: int, shifted: float, plain: float
) -> None:
    """The softmax of normal logits of standard deviation 2.5, as in the reference's example of one draw."""
    draw = np.random.default_rng(0)
    weights = np.exp(2.5 * draw.normal(size=(2000, tokens)))
    weights /= weights.sum(1, keepdims=True)
    signs = draw.choice([-1, 1], weights.shape)
    found = shifted_entropy(weights * signs)
    unsigned = -(weights * np.log(weights)).sum(1)
    # The reference is one draw
    assert abs(found.mean() - shifted) < 1.5 * found.std()
    assert abs(unsigned.mean() - plain) < 1.5 * unsigned.std()
    assert math.log(tokens) - found.mean() < 0.05
    assert math.log(tokens) - unsigned.mean() > 2.3
    # Without signs the shift changes little: it subtracts the smallest weight, which is nearly 0
    assert shifted_entropy(weights).mean() == pytest.approx(unsigned.mean(), abs=0.01)


def test_random_signs_do_not_change_the_entropy_of_magnitudes() -> None:
    draw = np.random.default_rng(0)
    logits = 2.5 * draw.normal(size=(4, N, N))
    weights = np.tril(np.exp(logits))
    weights /= weights.sum(-1, keepdims=True)
    plain, signed = measured(weights), measured(weights * draw.choice([-1, 1], weights.shape))
    for name in ("entropy", "entropy_by_position", "bos_abs", "sink_abs", "distance", "mass_abs_content"):
        np.testing.assert_allclose(plain[name], signed[name], rtol=1e-12)
    assert (signed["entropy_shifted"] > plain["entropy_shifted"] + 0.5).all()


def test_rows_without_weights_have_no_shares() -> None:
    seen = np.tril(np.random.default_rng(0).random((2, N, N)))
    seen[0, [4, 70, N - 2]] = 0
    about = {"readers": [70], "last": N - 2}
    found = measured(seen, **about)
    expected = plainly.measures(seen, reading(**about).categories, [70], N - 2, True)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-7, err_msg=name)
    assert found["entropy"][0] == 0
    assert found["entropy_shifted"][0] == pytest.approx(math.log(N - 1))
    assert all(found[f"mass_abs_{name}"][0] == 0 for name in CATEGORIES)


def test_a_map_of_zeros() -> None:
    found = measured(np.zeros((2, N, N)))
    assert all(np.isfinite(values).all() for values in found.values())
    assert all((values == 0).all() for name, values in found.items() if name != "entropy_shifted")


def test_a_single_token() -> None:
    found = measured(np.full((2, 1, 1), -1.0), readers=[0], last=0)
    masses = {f"{kind}_{name}" for kind in ("mass", "mass_abs") for name in CATEGORIES}
    others = {"entropy", "entropy_shifted", "rank", "rank_squares", "rank_stable", "similarity"}
    assert set(found) == masses | others | {"bos_all", "bos_negative_all"}
    assert found["entropy"].tolist() == found["entropy_shifted"].tolist() == [0, 0]


@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 63, 64, 65])
def test_lengths_around_the_edges_of_bins_and_of_the_sink(tokens: int) -> None:
    seen = np.tril(np.random.default_rng(0).normal(size=(2, tokens, tokens)))
    about = reading(tokens)
    found = measured(seen)
    expected = plainly.measures(seen, about.categories, about.readers, about.last, True)
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, err_msg=name)
    assert ("sink" in found) == (tokens >= 64)


def test_without_bos_and_without_readers() -> None:
    found = measured(np.tril(np.ones((2, N, N))), bos=False, readers=[])
    assert not [name for name in found if name.startswith(("bos", "mass"))]
    assert {"sink", "sink_abs", "entropy", "distance"} <= set(found)


def test_position_edges() -> None:
    assert [position_edges(tokens) for tokens in (1, 2, 3, 4, 5)] == [(1,), (1, 2), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8)]
    assert position_edges(8192)[-2:] == (4096, 8192)


def test_inputs_that_do_not_fit() -> None:
    seen = WholeMap(torch.ones(1, 5, 5).tril())
    none = Reading(None, np.array([1]), 4, True)
    with pytest.raises(ValueError, match="no group of measures 'entrpy'"):
        measures_of(seen, none, ["entrpy"])
    with pytest.raises(ValueError, match="need the categories of 5 tokens"):
        measures_of(seen, none, ["mass"])
    assert "bos" in measures_of(seen, none, ["bos"])
    with pytest.raises(ValueError, match="need the categories of 5 tokens"):
        measures_of(seen, Reading(np.zeros(4, np.int8), np.array([1]), 4, True), ["mass"])
    for wrong in (Reading(None, np.array([5]), 4, True), Reading(None, np.array([1]), -1, True)):
        with pytest.raises(ValueError, match="outside of the sequence's 5 tokens"):
            measures_of(seen, wrong, ["bos"])
