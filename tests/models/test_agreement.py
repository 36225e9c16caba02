"""A config.json, weights, a tokenizer and an adapter that do not match are rejected, each in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from evalkit.errors import CheckpointError
from evalkit.models.loading import build
from evalkit.models.loading.locate import locate
from tests.models.loading import edit_config, load_folder, refused
from tests.tiny import tiny_checkpoint

Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def edit_tokenizer(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_layers_that_the_config_does_not_count(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=1)
    refused(folder, r"more layers than config\.json has: model\.layers\.1\..*number of layers")


def test_no_layers(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=0)
    refused(folder, r"config\.json: num_hidden_layers is 0; expected")


def test_layers_of_another_family(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "gpt_neox", layers=3)
    edit_config(folder, num_hidden_layers=2)
    refused(folder, r"more layers than config\.json has: gpt_neox\.layers\.2\.")


def test_a_layer_past_the_last_that_transformers_knows_of_is_as_it_should_be(tmp_path: Path) -> None:
    """DeepSeek's files end with a layer for training that its class leaves out by name."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    folder = tiny_checkpoint(tmp_path)
    shape = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4}
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    config = DeepseekV3Config(vocab_size=512, num_hidden_layers=2, **shape, **latent, **experts, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    rewrite(folder, lambda stored: stored.update({"model.layers.61.eh_proj.weight": torch.ones(3)}))
    said: list[str] = []
    assert load_folder(folder, say=said.append).architecture == "DeepseekV3ForCausalLM"
    assert said == []


@pytest.mark.parametrize("part", ["bias", "SCB", "weight_scale", "lora_A.weight", "lora_A.default.weight"])
def test_parts_of_a_module_that_the_model_has_without_them(folder: Path, part: str) -> None:
    name = f"model.layers.0.self_attn.q_proj.{part}"
    rewrite(folder, lambda stored: stored.update({name: torch.ones(64)}))
    refused(folder, rf"{part} would be left out of modules of the model; .*quantization_config")


def without_base(stored: Tensors, base: str) -> None:
    """Names as the base model saves them: layers.0… for model.layers.0…"""
    for name in list(stored):
        stored[name.removeprefix(f"{base}.")] = stored.pop(name)


@pytest.mark.parametrize("part", ["bias", "SCB", "weight_scale", "lora_A.weight"])
@pytest.mark.parametrize("place", ["", "base_model.model.", "base_model.model.model."])
def test_parts_of_a_module_under_another_form_of_its_name(folder: Path, place: str, part: str) -> None:
    rewrite(folder, lambda stored: stored.update({f"{place}layers.0.self_attn.q_proj.{part}": torch.ones(64)}))
    refused(folder, rf"q_proj\.{part} would be left out of modules of the model")


def test_two_tensors_for_one_weight(folder: Path) -> None:
    rewrite(folder, lambda stored: stored.update({"norm.weight": torch.ones(64)}))
    refused(folder, r"holds model\.norm\.weight and norm\.weight, two tensors for one weight")


def test_names_without_the_base_models(folder: Path) -> None:
    rewrite(folder, lambda stored: without_base(stored, "model"))
    said: list[str] = []
    load_folder(folder, say=said.append)
    assert said == []
    edit_config(folder, num_hidden_layers=1)
    refused(folder, r"more layers than config\.json has: layers\.1\.")


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_norm.weight", "layers.1.mlp.extra", "layers.-1.a"])
def test_weights_of_a_layer_without_a_place_in_it(folder: Path, name: str) -> None:
    rewrite(folder, lambda stored: stored.update({name: torch.ones(64)}))
    refused(folder, f"{name} would be left out of modules of the model; .*another architecture")


def gpt2(folder: Path) -> Path:
    """As the hub has GPT-2: without the base model's name, and with masks in each layer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tiny_checkpoint(folder)
    GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=32, n_layer=2, n_head=2, n_positions=64)).save_pretrained(folder)
    rewrite(folder, lambda stored: without_base(stored, "transformer"))
    masks = {f"h.{layer}.attn.{name}": torch.ones(4) for layer in (0, 1) for name in ("bias", "masked_bias")}
    rewrite(folder, lambda stored: stored.update(masks))
    return folder


def test_masks_of_gpt2_stay(tmp_path: Path) -> None:
    assert load_folder(gpt2(tmp_path)).architecture == "GPT2LMHeadModel"


def test_layers_of_gpt2_that_the_config_does_not_count(tmp_path: Path) -> None:
    edit_config(gpt2(tmp_path), n_layer=1)
    refused(tmp_path, r"more layers than config\.json has: h\.1\.")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_without_their_scales(folder: Path, dtype: torch.dtype) -> None:
    def quantise(stored: Tensors) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        stored[name] = (stored[name] * 100).to(dtype)

    rewrite(folder, quantise)
    refused(folder, r"up_proj\.weight are stored as integers or in 8 bits, but config\.json has no quantization_config")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("method", ["fp8", "mxfp8", "mxfp4"])
def test_quantised_weights_of_a_named_method_without_their_scales(
    folder: Path, method: str, dtype: torch.dtype
) -> None:
    """One module has its scales."""

    def quantise(stored: Tensors) -> None:
        for layer in (0, 1):
            name = f"model.layers.{layer}.mlp.up_proj.weight"
            stored[name] = (stored[name] * 100).to(dtype)
        stored["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)

    rewrite(folder, quantise)
    edit_config(folder, quantization_config={"quant_method": method})
    refused(folder, r": model\.layers\.1\.mlp\.up_proj\.weight are stored .*, but the files lack their scales$")


def test_a_named_quantisation_of_plain_weights(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "fp8"})
    refused(folder, "has a quantization_config, but no weight is stored as integers or in 8 bits")


def test_a_gguf_files_method_in_a_folder(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "gguf"})
    refused(folder, "quant_method gguf, which is for GGUF files")


def test_integers_that_are_no_weights_stay(tmp_path: Path) -> None:
    """GPT-2's masks, as old checkpoints store them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tiny_checkpoint(tmp_path)
    GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=32, n_layer=1, n_head=2, n_positions=64)).save_pretrained(folder)
    mask = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
    rewrite(folder, lambda stored: stored.update({"transformer.h.0.attn.bias": mask}))
    said: list[str] = []
    assert load_folder(folder, say=said.append).architecture == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("settings", "method"),
    [({"quant_method": "own", "bits": 4}, "'own'"), ({"bits": 4}, "None"), ({"quant_method": ["fp8"]}, r"\['fp8'\]")],
)
def test_an_unknown_quantization(folder: Path, settings: dict[str, Any], method: str) -> None:
    edit_config(folder, quantization_config=settings)
    refused(folder, rf"quant_method is {method}, which transformers does not know")


def test_torchao(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "torchao", "quant_type": "int8_weight_only"})
    refused(folder, "quant_method torchao")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_are_no_numbers(folder: Path, name: str, value: float) -> None:
    rewrite(folder, lambda stored: stored[name].view(-1)[7:8].fill_(value))
    refused(folder, rf"{name} holds NaN or infinite values in float32; training has diverged, or the file is damaged$")


def test_weights_too_large_for_the_dtype(folder: Path) -> None:
    rewrite(folder, lambda stored: stored["model.norm.weight"].fill_(70000.0))
    refused(folder, r"holds NaN or infinite values in float16; .*--dtype float32", dtype="float16")
    assert load_folder(folder, dtype="bfloat16").dtype == "bfloat16"


def test_a_head_of_its_own_that_the_config_says_is_tied(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    refused(folder, r"its output head differs from its embedding, but config\.json sets tie_word_embeddings")


def of_type(folder: Path, kind: str, **settings: Any) -> Path:
    """A checkpoint of another architecture, whose head and integers differ from what the class starts with."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny_checkpoint(folder)
    shape = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **settings))
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data += torch.ones_like(tensor) if tensor.dtype == torch.long else 0.1 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    return folder


def same_logits(folder: Path) -> bool:
    from transformers import AutoModelForCausalLM

    ids = torch.arange(3, 40)[None]
    models = load_folder(folder).model, AutoModelForCausalLM.from_pretrained(folder).eval()
    mine, expected = (model(input_ids=ids, use_cache=False).logits for model in models)
    return torch.allclose(mine, expected, atol=1e-5)


PEGASUS = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "max_position_embeddings": 64}
CPM_ANT = {"dim_head": 16, "dim_ff": 96, "prompt_types": 4, "prompt_length": 4, "position_bias_num_buckets": 32}


@pytest.mark.parametrize(("kind", "settings"), [("bigbird_pegasus", PEGASUS), ("cpmant", CPM_ANT)])
def test_a_head_that_the_class_never_ties(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    folder = of_type(tmp_path, kind, **settings)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert same_logits(folder)


LATENT = {"q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "qk_rope_head_dim": 8, "head_dim": 16,
          "index_n_heads": 4, "index_head_dim": 16}  # fmt: skip


def test_a_table_of_integers_under_another_name(tmp_path: Path) -> None:
    """DeepSeek V4 looks the experts of each token up in a table, whose name in files differs from the model's."""
    folder = of_type(tmp_path, "deepseek_v4", n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
                     max_position_embeddings=64, **LATENT)  # fmt: skip
    stored = load_file(folder / "model.safetensors")
    tables = {name for name, tensor in stored.items() if tensor.dtype == torch.long}
    assert tables and not tables & load_folder(folder).model.state_dict().keys()
    assert same_logits(folder)
    rewrite(folder, lambda stored: stored.update({next(iter(tables)): torch.ones(7, 1, dtype=torch.long)}))
    refused(folder, "do not have the shapes|stored as integers")


def test_a_tied_head_that_is_stored_as_well(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, tied=True)
    rewrite(folder, lambda stored: stored.update({"lm_head.weight": stored["model.embed_tokens.weight"].clone()}))
    assert load_folder(folder).parameters == load_folder(tiny_checkpoint(tmp_path / "tied", tied=True)).parameters


def _no_word(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[\\s\\S]"}, "content": ""}


def _only_unknown(content: dict[str, Any]) -> None:
    content["model"] = {"type": "WordLevel", "vocab": {"<unk>": 3, "zzz": 4}, "unk_token": "<unk>"}
    content["pre_tokenizer"], content["post_processor"] = {"type": "Whitespace"}, None


@pytest.mark.parametrize(
    ("change", "words"),
    [(_no_word, "into no tokens"), (_only_unknown, "into its unknown token <unk>")],
)
def test_a_tokenizer_that_loses_all_text(folder: Path, change: Any, words: str) -> None:
    edit_tokenizer(folder, change)
    if change is _only_unknown:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"unk_token": "<unk>"}))
    refused(folder, words)


class TestAdapters:
    """transformers applies an adapter if `peft` is installed, and ignores it otherwise."""

    @pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
    def test_beside_whole_weights(self, folder: Path, name: str) -> None:
        (folder / name).write_text("{}")
        with pytest.raises(CheckpointError, match=rf"holds an adapter \({name}\) beside complete weights; merge it"):
            locate(str(folder))

    def test_by_itself(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        (folder / "adapter_config.json").write_text("{}")
        with pytest.raises(CheckpointError, match="an adapter without its base model"):
            locate(str(folder))


class TestSizes:
    """A config.json that describes far more than the files contain is rejected before memory is allocated."""

    @pytest.mark.parametrize(
        ("layers", "words"), [(22, "a far larger model"), (10**15, "num_hidden_layers is 1000000")]
    )
    def test_more_layers_than_weights(self, folder: Path, layers: int, words: str) -> None:
        edit_config(folder, num_hidden_layers=layers)
        refused(folder, rf"config\.json.*{words}")

    def test_more_experts_than_any_model_has(self, folder: Path) -> None:
        edit_config(folder, num_experts=10**9)
        refused(folder, r"config\.json: num_experts is 1000000000")

    def test_layers_that_are_missing_are_named(self, folder: Path) -> None:
        edit_config(folder, num_hidden_layers=3)
        refused(folder, r"9 weights are missing and would be random: model\.layers\.2\.")

    @pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size"])
    @pytest.mark.parametrize("size", [64_000, 10**12])
    def test_larger_than_the_weights(self, folder: Path, key: str, size: int) -> None:
        edit_config(folder, **{key: size, "head_dim": 16})
        message = refused(
            folder, r"config\.json describes a far larger model than its files hold \(139,\d+ numbers in 21"
        )
        assert "sizes" in message

    def test_buffers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """GPT-J keeps sines for all its positions."""
        from transformers import GPTJConfig, GPTJForCausalLM

        folder = tiny_checkpoint(tmp_path)
        GPTJForCausalLM(
            GPTJConfig(vocab_size=512, n_embd=32, n_layer=1, n_head=2, n_positions=64, rotary_dim=8)
        ).save_pretrained(folder)
        monkeypatch.setattr(build, "_MOST_BUFFERED", 100_000)
        assert load_folder(folder).attention == "eager"
        edit_config(folder, n_positions=100_000)
        refused(folder, r"buffers \(embed_positions\) have more than 100,000 numbers; its number of positions")

    def test_a_vocabulary_that_is_most_of_the_model(self, tmp_path: Path) -> None:
        """Counted once although it occurs three times in the model under construction."""
        folder = tiny_checkpoint(tmp_path, hidden=16, heads=2, key_value_heads=1, layers=1, tied=True)
        assert load_folder(folder).parameters < 12_000
