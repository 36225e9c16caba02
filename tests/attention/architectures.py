"""Tiny models of other architectures, with maps far from uniform, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, BambaConfig, BloomConfig, Gemma2Config, GPT2Config, GptOssConfig

_IDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "vocab_size": 64}
_SHAPE = _IDS | {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "pad_token_id": None}  # fmt: skip

CONFIGS: dict[str, Any] = {
    # A cap of the size of the logits
    "gemma2": Gemma2Config(
        **_SHAPE, head_dim=8, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=8, use_cache=False
    ),
    "gpt_oss": GptOssConfig(**_SHAPE, head_dim=8, sliding_window=4, num_local_experts=2, num_experts_per_tok=1),
    "gpt2": GPT2Config(**_IDS, n_embd=32, n_layer=2, n_head=4),
    "bamba": BambaConfig(**_SHAPE, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1),
    "bloom": BloomConfig(**_IDS, hidden_size=32, n_layer=2, n_head=4),
}


def model_named(name: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
    return model
