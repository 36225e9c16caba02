"""The variants as ordinary transformers models: saved, loaded, sharded, trained and inspected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from evalkit.compatibility.transformers import quiet
from evalkit.models.variants.modeling import EvalkitLlamaConfig, EvalkitLlamaForCausalLM, EvalkitQwen2ForCausalLM
from tests.models.variants.building import (
    COG,
    DIFFERENTIAL,
    FAMILIES,
    HEAD_SIZE,
    INTEGRAL,
    VANILLA,
    VARIANTS,
    attention_of,
    causal,
    config_of,
    left_padded,
    model_of,
    plain_of,
    random_ids,
    shape_keys,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


def logits_of(model: Any, scene: Any = None) -> torch.Tensor:
    found: torch.Tensor
    with torch.no_grad():
        found = model(**(scene or causal()).given()).logits
    return found


def saved(model: Any, folder: Path, **settings: Any) -> Path:
    with quiet():
        model.save_pretrained(folder, **settings)
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded(family: str, variant: str, tmp_path: Path) -> None:
    """The same to the last bit: weights, λ, norms and the frequencies, which are not saved."""
    model = model_of(family, VARIANTS[variant])
    saved(model, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert content["model_type"] == f"evalkit_{family}" and content["architectures"] == [type(model).__name__]
    assert {key: content[key] for key in VARIANTS[variant]} == VARIANTS[variant]
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == model.state_dict().keys()
    assert any("lambda_q1" in name for name in stored) == variant.startswith("differential")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded) is type(model) and loaded.config.variant() == model.config.variant()
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_vanilla_is_its_backbone() -> None:
    for family in FAMILIES:
        model = model_of(family, VANILLA)
        assert torch.equal(logits_of(model), logits_of(plain_of(family, model)))


@pytest.mark.parametrize("family", FAMILIES)
def test_shards(family: str, tmp_path: Path) -> None:
    model = model_of(family, DIFFERENTIAL)
    saved(model, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path)), logits_of(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_embeddings(family: str, tmp_path: Path) -> None:
    model = model_of(family, INTEGRAL, tie_word_embeddings=True)
    loaded = AutoModelForCausalLM.from_pretrained(saved(model, tmp_path))
    for each in (model, loaded):
        assert each.get_output_embeddings().weight is each.get_input_embeddings().weight
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_config_is_all_that_from_config_needs() -> None:
    for family in FAMILIES:
        for variant in VARIANTS.values():
            model = AutoModelForCausalLM.from_config(config_of(family, variant))
            assert model.config.variant().name == variant["attention_variant"]


def test_loading_with_a_config_of_ones_own(tmp_path: Path) -> None:
    """E.g. with a longer context; the attention is what that config says."""
    model = model_of("llama", INTEGRAL)
    saved(model, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is EvalkitLlamaConfig
    config.num_signals = 4
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert attention_of(loaded, 1).rotary_emb.inv_freq.shape == (2,)
    assert not torch.equal(logits_of(loaded), logits_of(model))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing(family: str, variant: str) -> None:
    """What is computed twice is the same twice: equal gradients."""
    model = model_of(family, VARIANTS[variant]).train()
    ids, gradients = random_ids(2, 9), []
    for checkpointing in (False, True):
        if checkpointing:
            # Its name until transformers 6; the old one warns since 5.20 or so
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
            assert all(layer.gradient_checkpointing for layer in model.base_model.layers)
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other) and one.abs().max() > 0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_implementations_agree(family: str, variant: str) -> None:
    """float32: 2e-5 for logits up to 6, some forty roundings; measured 4e-6. Padding's own logits say nothing."""
    for scene in (causal(), left_padded()):
        model = model_of(family, VARIANTS[variant])
        one = logits_of(model, scene)
        model.set_attn_implementation("eager")
        other = logits_of(model, scene)
        torch.testing.assert_close(one[scene.real], other[scene.real], rtol=0, atol=2e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_maps(family: str, variant: str) -> None:
    """Under eager, `attentions` are the effective maps, signs and all; sums of eleven float32 shares, good to 2e-6."""
    model = model_of(family, VARIANTS[variant], implementation="eager")
    with torch.no_grad():
        maps = model(**causal(2, 11).given(), output_attentions=True).attentions
    heads = 4 if variant == "differential" else 8
    assert [tuple(layer.shape) for layer in maps] == [(2, 8, 11, 11), *[(2, heads, 11, 11)] * 2]
    for layer in (1, 2):
        assert maps[layer].triu(1).eq(0).all()
        sums, sizes = maps[layer].sum(-1), maps[layer].abs().sum(-1)
        if variant == "cog":
            torch.testing.assert_close(sizes, torch.ones_like(sizes), rtol=0, atol=2e-6)
        elif variant.startswith("differential"):
            weight = attention_of(model, layer)._lambda(torch.float32).item()
            torch.testing.assert_close(sums, torch.full_like(sums, 1 - weight), rtol=0, atol=2e-6)
        else:
            torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=2e-6)
        assert bool((maps[layer] < 0).any()) == (variant == "cog" or variant.startswith("differential"))


@pytest.mark.parametrize("heads", ["halve", "keep"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lambda_vectors_begin_small_and_norms_with_one(family: str, heads: str) -> None:
    """λ's vectors ~ N(0, 0.1²). Of n numbers, mean and deviation are within four standard errors."""
    attention = DIFFERENTIAL | {"diff_heads": heads, "variant_layers": list(range(12))}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config_of(family, attention, num_hidden_layers=12))
    vectors = [p for name, p in model.named_parameters() if "lambda_" in name]
    assert len(vectors) == 4 * 12
    numbers = torch.cat(vectors).detach()
    error = 0.1 / len(numbers) ** 0.5
    assert abs(numbers.mean()) < 4 * error and abs(numbers.std() - 0.1) < 4 * error / 2**0.5
    norms = [p for name, p in model.named_parameters() if "subln" in name]
    assert len(norms) == 12 and all(norm.eq(1).all() for norm in norms)


def test_lambda_vectors_that_a_checkpoint_lacks_begin_so_too(tmp_path: Path) -> None:
    """As transformers promises of missing weights, and reports."""
    plain = plain_of("llama", model_of("llama", VANILLA))
    saved(plain, tmp_path)
    attention = DIFFERENTIAL | {"variant_layers": [0, 1, 2]}
    with quiet():
        loaded, info = EvalkitLlamaForCausalLM.from_pretrained(
            tmp_path, config=config_of("llama", attention), output_loading_info=True
        )
    numbers = torch.cat([getattr(attention_of(loaded, 0), f"lambda_{name}") for name in ("q1", "k1", "q2", "k2")])
    assert sum("lambda" in name for name in info["missing_keys"]) == 12
    assert 0.05 < numbers.std() < 0.15 and numbers.abs().max() < 0.5  # 64 numbers: five standard errors


@pytest.mark.parametrize("variant", ["vanilla", *VARIANTS])
def test_weights_begin_as_the_backbones(variant: str) -> None:
    """Projections ~ N(0, initializer_range²) in variant layers too; the same seed gives the same weights."""
    config = config_of("llama", {"vanilla": VANILLA, **VARIANTS}[variant], initializer_range=0.05)
    models = []
    for seed in (3, 3, 4):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            models.append(AutoModelForCausalLM.from_config(config))
    first, again, other = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for layer in range(3):
        weight = first[f"model.layers.{layer}.self_attn.q_proj.weight"]
        assert not torch.equal(weight, other[f"model.layers.{layer}.self_attn.q_proj.weight"])
        assert abs(weight.std() - 0.05) < 4 * 0.05 / (2 * weight.numel()) ** 0.5
    assert not torch.equal(
        first["model.layers.1.self_attn.q_proj.weight"], first["model.layers.2.self_attn.q_proj.weight"]
    )


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family: str, variant: str, implementation: str) -> None:
    """Near float32 with the same weights, in the norm of all logits; unrelated logits would be at 1.4.

    3 %, some eight of bfloat16's roundings, 2^-8; measured 2.0 %, and 1.6 % for the backbones. Cog is given 10 %
    (measured 6.2 %): a rounding that brings a logit across zero changes the sign of its weight, wherever it is done.
    """
    model = model_of(family, VARIANTS[variant], implementation=implementation, dtype=torch.bfloat16)
    for scene in (causal(), left_padded()):
        found = logits_of(model, scene)
        assert found.dtype == torch.bfloat16 and found.isfinite().all()
        wide = logits_of(model.float(), scene)
        model.bfloat16()
        error = (found.float() - wide)[scene.real].norm() / wide[scene.real].norm()
        assert 1e-4 < error < (0.1 if variant == "cog" else 0.03)


@pytest.mark.parametrize("attention", [INTEGRAL, INTEGRAL | {"num_signals": 4}, DIFFERENTIAL | {"diff_heads": "keep"}])
@pytest.mark.parametrize("family", FAMILIES)
def test_yarn(family: str, attention: dict[str, Any], tmp_path: Path) -> None:
    """Signals stretch as heads of their own size do, before and after saving."""
    rope = YARN | ({"partial_rotary_factor": 1.0} if family == "gpt_neox" else {})
    model = model_of(family, attention, rope_parameters=rope)
    size = HEAD_SIZE // attention.get("num_signals", 2)
    other = LlamaConfig(
        **shape_keys("llama", num_attention_heads=1, num_key_value_heads=1, hidden_size=size), head_dim=size
    )
    other.rope_parameters = dict(YARN)
    frequencies, scaling = ROPE_INIT_FUNCTIONS["yarn"](other)
    assert frequencies.shape == (size // 2,) and scaling > 1
    unscaled = 1.0 / 5000.0 ** (torch.arange(0, size, 2) / size)
    assert not torch.allclose(frequencies, unscaled)
    loaded = AutoModelForCausalLM.from_pretrained(saved(model, tmp_path))
    for each in (model, loaded):
        for layer in (1, 2):
            rotary = attention_of(each, layer).rotary_emb
            assert torch.equal(rotary.inv_freq, frequencies) and rotary.attention_scaling == scaling
            assert torch.equal(rotary.original_inv_freq, frequencies)
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_stretching_a_trained_model(tmp_path: Path) -> None:
    """From 2K to 8K without training: YaRN is given while loading, and reaches the signals."""
    model = model_of("llama", INTEGRAL)
    saved(model, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.rope_parameters = dict(YARN)
    stretched = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    expected = model_of("llama", INTEGRAL, rope_parameters=dict(YARN))
    assert torch.equal(logits_of(stretched), logits_of(expected))
    assert not torch.equal(logits_of(stretched), logits_of(model))


@pytest.mark.parametrize("attention", [COG, DIFFERENTIAL], ids=["cog", "differential"])
@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_refused(family: str, attention: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has no attention_dropout; set it to 0"):
        AutoModelForCausalLM.from_config(config_of(family, attention, attention_dropout=0.1))
    AutoModelForCausalLM.from_config(config_of(family, INTEGRAL, attention_dropout=0.1))


def test_dropout_of_integral_attention_is_of_training_only() -> None:
    model = model_of("llama", INTEGRAL, attention_dropout=0.5)
    assert torch.equal(logits_of(model), logits_of(model_of("llama", INTEGRAL)))
    model.train()
    assert not torch.equal(logits_of(model), logits_of(model))


@pytest.mark.parametrize("variant", VARIANTS)
def test_sliding_windows_are_refused(variant: str) -> None:
    """Of layers that have another attention; a vanilla layer may have one."""
    window = {"use_sliding_window": True, "sliding_window": 4}
    with pytest.raises(ValueError, match="has no sliding window; set use_sliding_window to false"):
        EvalkitQwen2ForCausalLM(config_of("qwen2", VARIANTS[variant], max_window_layers=0, **window))
    vanilla_only = config_of(
        "qwen2", VARIANTS[variant], layer_types=["sliding_attention", *["full_attention"] * 2], **window
    )
    assert EvalkitQwen2ForCausalLM(vanilla_only).model.layers[0].self_attn.sliding_window == 4


def test_invalid_settings_are_rejected_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.LlamaForCausalLM.__init__", lambda *_: pytest.fail("built"))
    with pytest.raises(ValueError, match="3 signals do not divide a head of 16 channels"):
        EvalkitLlamaForCausalLM(config_of("llama", INTEGRAL | {"num_signals": 3}))


def test_flex_attention_is_refused() -> None:
    model = model_of("llama", COG)
    with pytest.raises(ValueError, match="flex"):
        model.set_attn_implementation("flex_attention")
        logits_of(model)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("attention", ["differential", "integral", "integral-probabilities"])
def test_logits_past_float16_before_they_are_scaled(attention: str, implementation: str) -> None:
    """transformers' eager attention scales a product that float16 may not hold any more."""
    model = model_of("llama", VARIANTS[attention], implementation=implementation, dtype=torch.float16)
    module = attention_of(model, 1)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 6, 16, generator=draw) for _ in range(3))
    query, key = query.sign() * 96, key.sign() * 96
    key[:, :, :] = query * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])[:, None]
    query[..., 0], scale = 95.0, 16**-0.5
    module.num_key_value_groups = 1
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    mask = torch.zeros(1, 1, 6, 6).masked_fill(~visible, torch.finfo(torch.float16).min).half()
    found, _ = module._softmax(query.half(), key.half(), value.half(), mask, scale, {})
    logits = query.double() @ key.double().mT
    assert logits.abs().max() > 2 * 65504
    expected = (logits * scale).masked_fill(~visible, -torch.inf).softmax(-1) @ value.half().double()
    torch.testing.assert_close(found.double(), expected.transpose(1, 2), rtol=0, atol=2e-3)
