"""Maps in blocks equal those of transformers and of the variants' formulas, whatever the blocks' size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, RwkvConfig

from evalkit.benchmarks.attention.attention_calls import MapBlocks
from evalkit.benchmarks.attention.map_blocks import MapReader
from evalkit.compatibility.transformers import attention_of
from evalkit.errors import CheckpointError, UsageError
from tests.analysis.architectures import model_named
from tests.models.variants import literal
from tests.models.variants.building import FAMILIES, LAYERS, VANILLA, VARIANTS, causal, model_of
from tests.models.variants.building import attention_of as attention_module

TOKENS = np.arange(3, 26)
ODD = 1237
"""Maximum elements of a block such that blocks end at odd places."""


def fail(line: str) -> None:
    pytest.fail(line)


def maps_of(reader: MapReader, tokens: Any = TOKENS, layers: Any = None) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    reader.read(
        tokens, reader.layers if layers is None else layers, lambda layer, seen: found.update({layer: seen.whole()})
    )
    return found


def recorded(model: Any, tokens: Any = TOKENS) -> list[torch.Tensor]:
    """Return the maps that transformers itself records."""
    before = attention_of(model.config)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(torch.tensor(tokens)[None], output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(before)
    return [seen[0] for seen in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_maps_are_those_that_transformers_records(family: str) -> None:
    model = model_of(family, VANILLA, initializer_range=0.08)
    reader = MapReader(model, fail)
    found, expected = maps_of(reader), recorded(model)
    assert reader.layers == (0, 1, 2)
    assert [len(seen) for seen in found.values()] == [8, 8, 8]
    for layer, seen in enumerate(expected):
        assert seen.max(-1).values[:, 5:].median() > 0.15, "the maps are nearly uniform, so errors would not show"
        assert torch.allclose(found[layer], seen, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "gpt2"])
def test_windows_soft_caps_and_sinks(name: str) -> None:
    model = model_named(name)
    reader = MapReader(model, fail)
    found, expected = maps_of(reader), recorded(model)
    for layer, seen in enumerate(expected):
        # Two layers of rounding, in logits of up to 20
        assert torch.allclose(found[layer], seen, atol=1e-6, rtol=0)
    if name != "gpt2":
        assert (found[0][:, 10, :7] == 0).all(), "the window of 4 tokens is not applied"
    if name == "gpt_oss":
        assert (found[0].sum(-1) < 0.99).any(), "sinks take no weight"


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon"])
def test_models_without_the_registry_are_read_with_eager_attention(name: str) -> None:
    model = model_named(name)
    lines: list[str] = []
    reader = MapReader(model, lines.append, elements=ODD)
    assert len(lines) == 1
    assert "eager" in lines[0]
    found = maps_of(reader)
    assert [len(seen) for seen in found.values()] == [4, 4]
    assert all(torch.equal(found[layer], seen) for layer, seen in enumerate(recorded(model)))


def test_layers_without_attention_are_not_among_the_layers() -> None:
    model = model_named("bamba")
    reader = MapReader(model, fail)
    assert reader.layers == (1,)
    assert torch.allclose(maps_of(reader)[1], recorded(model)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_maps_of_variants_are_those_of_the_formulas(family: str, variant: str) -> None:
    model = model_of(family, VARIANTS[variant])
    scene = causal(1, 23)
    inputs: dict[int, torch.Tensor] = {}
    for layer in model.config.variant_layers:
        attention_module(model, layer).register_forward_pre_hook(
            lambda _, args, given, layer=layer: inputs.update({layer: (*args, given.get("hidden_states"))[0]}) or None,
            with_kwargs=True,
        )
    reader = MapReader(model, fail, elements=ODD)
    found = maps_of(reader, scene.ids[0].numpy())
    for layer in model.config.variant_layers:
        with torch.no_grad():
            _, expected = literal.attention(
                attention_module(model, layer), layer, inputs[layer][0], scene.positions[0], scene.seen[0]
            )
        assert found[layer].shape == expected.shape
        assert (expected < 0).any() == (variant.split("-")[0] in ("cog", "differential"))
        assert torch.allclose(found[layer].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("variant", ["vanilla", *VARIANTS])
def test_the_size_of_blocks_and_single_heads_do_not_matter(variant: str) -> None:
    model = model_of("llama", VARIANTS.get(variant, VANILLA))
    whole = maps_of(MapReader(model, fail, elements=2**24))
    # One row; blocks that end at odd places
    for elements in (1, ODD):
        counts: list[int] = []

        def use(layer: int, seen: MapBlocks, elements: int = elements, counts: list[int] = counts) -> None:
            blocks = list(seen.blocks())
            counts.append(len(blocks))
            starts = [start for start, _ in blocks]
            assert starts == np.cumsum([0, *(block.shape[1] for _, block in blocks)])[:-1].tolist()
            calls = 2 * seen.heads if layer and variant.startswith(("diff", "integral-")) else seen.heads
            assert all(block.shape[1] == 1 or calls * block[0].numel() <= elements for _, block in blocks)
            assert torch.allclose(seen.whole(), whole[layer], atol=1e-6, rtol=0)
            for head in range(seen.heads):
                assert torch.allclose(seen.head(head), whole[layer][head], atol=1e-6, rtol=0)

        MapReader(model, fail, elements=elements).read(TOKENS, range(LAYERS), use)
        assert max(counts) == 23 if elements == 1 else 1 < min(counts) < 23


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "bloom"])
def test_blocks_of_masked_and_whole_maps(name: str) -> None:
    model = model_named(name)
    one, odd = (maps_of(MapReader(model, lambda _: None, elements=size)) for size in (2**24, 333))
    assert all(torch.allclose(one[layer], odd[layer], atol=1e-6, rtol=0) for layer in one)


@pytest.mark.parametrize("variant", ["vanilla", "cog", "differential", "integral-probabilities"])
def test_hidden_states_are_the_models_own(variant: str) -> None:
    model = model_of("llama", VARIANTS.get(variant, VANILLA))
    after: list[torch.Tensor] = []
    model.model.layers[1].register_forward_hook(lambda _, __, out: after.append(out[0]))
    maps_of(MapReader(model, fail))
    with torch.no_grad():
        model(torch.tensor(TOKENS)[None])
    assert attention_of(model.config) == "sdpa"
    assert torch.equal(after[-2], after[-1])


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_hidden_states_under_soft_caps_and_sinks(name: str) -> None:
    model = model_named(name)
    model.set_attn_implementation("eager")
    after: list[torch.Tensor] = []
    model.model.layers[0].register_forward_hook(lambda _, __, out: after.append(out[0]))
    maps_of(MapReader(model, fail, elements=ODD))
    with torch.no_grad():
        model(torch.tensor(TOKENS)[None])
    assert torch.allclose(after[-2], after[-1], atol=1e-5)


def test_half_precision_is_read_in_float32() -> None:
    model = model_of("llama", VARIANTS["differential"], dtype=torch.bfloat16)
    found = maps_of(MapReader(model, fail))
    assert all(seen.dtype == torch.float32 for seen in found.values())
    layer = attention_module(model, 1)
    # The model's own λ, which it computes in its dtype; rows of the two maps sum to 1
    sums = found[1].sum(-1)
    with torch.no_grad():
        weight = layer._lambda(torch.bfloat16)
    assert torch.allclose(sums, 1 - weight.float().expand_as(sums), atol=1e-6)


def test_layers_past_the_last_one_are_not_run() -> None:
    model = model_of("llama", VANILLA)
    reader = MapReader(model, fail)
    model.model.layers[2].mlp.register_forward_hook(lambda *_: pytest.fail("layer 2 ran"))
    assert list(maps_of(reader, layers=[1])) == [1]
    assert maps_of(reader, layers=[]) == {}


def test_one_token() -> None:
    found = maps_of(MapReader(model_of("llama", VARIANTS["cog"]), fail), [5])
    assert all(torch.equal(seen.abs(), torch.ones(8, 1, 1)) for seen in found.values())


def test_errors() -> None:
    with pytest.raises(UsageError, match="no attention layer 7"):
        maps_of(MapReader(model_of("llama", VANILLA), fail), layers=[7])
    for config in (MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2),
                   RwkvConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2)):  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(CheckpointError, match=type(model).__name__):
            MapReader(model, fail)
