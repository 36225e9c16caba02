"""Checkpoints rejected before a weight is read: pickled, truncated, not causal, or with code of their own."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.loading import edit_config, load_folder, refused
from tests.models.variants.building import DIFFERENTIAL, model_of
from tests.tiny import VOCABULARY, tiny_checkpoint


def test_pickled_weights_are_refused_and_not_opened(folder: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "sprung"),)

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    assert "unpickling can run code" in refused(folder, "--allow-pickle")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("shard", ["weights.bin", "model.pt", "inner/model.safetensors", 3, ["model.safetensors"]])
def test_an_index_of_safetensors_names_nothing_else(folder: Path, tmp_path: Path, shard: Any) -> None:
    """Otherwise a pickle would be read without --allow-pickle."""
    stored = load_file(folder / "model.safetensors")
    (folder / "inner").mkdir()
    for name in ("weights.bin", "model.pt"):
        torch.save(stored, folder / name)
    (folder / "model.safetensors").rename(folder / "inner/model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(stored, shard)}))
    refused(folder, r"index\.json: lists .* as a shard; expected \*\.safetensors files in the same folder")


def test_pickled_weights_if_allowed(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    torch.save(stored, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    loaded = load_folder(folder, allow_pickle=True)
    assert all(torch.equal(loaded.model.state_dict()[name], tensor) for name, tensor in stored.items())


def test_safetensors_come_before_pickles_even_if_those_are_allowed(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert load_folder(folder, allow_pickle=True).parameters == load_folder(folder).parameters


def test_weights_under_another_name(folder: Path) -> None:
    (folder / "optimizer.pt").write_bytes(b"")
    (folder / "model.safetensors").rename(folder / "model.pt")
    assert "optimizer" not in refused(folder, r"holds no model\.safetensors \(found model\.pt\)")


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, r"model\.safetensors: .*damaged")


@pytest.mark.parametrize("number", ["9" * 5000, "²3"])
def test_a_number_in_a_name_that_no_layer_has(folder: Path, number: str) -> None:
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {f"model.layers.{number}.weight": torch.ones(1)}, folder / "model.safetensors")
    refused(folder, "cannot be loaded")


def test_missing_shard(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, max_shard_size="100KB")
    lost = sorted(path.glob("*.safetensors"))[1]
    lost.unlink()
    refused(path, rf"{lost.name}: missing, but listed in model\.safetensors\.index\.json")


def test_an_index_of_weights_that_no_file_has(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, max_shard_size="100KB")
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    assert load_folder(path).parameters
    content["weight_map"]["model.layers.9.mlp.up_proj.weight"] = sorted(path.glob("*.safetensors"))[0].name
    index.write_text(json.dumps(content), encoding="utf-8")
    assert str(index) in refused(path, "'model.layers.9.mlp.up_proj.weight'")


def test_an_index_beside_whole_weights_is_not_read(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lost": "model-1.safetensors"}}')
    assert load_folder(folder).parameters


OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path(__file__).with_name("ran").touch()
class OwnConfig(LlamaConfig):
    model_type = "evalkit_test_own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def with_own_code(folder: Path, model_type: str) -> None:
    (folder / "modeling_own.py").write_text(OWN_CODE)
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_config(folder, model_type=model_type, auto_map=names, architectures=["OwnForCausalLM"])


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder to which transformers copies a checkpoint's code before running it."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "modules"


def test_remote_code_is_refused(folder: Path, modules: Path) -> None:
    with_own_code(folder, "evalkit_test_own")
    assert "evalkit_test_own" in refused(folder, "--trust-remote-code")
    assert not list(modules.rglob("ran"))


def test_remote_code_if_trusted(folder: Path, modules: Path) -> None:
    with_own_code(folder, "evalkit_test_own")
    assert load_folder(folder, trust_remote_code=True).architecture == "OwnForCausalLM"
    assert list(modules.rglob("ran"))


@pytest.mark.parametrize("trusted", [False, True])
def test_known_model_type_never_runs_remote_code(folder: Path, modules: Path, trusted: bool) -> None:
    with_own_code(folder, "llama")
    assert load_folder(folder, trust_remote_code=trusted).architecture == "LlamaForCausalLM"
    assert not list(modules.rglob("ran"))


def test_unknown_model_type(folder: Path) -> None:
    edit_config(folder, model_type="evalkit_unheard_of")
    refused(folder, "model_type 'evalkit_unheard_of', which transformers does not know")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "model type 'bart' is an encoder-decoder"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        (
            {"model_type": "bert", "architectures": ["BertLMHeadModel"]},
            "BertLMHeadModel attends in both directions",
        ),
        ({"model_type": "roberta"}, "model type 'roberta' attends in both directions"),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClass",
        ),
        ({"model_type": "clip"}, "'clip' has no causal language model"),
        ({"model_type": "llama", "is_causal": False}, "'llama' attends in both directions"),
        ({"model_type": "xlm", "causal": False}, "'xlm' attends in both directions"),
        ({"model_type": "mllama", "architectures": ["MllamaForConditionalGeneration"]}, "MllamaForCond"),
        ({"model_type": "mllama_text_model", "architectures": ["MllamaModel"]}, "no causal language model"),
    ],
)
def test_models_that_are_not_causal(folder: Path, config: dict[str, object], named: str) -> None:
    (folder / "config.json").write_text(json.dumps({"dtype": "float32", **config}))
    refused(folder, named)


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}  # fmt: skip
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
          "num_global_layers": 1, "attention_heads": 4, "image_size": 28, "vision_output_dim": 128,
          "intermediate_layers_indices": [0]}  # fmt: skip


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"),
    [
        ("Emu3ForCausalLM", "Emu3ForCausalLM"),
        ("MllamaForCausalLM", "MllamaForCausalLM"),
        ("MllamaForConditionalGeneration", "MllamaForCausalLM"),
        ("Gemma3ForConditionalGeneration", "Gemma3ForConditionalGeneration"),
    ],
)
def test_language_models_with_or_of_other_parts(tmp_path: Path, saved_as: str, loaded_as: str) -> None:
    """Their class or their type is another one's than transformers' list of causal models has, or has both."""
    kind = getattr(transformers, saved_as)
    text = SIZES | ({"cross_attention_layers": []} if saved_as.startswith("Mllama") else {})
    is_part = saved_as.endswith("CausalLM")
    config = kind.config_class(**text) if is_part else kind.config_class(text_config=text, vision_config=VISION)
    torch.manual_seed(0)
    model = kind(config).eval()
    tiny_checkpoint(tmp_path)
    model.save_pretrained(tmp_path)
    loaded = load_folder(tmp_path)
    assert loaded.architecture == loaded_as
    ids = torch.arange(3, 40)[None]
    mine, expected = (one(input_ids=ids).logits for one in (loaded.model, model))
    assert torch.allclose(mine, expected, atol=1e-5)


def test_differential_layers_that_the_config_does_not_list_are_refused(folder: Path) -> None:
    """They would be scored as vanilla ones, since projections have the same names."""
    model_of("llama", DIFFERENTIAL, vocab_size=VOCABULARY).save_pretrained(folder)
    assert load_folder(folder).architecture == "EvalkitLlamaForCausalLM"
    edit_config(folder, variant_layers=[2])
    assert "layers.1.self_attn.lambda_k1" in refused(folder, "correct its variant_layers")
