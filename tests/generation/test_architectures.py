"""Other architectures than this project's: sliding windows, learned positions, ALiBi, experts; states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from evalkit.generation.generator import Generator
from tests.generation.made import by_transformers, prompts, tokens
from tests.marks import fast

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SLIDING = {"sliding_window": 9}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "falcon": {"alibi": True},
    "phi": {},
    "phi3": SLIDING,
    "gemma2": SLIDING | {"head_dim": 16},
    "gemma3_text": SLIDING | {"head_dim": 16},
    "qwen2": SLIDING | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "mixtral": SLIDING | {"num_local_experts": 2},
    "olmo2": {},
    "cohere2": SLIDING,
    "stablelm": {},
    "diffllama": {},
    "llama4_text": {"num_local_experts": 2, "head_dim": 16, "intermediate_size_mlp": 96},
    "afmoe": SLIDING | {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "head_dim": 16},
    "doge": {},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
}


@pytest.mark.parametrize("kind", fast(list(KINDS)[::2], KINDS))
def test_it_gives_what_transformers_gives(kind: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | KINDS[kind]))
    model = AutoModelForCausalLM.from_config(config).eval()
    many = tokens(7, 40, 1, 23, 39, 24) + tokens(37, 41, beginning=20)
    found = Generator(model, chunk=8).generate(prompts(many))
    assert [one.tokens for one in found] == [by_transformers(model, ids) for ids in many]
    assert found[-1].reused == 16


TRAINED = 32
"""Tokens of the window at which short frequencies change to long ones."""
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": TRAINED}


def with_longrope(kind: str, channels: int) -> Any:
    """A model with very different short and long frequencies."""
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * channels, "long_factor": [1.5 + 0.5 * place for place in range(channels)]}
    rope = LONGROPE | factors | {"factor": 8.0, "short_mscale": 1.1, "long_mscale": 1.3}
    own = {"original_max_position_embeddings": TRAINED} if kind == "phi3" else {"num_local_experts": 2}
    settings = SIZES | own | {"rope_parameters": rope, "rope_scaling": rope, "sliding_window": None}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()


@pytest.mark.parametrize("kind", ["phi3", "phimoe", "llama"])
def test_frequencies_that_change_with_the_length(kind: str) -> None:
    """Phi-3's `generate` computes all keys anew where the text passes the trained window, with a prompt of any length.

    The prompts end well within that window (12), within reach of its end, and beyond.
    """
    model = with_longrope(kind, 8)
    many = tokens(12, 25, 31, 32, 33, 60) + tokens(31, 40, beginning=20)
    expected = [by_transformers(model, ids) for ids in many]
    generator = Generator(model, chunk=8)
    assert [one.tokens for one in generator.generate(prompts(many))] == expected
    assert [generator.generate([prompt])[0].tokens for prompt in prompts(many)] == expected


def test_a_text_that_ends_at_the_trained_window() -> None:
    model = with_longrope("phi3", 8)
    [ids] = tokens(20)
    whole = by_transformers(model, ids, 20)
    generator = Generator(model)
    for most in range(10, 16):
        assert generator.generate(prompts([ids], most))[0].tokens == whole[:most]


WITHOUT_OUR_CACHE: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"state_size": 4}, "MambaForCausalLM has a recurrent state and no key-value cache"),
    "recurrent_gemma": (
        {"lru_width": 64, "attention_window_size": 9},
        "RecurrentGemmaForCausalLM has a recurrent",
    ),
    "openai-gpt": ({"n_embd": 64, "n_head": 4, "n_layer": 2}, "OpenAIGPTLMHeadModel has no key-value cache"),
    "minimax": ({"num_local_experts": 2}, "MiniMaxForCausalLM "),
    "falcon_h1": (
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
        "FalconH1ForCausalLM ",
    ),
}


def made(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | settings))).eval()


@pytest.mark.parametrize("kind", WITHOUT_OUR_CACHE)
def test_what_keeps_no_keys_and_values_is_generated_by_transformers(kind: str) -> None:
    """Prompt by prompt, with the same stops; its generation config is ignored and restored."""
    settings, reason = WITHOUT_OUR_CACHE[kind]
    model = made(kind, **settings)
    model.generation_config.repetition_penalty = 1.0
    many = tokens(7, 40, 23)
    expected = [by_transformers(model, ids) for ids in many]
    generator = Generator(model, chunk=8)
    assert generator.without_cache.startswith(reason)
    assert (generator.one_by_one, generator.token_bytes) == (True, 0)
    config = model.generation_config
    config.repetition_penalty = 5.0
    assert [one.tokens for one in generator.generate(prompts(many))] == expected
    assert model.generation_config is config
    ends = frozenset([expected[0][2], expected[1][0]])
    found = generator.generate(prompts(many, ends=ends, barred_first=ends))
    model.generation_config.repetition_penalty = 1.0
    assert [one.tokens for one in found] == [
        by_transformers(model, ids, ends=sorted(ends), barred=True) for ids in many
    ]


def test_logits_that_are_more_than_an_output_head() -> None:
    """ModernBERT's decoder has another layer before its head."""
    model = made("modernbert-decoder", cls_token_id=0, sep_token_id=0)
    generator = Generator(model, chunk=8)
    many = tokens(7, 40, 1, 23)
    assert [one.tokens for one in generator.generate(prompts(many))] == [by_transformers(model, ids) for ids in many]
    assert generator.without_cache == ""
