"""A model built from weights in memory equals the one that transformers loads from the folder, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from evalkit.compatibility.transformers import quiet
from evalkit.models.loading import snapshot
from evalkit.models.loading.build import ReadOnceTensor
from tests.models.loading import edit_config, load_folder
from tests.tiny import VOCABULARY, tiny_checkpoint, tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
DEEP: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gemma2": {"head_dim": 16, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mamba": {"state_size": 4},
    "deepseek_v3": DEEP,
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2, "mamba_d_state": 4,
              "mamba_dt_rank": 4, "n_mamba_heads": 2},
}  # fmt: skip
"""With experts that transformers stacks, tied heads, names with another prefix, weights that transformers keeps in
float32 (DeepSeek) and weights that the model's class creates in float32 (Zamba)."""


def made(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    tiny_tokenizer(folder)
    torch.manual_seed(0)
    with quiet():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | KINDS[kind])))
        model.generation_config.repetition_penalty = 1.5
        model.to(dtype).save_pretrained(folder, max_shard_size="50KB")
    return folder


def assert_same(model: Any, other: Any) -> None:
    assert type(model) is type(other)
    for one, two in (
        (model.state_dict(), other.state_dict()),
        (dict(model.named_buffers()), dict(other.named_buffers())),
    ):
        assert one.keys() == two.keys()
        for name, tensor in two.items():
            assert one[name].dtype == tensor.dtype and torch.equal(one[name], tensor), name
    assert model.config.to_dict() == other.config.to_dict()
    assert model.generation_config.to_dict() == other.generation_config.to_dict()
    assert [p.data_ptr() for p in model.parameters()] != [p.data_ptr() for p in other.parameters()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_transformers_loads_the_folder(tmp_path: Path, kind: str, dtype: str) -> None:
    folder = made(tmp_path, kind)
    with quiet():
        expected = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
    found = load_folder(folder, dtype=dtype, attention="eager")
    assert_same(found.model, expected.eval())
    assert found.model.generation_config.repetition_penalty == 1.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "deepseek_v3", "zamba"])
def test_rounded_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str) -> None:
    """Weights stored in float32, also of a model that keeps some in float32."""
    folder = made(tmp_path, kind, torch.float32)
    monkeypatch.setattr(snapshot, "_LARGE", 1)
    with quiet():
        expected = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
    read: list[set[torch.dtype]] = []
    real = snapshot.read_weights

    def read_weights(*args: Any) -> snapshot.Weights:
        found = real(*args)
        read.append({tensor.dtype for tensor in found.tensors.values()})
        return found

    monkeypatch.setattr(snapshot, "read_weights", read_weights)
    assert_same(load_folder(folder, dtype=dtype, attention="eager").model, expected.eval())
    kept = {torch.float32} if kind in ("deepseek_v3", "zamba") else set()
    assert [*map(set, read)] == [{getattr(torch, dtype)}, *([kept] if kept else [])]


def test_generation_settings_of_an_old_checkpoint(folder: Path) -> None:
    """A checkpoint from before generation_config.json existed."""
    (folder / "generation_config.json").unlink()
    edit_config(folder, repetition_penalty=1.25, eos_token_id=[1, 7])
    settings = load_folder(folder).model.generation_config
    assert (settings.repetition_penalty, settings.eos_token_id) == (1.25, [1, 7])


def test_eight_bits_with_their_scales(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, dtype="bfloat16", hidden=128)
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if "proj" in name]:
        scale = stored[name].float().abs().max() / 448
        stored[f"{name}_scale_inv"] = scale.expand([-(-size // 128) for size in stored[name].shape]).contiguous()
        stored[name] = (stored[name].float() / scale).to(torch.float8_e4m3fn)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    method = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "dequantize": True,
    }
    edit_config(folder, quantization_config=method)
    with quiet():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found = load_folder(folder)
    assert found.dtype == "bfloat16"
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], tensor), name


def test_messages_name_the_users_folder(folder: Path) -> None:
    """And not the private folder to which its files were copied."""
    from evalkit.errors import CheckpointError

    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32", "hidden_act": "none"}))
    for name in ("tokenizer.json", "config.json"):
        with pytest.raises(CheckpointError) as caught:
            load_folder(folder)
        assert str(folder) in str(caught.value) and ".evalkit-" not in str(caught.value)
        (folder / name).write_text("{")


def test_names_of_what_is_loaded_are_the_users(folder: Path) -> None:
    loaded = load_folder(folder)
    assert loaded.model.name_or_path == loaded.model.config.name_or_path == loaded.tokenizer.name_or_path == str(folder)


def test_unintended_rounding_is_reported(folder: Path) -> None:
    edit_config(folder, dtype="bfloat16")
    said: list[str] = []
    load_folder(folder, say=said.append)
    assert said == ["weights are stored in float32 and rounded to bfloat16, the dtype in config.json; see --dtype"]
    said.clear()
    load_folder(folder, dtype="float16", say=said.append)
    load_folder(folder, dtype="float32", say=said.append)
    assert said == []


def test_a_tensor_is_handed_over_once() -> None:
    lazy = ReadOnceTensor(torch.ones(3))
    assert not lazy.was_read
    tensor = lazy[...]
    assert tensor is not None and lazy.was_read and lazy._tensor is None
