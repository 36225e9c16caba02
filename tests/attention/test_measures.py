"""Measures of maps: against loops in float64, closed forms, and degenerate inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from evalkit.attention.attention_calls import MapBlocks, WholeMap
from evalkit.attention.documents import Reading
from evalkit.attention.groups import CATEGORIES, GROUPS, MEASURES
from evalkit.attention.map_blocks import MapReader
from evalkit.attention.measures import measures_of, shifted_entropy
from tests.attention import plainly
from tests.models.variants.building import VANILLA, VARIANTS, model_of

N = 90


def reading(tokens: int = N, *, bos: bool = True, readers: Any = None, last: int | None = None) -> Reading:
    categories = np.random.default_rng(0).integers(0, 6, tokens).astype(np.int8)
    given = np.arange(max(0, tokens - 7), tokens - 1) if readers is None else np.array(readers, dtype=np.int64)
    return Reading(categories, given, tokens - 2 if last is None else last, bos)


def measured(maps: Any, **changes: Any) -> dict[str, Any]:
    """Measure maps, [heads, tokens, tokens], in blocks of a few rows."""
    whole = torch.as_tensor(np.asarray(maps), dtype=torch.float64)
    blocks = WholeMap(whole, elements=5 * whole.shape[0] * whole.shape[1])
    return measures_of(blocks, reading(len(whole[0]), **changes), GROUPS)


def same_as_plainly(
    values: dict[str, Any], maps: Any, about: Reading, rtol: float, atol: float, of_ranks: float
) -> None:
    expected = plainly.measures(maps, about.categories, about.readers, about.last, about.bos)
    assert set(values) == set(expected)
    for name, each in expected.items():
        assert values[name].shape == each.shape, name
        tolerance = {"rtol": of_ranks} if name.startswith("rank") else {"rtol": rtol, "atol": atol}
        np.testing.assert_allclose(values[name], each, **tolerance, err_msg=name)


@pytest.mark.parametrize("variant", ["vanilla", "cog", "integral-probabilities"])
def test_measures_equal_loops_in_float64(variant: str) -> None:
    tokens = np.random.default_rng(1).integers(1, 64, N)
    # The continuation's rows lie in several blocks
    about = reading(readers=[3, 40, 41, 70, 88], last=77)

    def use(layer: int, seen: MapBlocks) -> None:
        # Weights are float32 in both; sums over a row are float32 in one. Ranks: float32 singular values
        same_as_plainly(measures_of(seen, about, GROUPS), seen.whole().numpy(), about, 2e-6, 2e-6, 2e-4)

    MapReader(model_of("llama", VARIANTS.get(variant, VANILLA)), pytest.fail, elements=3001).read(tokens, [0, 1], use)


@pytest.mark.parametrize("tokens", [2, 3, 63, 64])
def test_lengths_around_the_edges_of_bins_and_of_the_sink(tokens: int) -> None:
    maps = np.tril(np.random.default_rng(0).normal(size=(2, tokens, tokens)))
    same_as_plainly(measured(maps), maps, reading(tokens), 1e-6, 0, 1e-6)


def test_uniform_attention() -> None:
    rows = np.arange(N)
    values = measured([np.tril(np.ones((N, N))) / (rows + 1)[:, None]] * 2)
    assert values["entropy"][0] == values["entropy_shifted"][0] == pytest.approx(math.log(N - 1))
    assert values["distance"][0] == pytest.approx((rows[1:] / 2).mean())
    assert values["bos"][0] == pytest.approx((1 / (rows[1:] + 1)).mean())
    assert values["bos_by_position"][0, :2] == pytest.approx([1 / 2, (1 / 3 + 1 / 4) / 2])
    assert values["sink"][0] == pytest.approx(sum(1 / k for k in range(1, 65)) / 64)
    assert values["similarity"] == pytest.approx([1, 1])
    assert sum(values[f"mass_{name}"][0] for name in CATEGORIES) == pytest.approx(1)


def test_all_on_the_first_token() -> None:
    """Such a map has rank one."""
    maps = np.zeros((N, N))
    maps[:, 0] = 1
    values = measured([maps, -maps])
    category = CATEGORIES[reading().categories[0]]  # type: ignore[index]
    for name in ("rank", "rank_squares", "rank_stable", "bos_abs", "sink_abs", f"mass_abs_{category}"):
        assert values[name] == pytest.approx([1, 1]), name
    for name in ("bos", "sink", "bos_all", f"mass_{category}"):
        assert values[name] == pytest.approx([1, -1]), name
    assert values["bos_negative"].tolist() == [0, 1]
    assert (values["sink_rate"].tolist(), values["sink_abs_rate"].tolist()) == ([1, 0], [1, 1])
    assert values["similarity"] == pytest.approx([-1, -1])
    assert values["distance"][0] == pytest.approx(np.arange(1, N).mean())
    assert values["entropy"].tolist() == [0, 0]


def test_ranks_in_closed_form() -> None:
    values = measured([np.eye(N)])
    assert [values[name][0] for name in ("rank", "rank_squares", "rank_stable")] == pytest.approx([N] * 3)
    assert "similarity" not in values
    maps = np.zeros((N, N))
    maps[3, 1], maps[4, 2] = 3, 4  # two singular values
    values = measured([maps])

    def entropy(p: float) -> float:
        return -p * math.log(p) - (1 - p) * math.log(1 - p)

    assert values["rank"][0] == pytest.approx(math.exp(entropy(3 / 7)))
    assert values["rank_squares"][0] == pytest.approx(math.exp(entropy(9 / 25)))
    assert values["rank_stable"][0] == pytest.approx(25 / 16)


def test_random_signs_lift_the_papers_entropy_to_that_of_a_uniform_row() -> None:
    """The softmax of normal logits of standard deviation 2.5, as in the reference's example of one draw."""
    draw = np.random.default_rng(0)
    weights = np.exp(2.5 * draw.normal(size=(500, 200)))
    weights /= weights.sum(1, keepdims=True)
    lifted = shifted_entropy(weights * draw.choice([-1, 1], weights.shape))
    unsigned = -(weights * np.log(weights)).sum(1)
    assert abs(lifted.mean() - 5.17) < 1.5 * lifted.std()
    assert abs(unsigned.mean() - 2.84) < 1.5 * unsigned.std()
    assert math.log(200) - lifted.mean() < 0.05
    # Without signs the shift changes little: it subtracts the smallest weight, which is nearly 0
    assert shifted_entropy(weights).mean() == pytest.approx(unsigned.mean(), abs=0.01)


def test_sparsity_is_a_mean_over_tokens() -> None:
    """Half of the second token's weights and a third of the third's, as its description says; not 2 of all 5."""
    maps = np.array([[[1.0, 0, 0], [1, 0, 0], [1, 1, 0]]])
    assert measured(maps, readers=[], last=2)["sparsity"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert MEASURES["sparsity"].words.startswith("mean over tokens after the first of the share")


def test_degenerate_maps() -> None:
    maps = np.tril(np.random.default_rng(0).random((2, N, N)))
    maps[0, [4, 70, N - 2]] = 0
    about = {"readers": [70], "last": N - 2}
    values = measured(maps, **about)
    same_as_plainly(values, maps, reading(**about), 1e-7, 0, 1e-7)  # type: ignore[arg-type]
    assert values["entropy_shifted"][0] == pytest.approx(math.log(N - 1))
    zeros = measured(np.zeros((2, N, N)))
    assert all((values == (name == "sparsity")).all() for name, values in zeros.items() if name != "entropy_shifted")
    single = measured(np.full((2, 1, 1), -1.0), readers=[0], last=0)
    assert not {"bos", "bos_negative", "distance", "sink", "entropy_by_position"} & set(single)
    assert single["entropy"].tolist() == single["entropy_shifted"].tolist() == [0, 0]
    without = measured(np.tril(np.ones((2, N, N))), bos=False, readers=[])
    assert not [name for name in without if name.startswith(("bos", "mass"))]
    assert {"sink", "sink_abs", "entropy", "distance"} <= set(without)
