"""From files to a model: as transformers loads it, or rejected in one line where config, weights and files differ."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from evalkit.compatibility.transformers import quiet
from evalkit.errors import UnknownNameError, UsageError
from evalkit.models.context.extension import context_window
from evalkit.models.loading import build, snapshot
from evalkit.models.loading.spec import model_spec
from evalkit.models.parts import resolve_device
from tests.marks import fast
from tests.models.loading import edit_config, load_folder, refused, rewrite
from tests.tiny import VOCABULARY, tiny_checkpoint, tiny_tokenizer

Tensors = dict[str, torch.Tensor]

# The same model as transformers loads from the folder, to the last bit

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gemma2": {"head_dim": 16, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mamba": {"state_size": 4},
    "deepseek_v3": LATENT | {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
                             "head_dim": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
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
    for mine, theirs in (
        (model.state_dict(), other.state_dict()),
        (dict(model.named_buffers()), dict(other.named_buffers())),
    ):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), name
    assert model.config.to_dict() == other.config.to_dict()
    assert model.generation_config.to_dict() == other.generation_config.to_dict()


@pytest.mark.parametrize("dtype", fast(["bfloat16"], ["float32", "bfloat16", "float16"]))
@pytest.mark.parametrize("kind", KINDS)
def test_as_transformers_loads_the_folder(tmp_path: Path, kind: str, dtype: str) -> None:
    folder = made(tmp_path, kind)
    with quiet():
        expected = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
    loaded = load_folder(folder, dtype=dtype, attention="eager")
    assert_same(loaded.model, expected.eval())
    assert loaded.model.generation_config.repetition_penalty == 1.5
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == loaded.attention == "eager"


@pytest.mark.parametrize("kind", ["gpt2", "deepseek_v3", "zamba"])
def test_rounded_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Weights stored in float32, also of a model that keeps some in float32."""
    folder = made(tmp_path, kind, torch.float32)
    monkeypatch.setattr(snapshot, "_LARGE", 1)
    with quiet():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    assert_same(load_folder(folder, dtype="bfloat16", attention="eager").model, expected.eval())


def test_facts_and_description(saved: Path) -> None:
    loaded = load_folder(saved)
    assert (loaded.dtype, loaded.device, loaded.window, loaded.name) == ("float32", "cpu", 256, "small")
    assert (loaded.bos_id, loaded.eos_id, loaded.attention) == (0, 1, "sdpa")
    assert loaded.parameters == sum(tensor.numel() for tensor in load_file(saved / "model.safetensors").values())
    assert loaded.describe().splitlines() == [
        "small: LlamaForCausalLM, 139.6K parameters, float32 on cpu, sdpa attention",
        "context window 256 tokens, BOS <s> (0), EOS </s> (1)",
    ]
    assert loaded.model.name_or_path == loaded.model.config.name_or_path == loaded.tokenizer.name_or_path == str(saved)


def test_without_special_tokens_and_tied(tmp_path: Path) -> None:
    tied = load_folder(tiny_checkpoint(tmp_path / "tied", tied=True, bos=None, eos=None))
    assert (tied.bos_id, tied.eos_id) == (None, None) and tied.describe().endswith("BOS none, EOS none")
    untied = load_folder(tiny_checkpoint(tmp_path / "untied"))
    assert untied.parameters - tied.parameters == VOCABULARY * 64


def test_the_dtype_is_the_checkpoints_own_and_rounding_is_reported(folder: Path) -> None:
    edit_config(folder, dtype="bfloat16")
    said: list[str] = []
    rounded = load_folder(folder, say=said.append)
    assert {parameter.dtype for parameter in rounded.model.parameters()} == {torch.bfloat16}
    assert len(said) == 1 and "stored in float32 and rounded to bfloat16" in said[0]
    wide = load_folder(folder, dtype="float32", say=said.append)
    for narrow, parameter in zip(rounded.model.parameters(), wide.model.parameters(), strict=True):
        assert torch.equal(parameter.bfloat16(), narrow)
    assert len(said) == 1


def test_nothing_is_printed_and_unused_weights_are_reported_once(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rewrite(folder, lambda stored: stored.update({"value_head.weight": torch.ones(3)}))
    said: list[str] = []
    load_folder(folder, say=said.append)
    assert len(said) == 1 and "value_head.weight" in said[0]
    assert capfd.readouterr() == ("", "")


def test_generation_settings_of_an_old_checkpoint(folder: Path) -> None:
    """A checkpoint from before generation_config.json existed."""
    (folder / "generation_config.json").unlink()
    edit_config(folder, repetition_penalty=1.25, eos_token_id=[1, 7])
    settings = load_folder(folder).model.generation_config
    assert (settings.repetition_penalty, settings.eos_token_id) == (1.25, [1, 7])


def test_eight_bits_with_their_scales(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, dtype="bfloat16", hidden=128)

    def quantise(stored: Tensors) -> None:
        for name in [name for name in stored if "proj" in name]:
            scale = stored[name].float().abs().max() / 448
            stored[f"{name}_scale_inv"] = scale.expand([-(-size // 128) for size in stored[name].shape]).contiguous()
            stored[name] = (stored[name].float() / scale).to(torch.float8_e4m3fn)

    rewrite(folder, quantise)
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
              "dequantize": True}  # fmt: skip
    edit_config(folder, quantization_config=method)
    with quiet():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    loaded = load_folder(folder)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name


def test_attention_and_device() -> None:
    assert resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(UsageError, match="cuda device"):
        resolve_device(f"cuda:{torch.cuda.device_count()}")
    for nonsense in ("gpu", "cuda:x", "meta", ""):
        with pytest.raises(UsageError, match="--device"):
            model_spec("demo", device=nonsense)
    with pytest.raises(UnknownNameError, match="'spda'"):
        model_spec("demo", attention="spda")


def test_attention_that_an_architecture_has_not(tmp_path: Path) -> None:
    """GPT-J has eager attention only: `auto` selects it, and requesting sdpa is an error that says what to do."""
    folder = of_type(tmp_path, "gptj", n_positions=64, rotary_dim=8)
    assert load_folder(folder).attention == "eager"
    refused(folder, "--attention eager", attention="sdpa")


def test_window() -> None:
    class Tokenizer:
        model_max_length = 10**30

    said: list[str] = []
    tokenizer = Tokenizer()
    for key in ("max_position_embeddings", "n_positions", "max_target_positions"):
        assert context_window("x", {key: 77}, tokenizer, said.append) == 77
    assert said == []
    assert context_window("x", {}, tokenizer, said.append) == 2048 and len(said) == 1
    tokenizer.model_max_length = 99
    assert context_window("x", {}, tokenizer, said.append) == 99


# Code and pickles


def test_pickled_weights_are_refused_and_not_opened(folder: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "sprung"),)

    stored = load_file(folder / "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    assert load_folder(folder, allow_pickle=True).parameters  # safetensors come first
    (folder / "model.safetensors").unlink()
    refused(folder, "--allow-pickle")
    refused(folder, "pytorch_model.bin", allow_pickle=True)
    assert not (tmp_path / "sprung").exists()
    torch.save(stored, folder / "pytorch_model.bin")
    loaded = load_folder(folder, allow_pickle=True)
    assert all(torch.equal(loaded.model.state_dict()[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("shard", ["weights.bin", "inner/model.safetensors", 3, ["model.safetensors"]])
def test_an_index_of_safetensors_names_nothing_else(folder: Path, shard: Any) -> None:
    """Otherwise a pickle would be read without --allow-pickle, or a file outside of the folder."""
    stored = load_file(folder / "model.safetensors")
    (folder / "inner").mkdir()
    torch.save(stored, folder / "weights.bin")
    (folder / "model.safetensors").rename(folder / "inner/model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(stored, shard)}))
    refused(folder, r"index\.json: ")


OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path(__file__).with_name("ran").touch()
class OwnConfig(LlamaConfig):
    model_type = "evalkit_test_own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_checkpoint(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs only if trusted, never if transformers knows the model type, and never from another repository."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "modeling_own.py").write_text(OWN_CODE)
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_config(folder, model_type="llama", auto_map=names, architectures=["OwnForCausalLM"])
    for trusted in (False, True):
        assert load_folder(folder, trust_remote_code=trusted).architecture == "LlamaForCausalLM"
    edit_config(folder, model_type="evalkit_test_own")
    refused(folder, "evalkit_test_own.*--trust-remote-code")
    assert not list(tmp_path.rglob("ran"))
    assert load_folder(folder, trust_remote_code=True).architecture == "OwnForCausalLM"
    assert list(tmp_path.rglob("ran"))
    edit_config(folder, auto_map=names | {"AutoConfig": "owner/name--modeling.Config"})
    refused(folder, "owner/name--modeling.Config", trust_remote_code=True)


def test_a_tokenizers_code_of_another_repository(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    settings = {"auto_map": ["owner/name--tok.Own", None], "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    refused(folder, "another repository", trust_remote_code=True)


# Models that are not causal


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "'bart' is an encoder-decoder"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "BertLMHeadModel attends in both directions"),
        ({"model_type": "roberta"}, "'roberta' attends in both directions"),
        ({"model_type": "clip"}, "'clip' has no causal language model"),
        ({"model_type": "xlm", "causal": False}, "'xlm' attends in both directions"),
        ({"model_type": "mllama", "architectures": ["MllamaForConditionalGeneration"]}, "MllamaForCond"),
        ({"model_type": "mllama_text_model", "architectures": ["MllamaModel"]}, "no causal language model"),
        ({"model_type": "evalkit_unheard_of"}, "'evalkit_unheard_of', which transformers does not know"),
    ],
)
def test_models_that_are_not_causal(folder: Path, config: dict[str, object], named: str) -> None:
    (folder / "config.json").write_text(json.dumps({"dtype": "float32", **config}))
    refused(folder, named)


TEXT = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
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
    text = TEXT | ({"cross_attention_layers": []} if saved_as.startswith("Mllama") else {})
    is_part = saved_as.endswith("CausalLM")
    config = kind.config_class(**text) if is_part else kind.config_class(text_config=text, vision_config=VISION)
    torch.manual_seed(0)
    model = kind(config).eval()
    tiny_checkpoint(tmp_path)
    model.save_pretrained(tmp_path)
    loaded = load_folder(tmp_path)
    assert loaded.architecture == loaded_as
    ids = torch.arange(3, 40)[None]
    assert torch.allclose(loaded.model(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5)


# Weights that the config does not describe


def without_base(stored: Tensors, base: str) -> None:
    """Names as the base model saves them: layers.0… for model.layers.0…"""
    for name in list(stored):
        stored[name.removeprefix(f"{base}.")] = stored.pop(name)


def test_names_without_the_base_models(folder: Path) -> None:
    rewrite(folder, lambda stored: without_base(stored, "model"))
    said: list[str] = []
    load_folder(folder, say=said.append)
    assert said == []
    edit_config(folder, num_hidden_layers=1)
    refused(folder, r"more layers than config\.json has: layers\.1\.")


@pytest.mark.parametrize("part", ["bias", "SCB", "weight_scale", "lora_A.default.weight"])
@pytest.mark.parametrize("place", ["model.", "", "base_model.model.model."])
def test_parts_of_a_module_that_the_model_has_without_them(folder: Path, place: str, part: str) -> None:
    rewrite(folder, lambda stored: stored.update({f"{place}layers.0.self_attn.q_proj.{part}": torch.ones(64)}))
    refused(folder, rf"q_proj\.{part} would be left out of modules of the model")


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_norm.weight", "layers.1.mlp.extra", "layers.-1.a",
                                  f"model.layers.{'9' * 5000}.weight"])  # fmt: skip
def test_weights_of_a_layer_without_a_place_in_it(folder: Path, name: str) -> None:
    rewrite(folder, lambda stored: stored.update({name: torch.ones(64)}))
    refused(folder, "small: ")


def test_a_layer_past_the_last_that_transformers_knows_of_is_as_it_should_be(tmp_path: Path) -> None:
    """DeepSeek's files end with a layer for training that its class leaves out by name."""
    folder = made(tmp_path, "deepseek_v3")
    last = sorted(folder.glob("*.safetensors"))[-1]
    rewrite(last, lambda stored: stored.update({"model.layers.61.eh_proj.weight": torch.ones(3)}))
    said: list[str] = []
    load_folder(folder, say=said.append)
    assert said == []


def test_masks_of_gpt2_stay(tmp_path: Path) -> None:
    """As the hub has GPT-2: without the base model's name, and with masks in each layer, of numbers or integers."""
    folder = of_type(tmp_path, "gpt2", n_positions=64)
    rewrite(folder, lambda stored: without_base(stored, "transformer"))
    masks = {"h.0.attn.bias": torch.ones(4), "h.1.attn.masked_bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8)}
    rewrite(folder, lambda stored: stored.update(masks))
    assert load_folder(folder).architecture == "GPT2LMHeadModel"
    edit_config(folder, n_layer=1)
    refused(folder, r"more layers than config\.json has: h\.1\.")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_without_their_scales(folder: Path, dtype: torch.dtype) -> None:
    """One module has its scales; the method may be named."""

    def quantise(stored: Tensors) -> None:
        for layer in (0, 1):
            name = f"model.layers.{layer}.mlp.up_proj.weight"
            stored[name] = (stored[name] * 100).to(dtype)
        stored["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)

    rewrite(folder, quantise)
    refused(folder, r"up_proj\.weight are stored as integers or in 8 bits, .*quantization_config")
    for method in ("fp8", "mxfp8", "mxfp4"):
        edit_config(folder, quantization_config={"quant_method": method})
        refused(folder, r": model\.layers\.1\.mlp\.up_proj\.weight are stored .*scales")


@pytest.mark.parametrize("method", ["own", None, ["fp8"], "gguf", "torchao", "fp8"])
def test_quantisations_that_the_weights_do_not_have(folder: Path, method: Any) -> None:
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4})
    refused(folder, "quant")


def test_weights_too_large_for_the_dtype(folder: Path) -> None:
    rewrite(folder, lambda stored: stored["model.norm.weight"].fill_(70000.0))
    refused(folder, r"in float16; .*--dtype float32", dtype="float16")
    assert load_folder(folder, dtype="bfloat16").dtype == "bfloat16"


def of_type(folder: Path, kind: str, **settings: Any) -> Path:
    """A checkpoint of another architecture, whose head and integers differ from what the class starts with."""
    tiny_checkpoint(folder)
    shape = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **settings))
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dtype != torch.bool:
            tensor.data += torch.ones_like(tensor) if tensor.dtype == torch.long else 0.1 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    return folder


def assert_same_logits(folder: Path) -> None:
    ids = torch.arange(3, 40)[None]
    models = load_folder(folder).model, AutoModelForCausalLM.from_pretrained(folder).eval()
    mine, expected = (model(input_ids=ids, use_cache=False).logits for model in models)
    assert torch.allclose(mine, expected, atol=1e-5)


PEGASUS = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "max_position_embeddings": 64}
CPM_ANT = {"dim_head": 16, "dim_ff": 96, "prompt_types": 4, "prompt_length": 4, "position_bias_num_buckets": 32}


@pytest.mark.parametrize(("kind", "settings"), [("bigbird_pegasus", PEGASUS), ("cpmant", CPM_ANT)])
def test_a_head_that_the_class_never_ties(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    folder = of_type(tmp_path, kind, **settings)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert_same_logits(folder)


def test_a_table_of_integers_under_another_name(tmp_path: Path) -> None:
    """DeepSeek V4 looks the experts of each token up in a table, whose name in files differs from the model's."""
    folder = of_type(tmp_path, "deepseek_v4", n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
                     max_position_embeddings=64, q_lora_rank=16, o_lora_rank=16, o_groups=2, qk_rope_head_dim=8,
                     head_dim=16, index_n_heads=4, index_head_dim=16)  # fmt: skip
    tables = {name for name, one in load_file(folder / "model.safetensors").items() if one.dtype == torch.long}
    assert tables and not tables & load_folder(folder).model.state_dict().keys()
    assert_same_logits(folder)
    rewrite(folder, lambda stored: stored.update({next(iter(tables)): torch.ones(7, 1, dtype=torch.long)}))
    refused(folder, "do not have the shapes|stored as integers")


def test_a_tied_head_that_is_stored_as_well(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, tied=True)
    expected = load_folder(folder).parameters
    rewrite(folder, lambda stored: stored.update({"lm_head.weight": stored["model.embed_tokens.weight"].clone()}))
    assert load_folder(folder).parameters == expected


def test_an_index_beside_whole_weights_is_not_read(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lost": "model-1.safetensors"}}')
    assert load_folder(folder).parameters


# A config.json that describes far more than the files hold is rejected before memory is allocated


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 22}, {"num_hidden_layers": 10**15}, {"num_experts": 10**9}]
    + [{key: size, "head_dim": 16} for key in ("vocab_size", "hidden_size") for size in (64_000, 10**12)],
    ids=str,
)  # fmt: skip
def test_larger_than_the_weights(folder: Path, changes: dict[str, int]) -> None:
    edit_config(folder, **changes)
    refused(folder, r"config\.json")


def test_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-J keeps sines for all its positions."""
    folder = of_type(tmp_path, "gptj", n_positions=64, rotary_dim=8)
    monkeypatch.setattr(build, "_MOST_BUFFERED", 100_000)
    assert load_folder(folder).parameters
    edit_config(folder, n_positions=100_000)
    refused(folder, "embed_positions.*number of positions")


def test_a_vocabulary_that_is_most_of_the_model(tmp_path: Path) -> None:
    """Counted once although it occurs three times in the model under construction."""
    folder = tiny_checkpoint(tmp_path, hidden=16, heads=2, key_value_heads=1, layers=1, tied=True)
    assert load_folder(folder).parameters < 12_000


def test_messages_name_the_users_folder(folder: Path) -> None:
    """And not the private folder to which its files were copied."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32", "hidden_act": "none"}))
    for name in ("tokenizer.json", "config.json"):
        message = refused(folder, str(folder))
        assert ".evalkit-" not in message
        (folder / name).write_text("{")


def only_unknown(content: dict[str, Any]) -> None:
    content["model"] = {"type": "WordLevel", "vocab": {"<unk>": 3, "zzz": 4}, "unk_token": "<unk>"}
    content["pre_tokenizer"], content["post_processor"] = {"type": "Whitespace"}, None


def test_tokenizers_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    def changed(name: str, change: Callable[[Any], Any]) -> str:
        copy = tiny_tokenizer(tmp_path / name)
        content = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
        change(content)
        (copy / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        return str(copy)

    unknown = changed("unknown", only_unknown)
    settings = Path(unknown) / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"unk_token": "<unk>"}))
    refused(folder, "its unknown token <unk>", tokenizer=unknown)
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    refused(folder, "has no character offsets")
    (folder / "vocab.json").unlink()
    refused(folder, r"--tokenizer FOLDER\|HUB-NAME")
    assert load_folder(folder, tokenizer=changed("same", lambda _: None)).bos_id == 0
