"""Sizes by formula equal those of the models that transformers builds, and the published ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import evalkit.models.auto  # noqa: F401
from evalkit.models.zoo.named import models, named_model
from evalkit.models.zoo.shapes import cache_bytes_per_token, flops_per_token, parameters, read_shape


def built(config: dict[str, Any]) -> Any:
    """Return the model itself, without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def counted(model: Any) -> tuple[int, int]:
    """In the embedding and head, and in the rest; by the real parameters, tied ones once."""
    every = sum(parameter.numel() for parameter in model.parameters())
    ends = {id(end.weight): end.weight.numel() for end in (model.get_input_embeddings(), model.get_output_embeddings())}
    return sum(ends.values()), every - sum(ends.values())


@pytest.mark.parametrize("name", [model.name for model in models()])
def test_parameters_are_those_of_the_built_model(name: str) -> None:
    model = named_model(name)
    assert counted(built(model.config)) == tuple(parameters(model.shape))


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("llama-125m-vanilla", 125_015_808),
        ("llama-125m-vanilla-4h", 125_015_808),
        ("llama-125m-cog", 125_015_808),
        ("llama-125m-intg", 125_015_808),
        ("llama-125m-diff", 125_015_808 + 5_760),
        ("llama-125m-diff-all", 125_015_808 + 11_520),
        # λ's four vectors and the norm's weight over maps of 48 channels in place of 96
        ("llama-125m-diff-keep", 125_015_808 + 2_880),
        ("llama-125m-diff-all-keep", 125_015_808 + 5_760),
        ("llama-125m-intg-full-head", 125_015_808),
        ("qwen2-125m-intg-all", 125_015_808),
        ("pythia-125m-intg-all-full-head", 125_020_416),
        ("llama-1.2b-intg-all-full-head", 1_195_993_088),
        # Of 64 channels to a head: 11 layers of 4 × 32 + 2 × 32
        ("llama-1.2b-diff-keep", 1_195_993_088 + 2_112),
        ("qwen2-125m-vanilla", 125_015_808),
        ("pythia-125m-vanilla", 125_020_416),
        ("llama-1.2b-vanilla", 1_195_993_088),
        ("llama-1.2b-intg", 1_195_993_088),
    ],
)
def test_published_sizes(name: str, total: int) -> None:
    assert parameters(named_model(name).shape).total == total


def config_of(kind: str, **changes: object) -> dict[str, Any]:
    small = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    return {"model_type": kind} | small | changes


@pytest.mark.parametrize(
    "config",
    [
        config_of("llama"),
        config_of("llama", num_key_value_heads=2, head_dim=20, attention_bias=True, mlp_bias=True),
        config_of("llama", num_key_value_heads=1, tie_word_embeddings=True),
        config_of("qwen2", num_key_value_heads=2),
        config_of("gpt_neox"),
        config_of("gpt_neox", attention_bias=False, tie_word_embeddings=True),
        config_of("evalkit_llama", num_key_value_heads=2, attention_variant="differential", variant_layers=[0, 2],
                  diff_heads="halve", diff_pairing="halves", diff_subln="plain", diff_subln_eps=1e-5,
                  lambda_index="relative"),
        config_of("evalkit_qwen2", num_key_value_heads=1, attention_variant="differential", variant_layers=[1],
                  diff_heads="keep", diff_pairing="adjacent", diff_subln="affine", diff_subln_eps=1e-5,
                  lambda_index="absolute"),
    ],
)  # fmt: skip
def test_parameters_of_other_shapes(config: dict[str, Any]) -> None:
    """Keys missing from a config have transformers' defaults."""
    assert counted(built(config)) == tuple(parameters(read_shape(config)))


def test_flops_by_hand() -> None:
    """One layer, written out: products, and pairs of a triangle."""
    shape = read_shape(config_of("llama", num_hidden_layers=1, num_key_value_heads=2, tie_word_embeddings=True))
    length, head = 10, 12
    matrices = 48 * 48 * 2 + 48 * 24 * 2 + 3 * 48 * 80
    pairs = length * (length + 1) // 2
    whole = length * 2 * (matrices + 96 * 48) + pairs * 4 * (2 * head + 2 * head)
    assert flops_per_token(shape, length) * length == whole


def test_cache() -> None:
    shape = named_model("llama-125m-intg").shape
    assert cache_bytes_per_token(shape, "bfloat16") == 2 * 20 * 768 * 2
    grouped = read_shape(config_of("qwen2", num_key_value_heads=2))
    assert cache_bytes_per_token(grouped, "float32") == 2 * 3 * 2 * 12 * 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (config_of("gpt2"), "model_type is 'gpt2'; expected llama, qwen2, gpt_neox"),
        ({}, "model_type is 'None'"),
        (config_of("llama", hidden_size=None), "'hidden_size' is missing"),
        (config_of("llama", vocab_size=True), "vocab_size is True; expected a whole number"),
        (config_of("gpt_neox", hidden_size=50), "hidden_size 50 is not divisible"),
        (config_of("gpt_neox", rope_parameters={"partial_rotary_factor": "much"}), "partial_rotary_factor is 'much'"),
        (config_of("evalkit_llama"), "attention_variant"),
        (config_of("llama", num_hidden_layers=10**12), "num_hidden_layers is 1.*; expected at most 10,000"),
    ],
)
def test_invalid_configs(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_shape(config)
