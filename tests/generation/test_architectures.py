"""Other architectures than this project's: sliding windows, learned positions, ALiBi, experts; states are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from evalkit.errors import CheckpointError
from evalkit.generation.greedy import Generator
from tests.generation.made import by_transformers, prompts, tokens

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


@pytest.mark.parametrize("kind", KINDS)
def test_it_gives_what_transformers_gives(kind: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | KINDS[kind]))
    model = AutoModelForCausalLM.from_config(config).eval()
    many = tokens(7, 40, 1, 23, 39, 24) + tokens(37, 41, beginning=20)
    found = Generator(model, chunk=8).generate(prompts(many))
    assert [one.tokens for one in found] == [by_transformers(model, ids) for ids in many]
    assert found[-1].reused == 16


def test_a_state_is_refused() -> None:
    config = AutoConfig.for_model("mamba", vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(CheckpointError, match="MambaForCausalLM keeps a state in place of each token's keys"):
        Generator(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("kind", "trouble"),
    [
        ("modernbert-decoder", "ModernBertDecoderForCausalLM does more after its base model than its output head"),
        ("openai-gpt", "OpenAIGPTLMHeadModel keeps no keys and values"),
        ("minimax", "MiniMaxForCausalLM does not run as evalkit generates"),
    ],
)
def test_what_it_cannot_serve_is_refused(kind: str, trouble: str) -> None:
    torch.manual_seed(0)
    settings = SIZES | {"num_local_experts": 2, "cls_token_id": 0, "sep_token_id": 0, "n_embd": 64, "n_head": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()
    with pytest.raises(CheckpointError, match=trouble):
        Generator(model)
