"""Tree attention and the output head, compared with the whole mask and all columns."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evalkit.compatibility.torch import compilations, compile_for_any_size
from evalkit.models.variants.signed import signed_attention
from evalkit.scoring import attention, forward
from evalkit.scoring.attention import (
    NAME,
    FlexLayout,
    TileLayout,
    Unsupported,
    attending,
    cut_tiles,
)
from evalkit.scoring.forward import Forward, OutputHead
from evalkit.scoring.tree import Ints, Tree, build_tree
from tests.devices import DEVICES, compiles
from tests.scoring.conftest import VOCABULARY, Tiny, model_of

SIZE, HEADS, GROUPS = 16, 4, 2
Lengths = list[tuple[int, int, int]]
TREES = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 4), st.integers(1, 70)), min_size=1, max_size=5)


def tree_of(lengths: Lengths) -> Tree:
    """Trees of (context, choices, choice length) side by side."""
    dice = np.random.default_rng(0)
    sequences = []
    for context, choices, length in lengths:
        stem = dice.integers(0, 1000, context)
        sequences += [np.concatenate((stem, dice.integers(0, 1000, length))).astype(np.int32) for _ in range(choices)]
    return build_tree(sequences, [np.ones(len(s), bool) for s in sequences])


def visible(ends: Ints) -> Any:
    """[query, key] of the whole tree."""
    index = np.arange(len(ends))
    return (index[None] <= index[:, None]) & (index[:, None] < ends[None])


def states_of(tree: Tree, trunk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value."""
    torch.manual_seed(0)
    key, value = torch.randn(2, 1, GROUPS, trunk + len(tree.tokens), SIZE)
    return torch.randn(1, HEADS, len(tree.tokens), SIZE), key, value


def attended(tree: Tree, trunk: int, signed: bool = False) -> torch.Tensor:
    """Attention under the mask of the whole tree; by softmax, or with the sign of each logit."""
    query, key, value = states_of(tree, trunk)
    mask = torch.cat((torch.ones(len(tree.tokens), trunk, dtype=torch.bool), torch.from_numpy(visible(tree.ends))), 1)
    repeats = HEADS // GROUPS
    logits = (query @ key.repeat_interleave(repeats, dim=1).mT * 0.3).masked_fill(~mask, -torch.inf)
    weights = logits.softmax(-1)
    if signed:
        weights = logits.abs().masked_fill(~mask, -torch.inf).softmax(-1) * logits.sign()
    return (weights @ value.repeat_interleave(repeats, dim=1)).transpose(1, 2)


@given(TREES, st.sampled_from([0, 30]), st.sampled_from([0, 500, 10**6]))
def test_tiles_cover_the_tree_and_see_what_they_must(lengths: Lengths, trunk: int, overhead: int) -> None:
    tree = tree_of(lengths)
    seen = visible(tree.ends)
    at = 0
    for tile in cut_tiles(tree.ends, tree.positions, trunk, overhead):
        assert tile.start == at < tile.end
        at, size = tile.end, tile.end - tile.start
        assert tile.keys[-size:].tolist() == list(range(tile.start, tile.end))
        keys = tile.keys[:-size].tolist()
        # Earlier tokens that its first token attends to, which are all that any of its tokens may attend to
        assert keys == np.flatnonzero(seen[tile.start, : tile.start]).tolist()
        assert not np.delete(seen[tile.start : tile.end, : tile.start], keys, axis=1).any()
    assert at == len(tree.tokens)


@pytest.mark.filterwarnings("ignore:flex_attention called without")  # on a CPU it is not compiled
@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=4)
@given(TREES, st.sampled_from([0, 30, 128, 200]))
def test_layouts_are_attention_under_the_whole_mask(device: str, lengths: Lengths, trunk: int) -> None:
    """Also by another product than softmax, for which FlexAttention has no form."""
    tree = tree_of(lengths)
    states = [part.to(device) for part in states_of(tree, trunk)]
    where, expected = torch.device(device), attended(tree, trunk)
    tiles = TileLayout(tree.ends, tree.positions, trunk, HEADS * SIZE, torch.float32, where)
    flex = FlexLayout(tree.ends, trunk, where)
    # Sums of a few hundred float32 products
    assert torch.allclose(tiles.attend(*states, 0.3, None).cpu(), expected, atol=1e-5)
    assert torch.allclose(flex.attend(*states, 0.3, None).cpu(), expected, atol=1e-5)
    signed = tiles.attend(*states, 0.3, signed_attention)
    assert torch.allclose(signed.cpu(), attended(tree, trunk, signed=True), atol=1e-5)
    by_size = [tiles.attend(*states, scale, signed_attention) for scale in (None, SIZE**-0.5)]
    assert torch.equal(*by_size)
    with pytest.raises(Unsupported, match="not softmax"):
        flex.attend(*states, 0.3, signed_attention)


@pytest.mark.slow
@compiles
def test_batches_of_all_sizes_run_one_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with the code that inductor writes for a CPU."""
    monkeypatch.setattr(attention, "compiled_for", cache(lambda function, _: compile_for_any_size(function)))
    dice, before = np.random.default_rng(0), compilations()
    for trunk in (0, 30, 0, 128, 200, 0, 64, 0, 17, 500):
        tree = tree_of([(int(dice.integers(1, 300)), 4, int(dice.integers(2, 40))) for _ in range(dice.integers(1, 9))])
        with torch.inference_mode():
            output = FlexLayout(tree.ends, trunk, torch.device("cpu")).attend(*states_of(tree, trunk), 0.3, None)
        assert torch.allclose(output, attended(tree, trunk), atol=1e-5)
        assert compilations() == before + 1


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_compiled_norms_and_rotary_embeddings_give_the_same_states(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. Qwen 3 has norms of two sizes, the second over the heads."""
    model, trees = model_of(kind), [tree_of([(30 + n, 3, 7)] * n) for n in (9, 4, 20)]
    trees = [replace(tree, tokens=tree.tokens % VOCABULARY) for tree in trees]
    none = np.empty(0, np.int32)
    expected = [Forward(model, "tiles").hidden_shared(tree, none) for tree in trees]
    for module in (attention, forward):
        monkeypatch.setattr(module, "compiled_for", cache(lambda function, device: compile_for_any_size(function)))
    compiled, before, counts = Forward(model, "flex"), compilations(), []
    for tree, states in zip(trees, expected, strict=True):
        # Rounding of float32
        assert (compiled.hidden_shared(tree, none) - states).norm() <= 1e-5 * states.norm()
        counts.append(compilations() - before)
    # Attention, the rotary embedding and the norms of each size, for all batches
    assert counts == [{"llama": 3, "qwen3": 4}[kind]] * 3


def test_a_model_gets_its_own_attention_back() -> None:
    model = model_of("llama")
    before = model.config._attn_implementation
    with pytest.raises(KeyError), attending(model, layout=None):  # type: ignore[arg-type]
        assert model.config._attn_implementation == NAME
        raise KeyError
    assert model.config._attn_implementation == before


# The output head


@pytest.mark.parametrize("masked", [None, -1e9, -torch.inf])
@pytest.mark.parametrize("columns", [7, 512])
def test_the_head_by_columns_is_the_whole_head(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, columns: int, masked: float | None
) -> None:
    """With a vocabulary that is not a multiple of the columns, several targets per node, and masked tokens."""
    model = tiny().model
    module = model.get_output_embeddings()
    torch.manual_seed(0)
    if masked is not None:
        module.bias = torch.nn.Parameter(torch.randn(module.weight.shape[0]), requires_grad=False)
        module.bias[::7] = masked
    module.weight[350] = module.weight[120] = 5 * module.weight[8]  # of two equal maxima the first is the argmax
    monkeypatch.setattr(forward, "_CPU_LOGITS", 0)
    monkeypatch.setattr(forward, "_MIN_COLUMNS", columns)
    hidden = torch.cat((torch.randn(19, module.weight.shape[1]), module.weight[8:9]))
    dice = np.random.default_rng(0)
    nodes, targets = dice.integers(0, 20, 60), dice.integers(0, module.weight.shape[0], 60)
    logits = module(hidden)
    targets[:20], nodes[:20] = logits.argmax(-1).numpy(), np.arange(20)
    allowed = np.isfinite(logits[nodes, targets].numpy())
    scores = OutputHead(model.get_output_embeddings(), model.config, greedy=True).scores(hidden, nodes, targets)
    expected = logits.log_softmax(-1)[nodes, targets].numpy()
    # float32 sums over 512 tokens; a masked target's own score is as huge as its logit
    assert np.allclose(scores.logprobs[allowed], expected[allowed], rtol=1e-6, atol=1e-5)
    assert np.array_equal(scores.greedy, logits.argmax(-1)[nodes].numpy() == targets) and scores.greedy[:20].all()
