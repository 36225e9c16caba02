"""config.json: settings that no class reads, windows without tokens, rotary settings that compute nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from evalkit.compatibility.transformers import causal_language_models, config_class, quiet
from evalkit.errors import CheckpointError
from evalkit.models.loading.checks import register_type
from evalkit.models.loading.configuration import own_config, remarks_of
from evalkit.models.loading.locate import locate
from tests.models.loading import edit_config, load_folder, refused
from tests.models.small import ATTENTIONS, BASES, small
from tests.tiny import VOCABULARY, tiny_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip


def remarks(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return "\n".join(own_config(folder, config, remote=False).remarks)


UNREAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"my_attention": {"kind": "integral"}, "qk_norm": True}, ("my_attention", "qk_norm")),
    ({"use_rope": False}, ("use_rope",)),
    (
        {"softmax": "integral", "norm": 1, "scaling": 0.5, "init_lambda": 0.8, "layers": [1], "loss_lambda": 0.7},
        ("softmax", "norm", "scaling", "init_lambda", "layers", "loss_lambda"),
    ),
    ({"sliding_window_size": 64, "norm_eps": 1e-3}, ("sliding_window_size", "norm_eps")),
    ({"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}, ("sliding_window", "layer_types")),
    ({"rope_interleaved": True}, ("rope_interleaved",)),
    ({"rope_parameters": None, "rope_scaling": {"factor": 2.0}}, ("rope_scaling.factor",)),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "alpha": 2.0}}, ("rope_parameters.alpha",)),
    ({"rope_theta": 5e5}, ("rope_theta",)),  # rope_parameters has another one
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("rope_parameters.rope_type",)),
]


@pytest.mark.parametrize(("changes", "named"), UNREAD)
def test_settings_that_the_class_does_not_read_are_named(
    folder: Path, changes: dict[str, Any], named: tuple[str, ...]
) -> None:
    """A patched checkpoint without its code is a plain one, which the run and its notes say."""
    edit_config(folder, **changes)
    said: list[str] = []
    loaded = load_folder(folder, say=said.append)
    [remark] = loaded.facts()["remarks"]
    assert f"({', '.join(named)}" in remark and "LlamaConfig" in remark and "docs/models.md" in remark
    assert [line for line in said if line.endswith(remark)]
    assert remarks_of(locate(str(folder))) == (remark,)


def test_settings_without_effect_are_no_alarm(folder: Path) -> None:
    """What libraries and trainers write, options that are off, null, and the keys of older versions."""
    edit_config(folder, is_llama_config=True, rope_interleaved=False, pretraining_tp=1, use_mrope=False, qk_norm=None,
                task_specific_params={"text-generation": {"max_length": 50}}, _name_or_path="org/name", n_ctx=256,
                torch_dtype="float32", resid_dropout=0.1, auto_map={"AutoConfig": "own.Config"}, temperature=0.5,
                unsloth_version="2024.9", **{"transformers.js_config": {"dtype": "fp16"}})  # fmt: skip
    assert "remarks" not in load_folder(folder).facts()


PUBLISHED: list[dict[str, Any]] = [
    {"model_type": "gpt2", "n_ctx": 1024, "summary_type": "cls_index", "n_special": 0, "output_past": True,
     "predict_special_tokens": True, "task_specific_params": {"text-generation": {"do_sample": True}}},
    {"model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True},
    {"model_type": "gptj", "rotary": True, "scale_attn_weights": True, "tokenizer_class": "GPT2Tokenizer"},
    {"model_type": "bloom", "n_embed": 64, "masked_softmax_fusion": True, "bias_dropout_fusion": True,
     "attention_softmax_in_fp32": True, "offset_alibi": 100, "skip_bias_add_qkv": False, "seq_length": 2048},
    {"model_type": "qwen2", "use_mrope": False, "use_sliding_window": False, "sliding_window": 32768,
     "rope_theta": 1e6},
    {"model_type": "gemma2", "cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh",
     "sliding_window": 4096, "sliding_window_size": 4096},
    {"model_type": "smollm3", "max_window_layers": 28, "no_rope_layer_interval": 4, "use_sliding_window": False},
    {"model_type": "starcoder2", "activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5,
     "norm_epsilon": 1e-5, "mlp_type": "default", "scale_attn_weights": True, "use_bias": True},
    {"model_type": "cohere", "pool_size": 0, "use_qk_norm": False},
    {"model_type": "cohere2", "order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0,
     "position_embedding_type": "rope_gptj", "use_embedding_sharing": True, "use_gated_activation": True,
     "use_parallel_block": True, "use_parallel_embedding": True, "sliding_window_pattern": 4},
    {"model_type": "deepseek_v3", "ep_size": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
     "num_nextn_predict_layers": 1, "moe_layer_freq": 1},
    {"model_type": "qwen2", "quantization": {"group_size": 64, "bits": 4}},
    {"model_type": "gemma3_text", "sliding_window_pattern": 6, "rope_local_base_freq": 10000, "rope_theta": 1e6},
    {"model_type": "phi3", "rope_scaling": None, "sliding_window": 2047, "attention_bias": False,
     "original_max_position_embeddings": 4096, "auto_map": {"AutoConfig": "own.Config"}, "full_attn_mod": 1,
     "lm_head_bias": False, "interpolate_factor": 1},
    {"model_type": "deepseek_v2", "aux_loss_alpha": 0.001, "seq_aux": True, "scoring_func": "softmax",
     "moe_layer_freq": 1, "rope_theta": 10000, "max_position_embeddings": 163840,
     "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                      "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}},
    {"model_type": "llama", "rope_theta": 5e5, "max_position_embeddings": 131072,
     "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 8192}},
]  # fmt: skip
"""Keys of published checkpoints that their classes read otherwise than as fields, or that have no effect."""


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda config: config["model_type"])
def test_keys_of_published_checkpoints_are_no_alarm(tmp_path: Path, config: dict[str, Any]) -> None:
    assert not remarks(tmp_path, config)
    assert "(my_attention)" in remarks(tmp_path, config | {"my_attention": 1})


@pytest.mark.slow
def test_no_class_writes_what_it_does_not_read(tmp_path: Path) -> None:
    """The default config of every causal language model, as it is saved."""
    checked = 0
    for kind in causal_language_models():
        try:
            with quiet():
                saved = config_class(kind)().to_json_string()
                config_class(kind)(**json.loads(saved)).get_text_config()
        except Exception:  # a default that its own class rejects, or an infinity in it
            continue
        assert not remarks(tmp_path, json.loads(saved)), kind
        checked += 1
    assert checked > 100


@pytest.mark.parametrize("backbone", BASES)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_evalkits_own_settings_are_read(tmp_path: Path, attention: str, backbone: str) -> None:
    config = dict(small(tmp_path, attention, backbone).config)
    register_type(config)
    assert not remarks(tmp_path, config)


def test_code_of_a_checkpoint_reads_its_own_settings(folder: Path) -> None:
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    edit_config(folder, model_type="own", my_attention=1, auto_map={"AutoConfig": "own.OwnConfig"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert own_config(folder, config, remote=True).remarks == ()


# Windows


def of_type(folder: Path, kind: Any, config: Any) -> Path:
    tiny_tokenizer(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind(config).save_pretrained(folder)
    return folder


@pytest.fixture
def mistral(tmp_path: Path) -> Path:
    return of_type(tmp_path / "model", MistralForCausalLM, MistralConfig(**SHAPE, num_key_value_heads=2))


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    return of_type(tmp_path / "model", Qwen2ForCausalLM, Qwen2Config(**SHAPE, num_key_value_heads=2))


def test_windows_without_tokens_are_refused(mistral: Path) -> None:
    for window in (0, -1):
        edit_config(mistral, sliding_window=window)
        refused(mistral, rf"config\.json: sliding_window is {window}")
    edit_config(mistral, sliding_window=1)
    assert load_folder(mistral).model.config.sliding_window == 1
    edit_config(mistral, sliding_window=None, per_layer_config={"0": {"sliding_window": 0}})
    refused(mistral, r"config\.json: sliding_window is 0")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "sliding_window is 0"),
        ({"use_sliding_window": False, "sliding_window": 0}, ""),
        ({"sliding_window": 0}, ""),  # off by default
        ({"use_sliding_window": True, "sliding_window": 0, "layer_types": ["full_attention"] * 2}, ""),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_windows_count_where_layers_have_them(qwen2: Path, changes: dict[str, Any], words: str) -> None:
    edit_config(qwen2, "layer_types")
    edit_config(qwen2, **changes)
    if words:
        refused(qwen2, words)
    else:
        load_folder(qwen2)


def test_windows_of_other_names(tmp_path: Path) -> None:
    """GPT-Neo's window, and chunks of attention."""
    shape = {"num_layers": 2, "num_heads": 4, "hidden_size": 64, "vocab_size": VOCABULARY}
    config = GPTNeoConfig(**shape, attention_types=[[["global", "local"], 1]], window_size=4)
    neo = of_type(tmp_path / "neo", GPTNeoForCausalLM, config)
    load_folder(neo)
    edit_config(neo, window_size=0)
    refused(neo, "window_size is 0")
    edit_config(neo, attention_types=[[["global", "global"], 1]], attention_layers=["global", "global"])
    load_folder(neo)
    for size in (0, -3):
        with pytest.raises(CheckpointError, match=f"attention_chunk_size is {size}"):
            remarks(tmp_path, {"model_type": "llama4_text", "attention_chunk_size": size})


# Rotary positions


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "default", "rope_theta": None}, "rope_theta is null"),
        ({"rope_type": "linear", "factor": None}, "factor is null"),
        ({"type": "su", "factor": 2.0}, "rope_type is 'su'"),
        ({"type": "linear", "factor": 1e9}, r"config\.json: factor is 1e\+09"),
        ({"type": "linear", "factor": 257}, "factor is 257"),
        ({"type": "linear", "factor": 1e-9}, "factor is 1e-09"),
        ({"type": "linear", "factor": 0}, "factor is 0"),
        ({"type": "linear", "factor": -2.0}, "factor is -2.0"),
        ({"type": "linear", "factor": float("nan")}, "factor is infinite or not a number"),
        ({"type": "yarn", "factor": 1e9, "original_max_position_embeddings": 64}, r"factor is 1e\+09"),
        ({"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7 + [300.0]}, "long_factor is 300"),
        ({"full_attention": {"type": "linear", "factor": 1e9}}, r"factor is 1e\+09"),
    ],
)
def test_rotary_settings_that_compute_nothing_are_refused_by_name(
    folder: Path, rope: dict[str, Any], words: str
) -> None:
    edit_config(folder, rope_parameters=rope)
    refused(folder, words)


def test_factors_of_trained_models_are_accepted_and_warnings_are_passed_on(folder: Path) -> None:
    edit_config(folder, rope_parameters={"type": "linear", "factor": 256})
    assert not load_folder(folder).remarks
    for _ in range(2):  # transformers warns once in a process
        edit_config(folder, rope_parameters={"rope_type": "yarn", "factor": 2.0,
                                             "original_max_position_embeddings": 64})  # fmt: skip
        [remark] = load_folder(folder).remarks
        assert "transformers warns" in remark and "factor" in remark
