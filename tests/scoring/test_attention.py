"""Tiles, compared with the mask of the whole tree; layouts, compared with attention under that mask."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evalkit.compatibility.torch import compilations, compile_for_any_size
from evalkit.models.variants.signed import signed_attention
from evalkit.scoring import flex
from evalkit.scoring.attention import TileLayout, TreeAttention, Unsupported, cut_tiles
from evalkit.scoring.flex import FlexLayout
from evalkit.scoring.tree import Ints, Tree, build_tree
from tests.devices import DEVICES

SIZE, HEADS, GROUPS = 16, 4, 2


def tree_of(lengths: list[tuple[int, int, int]]) -> Tree:
    """Trees of (context, choices, choice length) side by side."""
    rng = np.random.default_rng(0)
    sequences = []
    for context, choices, length in lengths:
        stem = rng.integers(0, 1000, context)
        sequences += [np.concatenate((stem, rng.integers(0, 1000, length))).astype(np.int32) for _ in range(choices)]
    return build_tree(sequences, [np.ones(len(s), bool) for s in sequences])


trees = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 4), st.integers(1, 70)), min_size=1, max_size=5)


def visible(ends: Ints) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """[query, key] of the whole tree."""
    index = np.arange(len(ends))
    found: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = (index[None] <= index[:, None]) & (
        index[:, None] < ends[None]
    )
    return found


@given(trees, st.sampled_from([0, 30]), st.sampled_from([0, 500, 10**6]))
def test_tiles_cover_the_tree_and_see_what_they_must(
    lengths: list[tuple[int, int, int]], trunk: int, overhead: int
) -> None:
    tree = tree_of(lengths)
    seen = visible(tree.ends)
    at = 0
    for tile in cut_tiles(tree.ends, tree.positions, trunk, overhead):
        assert tile.start == at < tile.end
        at = tile.end
        size = tile.end - tile.start
        assert tile.keys[-size:].tolist() == list(range(tile.start, tile.end))
        keys = tile.keys[:-size].tolist()
        # Earlier tokens that its first token attends to, which are all that any of its tokens may attend to
        assert keys == np.flatnonzero(seen[tile.start, : tile.start]).tolist()
        assert not np.delete(seen[tile.start : tile.end, : tile.start], keys, axis=1).any()
    assert at == len(tree.tokens)


def test_tiles_save_most_of_the_pairs() -> None:
    """Twenty questions side by side: a mask over all of them has twenty times as many pairs."""
    tree = tree_of([(60, 4, 10)] * 20)
    pairs = sum((tile.end - tile.start) * len(tile.keys) for tile in cut_tiles(tree.ends, tree.positions, 0, 1000))
    assert pairs < len(tree.tokens) ** 2 / 18


@pytest.mark.filterwarnings("ignore:flex_attention called without")  # on a CPU it is not compiled
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["tiles", "flex"])
@pytest.mark.parametrize("trunk", [0, 30])
@pytest.mark.parametrize("lengths", [[(60, 4, 10)] * 3, [(200, 1, 70), (1, 2, 1)], [(1, 1, 2)]])
def test_a_layout_is_attention_under_the_whole_mask(
    kind: str, trunk: int, lengths: list[tuple[int, int, int]], device: str
) -> None:
    tree = tree_of(lengths)
    nodes = len(tree.tokens)
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, nodes, SIZE)
    key, value = torch.randn(2, 1, GROUPS, trunk + nodes, SIZE)
    layout = _layout(kind, tree, trunk, device)
    found = layout.attend(query.to(device), key.to(device), value.to(device), 0.3, None)
    weights = _logits(query, key, tree, trunk).softmax(-1)
    expected = (weights @ value.repeat_interleave(HEADS // GROUPS, dim=1)).transpose(1, 2)
    # Sums of a few hundred float32 products
    assert torch.allclose(found.cpu(), expected, atol=1e-5)


@given(trees, st.sampled_from([0, 30, 128, 200]))
def test_the_block_mask_is_the_mask_of_the_tree(lengths: list[tuple[int, int, int]], trunk: int) -> None:
    """Blocks without a mask are visible as a whole, and what is in no block is masked as a whole."""
    tree = tree_of(lengths)
    nodes = len(tree.tokens)
    mask = FlexLayout(tree.ends, trunk, torch.device("cpu"))._mask
    rows, columns = mask.kv_indices.shape[2:]
    query, key = torch.arange(rows * 128)[:, None], torch.arange(columns * 128)
    allowed = mask.mask_mod(0, 0, query, key)
    found = torch.zeros(rows * 128, columns * 128, dtype=torch.bool)
    for counts, indices, whole in (
        (mask.kv_num_blocks, mask.kv_indices, False),
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):
        for row in range(rows):
            for column in indices[0, 0, row, : counts[0, 0, row]].tolist():
                place = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
                assert not found[place].any()
                found[place] = True if whole else allowed[place]
                # A block with nothing to see costs as much as any other
                assert found[place].any()
    start = columns * 128 - rows * 128
    assert found[:nodes, :trunk].all()
    assert not found[:nodes, trunk:start].any()
    assert np.array_equal(found[:nodes, start : start + nodes].numpy(), visible(tree.ends))
    assert found.any(dim=1).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_batches_of_all_sizes_run_one_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with the code that inductor writes for a CPU: the tiles' numbers, from one compilation."""
    monkeypatch.setattr(flex, "_compiled", cache(lambda function, _: compile_for_any_size(function)))
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    counts = []
    before = compilations()
    for trunk in (0, 30, 0, 128, 200, 0, 64, 0, 17, 500):
        tree = tree_of([(int(rng.integers(1, 300)), 4, int(rng.integers(2, 40))) for _ in range(rng.integers(1, 9))])
        query = torch.randn(1, HEADS, len(tree.tokens), SIZE)
        key, value = torch.randn(2, 1, GROUPS, trunk + len(tree.tokens), SIZE)
        with torch.inference_mode():
            found, expected = (
                _layout(kind, tree, trunk).attend(query, key, value, 0.3, None) for kind in ("flex", "tiles")
            )
        # Sums of a few hundred float32 products
        assert torch.allclose(found, expected, atol=1e-5)
        counts.append(compilations() - before)
    print(f"compilations after each of 10 batches: {counts}")
    assert counts == [1] * 10


@pytest.mark.parametrize("trunk", [0, 30])
def test_another_product_takes_the_place_of_softmax_attention(trunk: int) -> None:
    tree = tree_of([(60, 4, 10)] * 3)
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, len(tree.tokens), SIZE)
    key, value = torch.randn(2, 1, GROUPS, trunk + len(tree.tokens), SIZE)
    found = _layout("tiles", tree, trunk).attend(query, key, value, 0.3, signed_attention)
    logits = _logits(query, key, tree, trunk)
    weights = logits.abs().masked_fill(logits.isneginf(), -torch.inf).softmax(-1) * logits.sign()
    expected = (weights @ value.repeat_interleave(HEADS // GROUPS, dim=1)).transpose(1, 2)
    assert torch.allclose(found, expected, atol=1e-5)
    with pytest.raises(Unsupported, match="not softmax"):
        _layout("flex", tree, trunk).attend(query, key, value, 0.3, signed_attention)


def _layout(kind: str, tree: Tree, trunk: int, device: str = "cpu") -> TreeAttention:
    if kind == "flex":
        return FlexLayout(tree.ends, trunk, torch.device(device))
    return TileLayout(tree.ends, tree.positions, trunk, HEADS * SIZE, torch.float32, torch.device(device))


def _logits(query: torch.Tensor, key: torch.Tensor, tree: Tree, trunk: int) -> torch.Tensor:
    """[1, heads, nodes, trunk + nodes], -inf where a node does not see."""
    mask = torch.cat((torch.ones(len(tree.tokens), trunk, dtype=torch.bool), torch.from_numpy(visible(tree.ends))), 1)
    return (query @ key.repeat_interleave(HEADS // GROUPS, dim=1).mT * 0.3).masked_fill(~mask, -torch.inf)
