"""Maps of every attention equal those of transformers and of the variants' formulas; the check finds small errors."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    MambaConfig,
    RwkvConfig,
)

from evalkit.attention import attention_calls
from evalkit.attention.attention_calls import NAME, CallMap, MapBlocks, Unrecorded, recording
from evalkit.attention.map_blocks import MapReader, attention_map, stream_attention_maps
from evalkit.compatibility.transformers import attention_of
from evalkit.errors import CheckpointError, UsageError
from tests.attention.architectures import model_named
from tests.models.variants import literal
from tests.models.variants.building import FAMILIES, LAYERS, VANILLA, VARIANTS, causal, model_of
from tests.models.variants.building import attention_of as attention_module

TOKENS = np.arange(3, 26)
IDS = torch.arange(3, 15).repeat(2, 1)
ODD = 1237
"""Maximum elements of a block such that blocks end at odd places."""


def fail(line: str) -> None:
    pytest.fail(line)


def maps_of(reader: MapReader, tokens: Any = TOKENS, layers: Any = None) -> dict[int, torch.Tensor]:
    maps: dict[int, torch.Tensor] = {}
    chosen = reader.layers if layers is None else layers
    reader.read(tokens, chosen, lambda layer, blocks: maps.update({layer: blocks.whole()}))
    return maps


def recorded(model: Any, ids: Any = TOKENS[None], **inputs: Any) -> Any:
    """Return the maps that transformers itself records, [batch, heads, query, key] of each layer."""
    before = attention_of(model.config)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(torch.as_tensor(ids), output_attentions=True, use_cache=False, **inputs).attentions
    model.set_attn_implementation(before)
    return maps


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_maps_are_those_that_transformers_records(family: str) -> None:
    model = model_of(family, VANILLA, initializer_range=0.08)
    maps = maps_of(MapReader(model, fail))
    for layer, [expected] in enumerate(recorded(model)):
        assert expected.max(-1).values[:, 5:].median() > 0.15, "the maps are nearly uniform, so errors would not show"
        assert close(maps[layer], expected)
    padding = torch.ones_like(IDS)
    padding[0, :4] = 0
    streamed: dict[int, torch.Tensor] = {}
    stream_attention_maps(model, IDS, streamed.__setitem__, attention_mask=padding)
    assert all(torch.equal(streamed[n], m) for n, m in enumerate(recorded(model, IDS, attention_mask=padding)))


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "gpt2", "bamba", "bloom"])
def test_architectures(name: str) -> None:
    """With windows, soft caps, sinks, layers without attention; the last one does not use transformers' registry."""
    model, lines = model_named(name), list[str]()
    reader = MapReader(model, lines.append)
    maps, expected = maps_of(reader), recorded(model)
    assert list(maps) == [*reader.layers] == ([1] if name == "bamba" else [0, 1])
    outside = name == "bloom"
    assert (reader.kind, len(lines)) == (("eager", 1) if outside else ("blocks", 0))
    assert all(close(seen, each[0]) for seen, each in zip(maps.values(), expected, strict=True))
    streamed: dict[int, torch.Tensor] = {}
    stream_attention_maps(model, torch.tensor(TOKENS[None]), streamed.__setitem__)
    assert all(torch.equal(seen, each) for seen, each in zip(streamed.values(), expected, strict=True))
    if name in ("gemma2", "gpt_oss"):
        assert (maps[0][:, 10, :7] == 0).all(), "the window of 4 tokens is not applied"
    if name == "gpt_oss":
        assert (maps[0].sum(-1) < 0.99).any(), "sinks take no weight"
    odd = maps_of(MapReader(model, lines.append, elements=333))
    assert all(close(odd[layer], maps[layer]) for layer in maps)
    reader.check(TOKENS)
    assert len(lines) == 2 * outside


@pytest.mark.parametrize(
    ("family", "variant"), [*(("llama", variant) for variant in VARIANTS), ("gpt_neox", "cog"), ("qwen2", "integral")]
)
def test_maps_of_variants_are_those_of_the_formulas(family: str, variant: str) -> None:
    model, scene = model_of(family, VARIANTS[variant]), causal(1, 23)
    inputs: dict[int, torch.Tensor] = {}
    for layer in model.config.variant_layers:
        attention_module(model, layer).register_forward_pre_hook(
            lambda _, args, given, layer=layer: inputs.update({layer: (*args, given.get("hidden_states"))[0]}) or None,
            with_kwargs=True,
        )
    maps = maps_of(MapReader(model, fail, elements=ODD), scene.ids[0].numpy())
    for layer in model.config.variant_layers:
        with torch.no_grad():
            _, expected = literal.attention(
                attention_module(model, layer), layer, inputs[layer][0], scene.positions[0], scene.seen[0]
            )
        assert maps[layer].shape == expected.shape
        assert (expected < 0).any() == (variant.split("-")[0] in ("cog", "differential"))
        assert close(maps[layer].double(), expected)
        # Whose earlier layers round otherwise
        assert torch.allclose(attention_map(model, scene.ids[:1], layer)[0].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", ["vanilla", "differential-keep", "integral-probabilities"])
def test_the_size_of_blocks_and_single_heads_do_not_matter(variant: str) -> None:
    model = model_of("llama", VARIANTS.get(variant, VANILLA))
    whole = maps_of(MapReader(model, fail, elements=2**24))
    counts: list[int] = []

    def use(layer: int, seen: MapBlocks) -> None:
        blocks = list(seen.blocks())
        counts.append(len(blocks))
        starts = [start for start, _ in blocks]
        assert starts == np.cumsum([0, *(block.shape[1] for _, block in blocks)])[:-1].tolist()
        calls = 2 * seen.heads if layer and variant.startswith(("diff", "integral-")) else seen.heads
        assert all(block.shape[1] == 1 or calls * block[0].numel() <= ODD for _, block in blocks)
        assert close(seen.whole(), whole[layer])
        assert all(close(seen.head(head), whole[layer][head]) for head in range(seen.heads))

    MapReader(model, fail, elements=ODD).read(TOKENS, range(LAYERS), use)
    assert 1 < min(counts) < 23
    rows = maps_of(MapReader(model, fail, elements=1))
    assert all(close(rows[layer], whole[layer]) for layer in whole)
    assert maps_of(MapReader(model, fail), [5])[1].shape[1:] == (1, 1)


def test_half_precision_is_read_in_float32_and_rows_of_differential_attention_sum_to_one_less_lambda() -> None:
    model = model_of("llama", VARIANTS["differential"], dtype=torch.bfloat16)
    maps = maps_of(MapReader(model, fail))
    assert all(seen.dtype == torch.float32 for seen in maps.values())
    with torch.no_grad():
        weight = attention_module(model, 1)._lambda(torch.bfloat16)
    assert close(maps[1].sum(-1), 1 - weight.float().expand_as(maps[1].sum(-1)))


def test_no_map_outlives_its_turn_and_later_layers_are_not_run() -> None:
    model = model_of("llama", VARIANTS["integral"])
    last: list[Any] = []

    def use(layer: int, seen: torch.Tensor) -> None:
        gc.collect()
        assert layer == len(last) and all(earlier() is None for earlier in last)
        last.append(weakref.ref(seen))

    stream_attention_maps(model, IDS, use)
    assert len(last) == 3
    model.model.layers[2].mlp.register_forward_hook(lambda *_: pytest.fail("layer 2 ran"))
    assert attention_map(model, IDS, 1).shape == (2, 8, 12, 12)


def test_models_and_layers_without_maps() -> None:
    model = model_of("llama", VANILLA)
    for call in (lambda: attention_map(model, IDS, 7), lambda: maps_of(MapReader(model, fail), layers=[7])):
        with pytest.raises(UsageError, match="no attention layer 7"):
            call()
    size = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
    diff = DiffLlamaForCausalLM(DiffLlamaConfig(**size, intermediate_size=24, num_attention_heads=4))
    with pytest.raises(CheckpointError, match="evalkit models convert"):
        attention_map(diff, IDS, 0)
    for config in (MambaConfig(**size), RwkvConfig(**size)):
        model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(CheckpointError, match=type(model).__name__):
            MapReader(model, fail)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_passes_and_finds_a_wrong_scale(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """A reader that shall pass fails the test if the check says anything."""
    for variant in ("vanilla", *VARIANTS):
        MapReader(model_of("llama", VARIANTS.get(variant, VANILLA), dtype=dtype), fail).check(TOKENS)

    def wrong(scale: float, **arguments: Any) -> CallMap:
        return CallMap(scale=scale * 1.001, **arguments)

    model, lines = model_of("llama", VANILLA, dtype=dtype, initializer_range=0.15), list[str]()
    monkeypatch.setattr(attention_calls, "CallMap", wrong)
    reader = MapReader(model, lines.append)
    for _ in range(2):
        reader.check(TOKENS)
    assert (len(lines), reader.kind) == (1, "eager")
    eager = recorded(model)
    assert all(torch.equal(seen, eager[layer][0].float()) for layer, seen in maps_of(reader).items())


def test_an_error_of_one_layer_is_not_one_of_later_layers() -> None:
    """Each layer is compared with the inputs that it has under eager attention."""
    model = model_of("llama", VANILLA)
    model.model.layers[0].self_attn.o_proj.register_forward_hook(
        lambda _, __, out: out * (1.5 if model.config._attn_implementation == "eager" else 1.0)
    )
    MapReader(model, fail).check(TOKENS)


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 0),  # code that does not use the registry
        ({}, 2),  # two calls are one map only where the module combines maps
        ({"position_bias": torch.zeros(1, 2, 5, 5)}, 1),
    ],
)
def test_what_is_not_recorded(settings: Any, count: int) -> None:
    module, states = SimpleNamespace(is_causal=True, num_key_value_groups=1), torch.randn(1, 2, 5, 4)
    with recording(model_of("llama", VANILLA), [module]) as calls, pytest.raises(Unrecorded):
        for _ in range(count):
            AttentionInterface()[NAME](module, states, states, states, None, **settings)
        calls.take(module)
