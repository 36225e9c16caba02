"""From files to a model: as transformers loads it, or rejected in one line (most refusals: tests/guards)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from evalkit.compatibility.transformers import quiet
from evalkit.errors import UnknownNameError, UsageError
from evalkit.models.context.extension import context_window
from evalkit.models.loading import build
from evalkit.models.loading.spec import model_spec
from evalkit.models.parts import resolve_device
from tests.marks import fast
from tests.models.loading import edit_config, load_folder, refused, rewrite
from tests.tiny import VOCABULARY, tiny_checkpoint, tiny_tokenizer

Tensors = dict[str, torch.Tensor]
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
    "mamba": {"state_size": 4},
    "deepseek_v3": LATENT | {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
                             "head_dim": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2, "mamba_d_state": 4,
              "mamba_dt_rank": 4, "n_mamba_heads": 2},
    # A head that the class never ties, though tie_word_embeddings is true
    "cpmant": {"dim_head": 16, "dim_ff": 96, "prompt_types": 4, "prompt_length": 4, "position_bias_num_buckets": 32},
    # A table of the experts of each token, whose name in files differs from the model's
    "deepseek_v4": {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "q_lora_rank": 16,
                    "o_lora_rank": 16, "o_groups": 2, "qk_rope_head_dim": 8, "head_dim": 16, "index_n_heads": 4,
                    "index_head_dim": 16, "num_key_value_heads": 1},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8},
}  # fmt: skip
"""With experts that transformers stacks, tied heads, names with another prefix, weights that transformers keeps in
float32 (DeepSeek) and weights that the model's class creates in float32 (Zamba)."""


def made(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16, shard: str = "50KB") -> Path:
    """A checkpoint of another architecture, whose head and integers differ from what the class starts with."""
    tiny_tokenizer(folder)
    torch.manual_seed(0)
    with quiet():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | KINDS[kind]))).to(dtype)
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.dtype != torch.bool and (tensor.dtype == torch.long or kind == "cpmant"):
                tensor.data += torch.ones_like(tensor) if tensor.dtype == torch.long else 0.1
        model.generation_config.repetition_penalty = 1.5
        model.save_pretrained(folder, max_shard_size=shard)
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
def test_as_transformers_loads_the_folder(
    tmp_path: Path, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same model to the last bit, also where weights stored in float32 are rounded as they are read."""
    monkeypatch.setattr(build, "_LARGE", 1)
    for stored in (torch.bfloat16, torch.float32) if kind in ("gpt2", "deepseek_v3", "zamba") else (torch.bfloat16,):
        folder = made(tmp_path / str(stored), kind, stored)
        with quiet():
            expected = AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), attn_implementation="eager"
            )
        capfd.readouterr()
        loaded = load_folder(folder, dtype=dtype, attention="eager")
        assert capfd.readouterr() == ("", "")
        assert_same(loaded.model, expected.eval())
        assert loaded.model.generation_config.repetition_penalty == 1.5
        assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
        assert loaded.model.config._attn_implementation == loaded.attention == "eager"


def test_facts_and_description(folder: Path, tmp_path: Path) -> None:
    loaded = load_folder(folder)
    assert loaded.parameters == sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert loaded.describe().splitlines() == [
        "small: LlamaForCausalLM, 139.6K parameters, float32 on cpu, sdpa attention",
        "context window 256 tokens, BOS <s> (0), EOS </s> (1)",
    ]
    assert loaded.model.name_or_path == loaded.model.config.name_or_path == loaded.tokenizer.name_or_path == str(folder)
    tied = tiny_checkpoint(tmp_path / "tied", tied=True, bos=None, eos=None)
    facts = load_folder(tied)
    assert facts.describe().endswith("BOS none, EOS none") and loaded.parameters - facts.parameters == VOCABULARY * 64
    rewrite(tied, lambda stored: stored.update({"lm_head.weight": stored["model.embed_tokens.weight"].clone()}))
    assert load_folder(tied).parameters == facts.parameters
    # A checkpoint from before generation_config.json existed
    (folder / "generation_config.json").unlink()
    edit_config(folder, repetition_penalty=1.25, eos_token_id=[1, 7])
    settings = load_folder(folder).model.generation_config
    assert (settings.repetition_penalty, settings.eos_token_id) == (1.25, [1, 7])


def test_the_dtype_is_the_checkpoints_own_and_rounding_is_reported(folder: Path) -> None:
    edit_config(folder, dtype="bfloat16")
    said: list[str] = []
    rounded = load_folder(folder, say=said.append)
    wide = load_folder(folder, dtype="float32", say=said.append)
    assert len(said) == 1 and "stored in float32 and rounded to bfloat16" in said[0]
    for narrow, parameter in zip(rounded.model.parameters(), wide.model.parameters(), strict=True):
        assert narrow.dtype == torch.bfloat16 and torch.equal(parameter.bfloat16(), narrow)
    rewrite(folder, lambda stored: stored["model.norm.weight"].fill_(70000.0))
    refused(folder, "--dtype float32", dtype="float16")
    assert load_folder(folder).dtype == "bfloat16"


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
    # Scales of one module only
    rewrite(folder, lambda stored: stored.pop("model.layers.1.mlp.up_proj.weight_scale_inv"))
    refused(folder, r"model\.layers\.1\.mlp\.up_proj\.weight .*scales")


def test_attention_and_device(tmp_path: Path) -> None:
    """GPT-J has eager attention only: `auto` selects it, and requesting sdpa is an error that says what to do."""
    with pytest.raises(UsageError, match="cuda device"):
        resolve_device(f"cuda:{torch.cuda.device_count()}")
    for nonsense in ("cuda:x", "meta", ""):
        with pytest.raises(UsageError, match="--device"):
            model_spec("demo", device=nonsense)
    with pytest.raises(UnknownNameError, match="'spda'"):
        model_spec("demo", attention="spda")
    folder = made(tmp_path, "gptj")
    assert load_folder(folder).attention == "eager"
    refused(folder, "eager", attention="sdpa")


def test_window() -> None:
    said: list[str] = []
    tokenizer = SimpleNamespace(model_max_length=10**30)
    for key in ("max_position_embeddings", "n_positions", "max_target_positions"):
        assert context_window("x", {key: 77}, tokenizer, said.append) == 77
    assert said == []
    assert context_window("x", {}, tokenizer, said.append) == 2048 and len(said) == 1
    tokenizer.model_max_length = 99
    assert context_window("x", {}, tokenizer, said.append) == 99


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "evalkit_test_own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_trusted_code_and_allowed_pickles(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the guards refuse by default works if it is asked for."""
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(stored, folder / "pytorch_model.bin")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "modeling_own.py").write_text(OWN_CODE)
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_config(folder, model_type="evalkit_test_own", auto_map=names, architectures=["OwnForCausalLM"])
    loaded = load_folder(folder, trust_remote_code=True, allow_pickle=True)
    assert loaded.architecture == "OwnForCausalLM"
    assert all(torch.equal(loaded.model.state_dict()[name], tensor) for name, tensor in stored.items())


def test_a_tokenizers_code_of_another_repository(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    settings = {"auto_map": ["owner/name--tok.Own", None], "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    refused(folder, "another repository", trust_remote_code=True)


# Models that are not causal


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "BertLMHeadModel attends in both directions"),
        ({"model_type": "clip"}, "'clip' has no causal language model"),
        ({"model_type": "mllama", "architectures": ["MllamaForConditionalGeneration"]}, "MllamaForCond"),
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
    tiny_tokenizer(tmp_path)
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


def test_names_of_old_checkpoints(folder: Path, tmp_path: Path) -> None:
    """Without the base model's name; of GPT-2 with masks in each layer, as the hub has it."""
    said: list[str] = []
    rewrite(folder, lambda stored: without_base(stored, "model"))
    load_folder(folder, say=said.append)
    assert said == []
    gpt2 = made(tmp_path / "gpt2", "gpt2", shard="1GB")
    rewrite(gpt2, lambda stored: without_base(stored, "transformer"))
    masks = {"h.0.attn.bias": torch.ones(4), "h.1.attn.masked_bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8)}
    rewrite(gpt2, lambda stored: stored.update(masks))
    assert load_folder(gpt2).architecture == "GPT2LMHeadModel"
    edit_config(gpt2, n_layer=1)
    refused(gpt2, r"h\.1\..*more layers than config\.json has")


@pytest.mark.parametrize("name", [
    "model.layers.0.self_attn.q_proj.SCB", "layers.-1.a",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
])  # fmt: skip
def test_weights_of_a_module_or_a_layer_that_has_none_such(folder: Path, name: str) -> None:
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


def test_an_index_beside_whole_weights_is_not_read(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lost": "model-1.safetensors"}}')
    assert load_folder(folder).parameters


# A config.json that describes far more than the files hold is rejected before memory is allocated


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 22}, {"num_experts": 10**9}, {"hidden_size": 10**12, "head_dim": 16}], ids=str
)
def test_larger_than_the_weights(folder: Path, changes: dict[str, int]) -> None:
    edit_config(folder, **changes)
    refused(folder, r"config\.json")


def test_buffers_and_vocabularies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-J keeps sines for all its positions. A vocabulary that is most of a model is counted once."""
    folder = made(tmp_path / "gptj", "gptj")
    monkeypatch.setattr(build, "_MOST_BUFFERED", 100_000)
    assert load_folder(folder).parameters
    edit_config(folder, n_positions=100_000)
    refused(folder, "number of layers or positions")
    tied = tiny_checkpoint(tmp_path / "tied", hidden=16, heads=2, key_value_heads=1, layers=1, tied=True)
    assert load_folder(tied).parameters < 12_000


def test_messages_name_the_users_folder(folder: Path) -> None:
    """And not the private folder to which its files were copied."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32", "hidden_act": "none"}))
    assert ".evalkit-" not in refused(folder, str(folder))
    (folder / "tokenizer.json").write_text("{")
    assert ".evalkit-" not in refused(folder, str(folder))


def test_tokenizers_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    def changed(name: str, change: Callable[[Any], Any]) -> str:
        copy = tiny_tokenizer(tmp_path / name)
        content = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
        change(content)
        (copy / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        return str(copy)

    def only_unknown(content: dict[str, Any]) -> None:
        content["model"] = {"type": "WordLevel", "vocab": {"<unk>": 3, "zzz": 4}, "unk_token": "<unk>"}
        content["pre_tokenizer"], content["post_processor"] = {"type": "Whitespace"}, None

    unknown = changed("unknown", only_unknown)
    settings = Path(unknown) / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"unk_token": "<unk>"}))
    refused(folder, "unknown tokens", tokenizer=unknown)
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    refused(folder, "has no character offsets")
    (folder / "vocab.json").unlink()
    refused(folder, r"--tokenizer FOLDER\|HUB-NAME")
    assert load_folder(folder, tokenizer=changed("same", lambda _: None)).bos_id == 0


def test_a_name_that_its_config_does_not_bear_out_is_reported(tmp_path: Path) -> None:
    """Patched code saves a Llama; "integrated" is another word."""
    for name, count in (("125M-intg/step100", 1), ("llama_Diff", 1), ("integrated", 0)):
        said: list[str] = []
        load_folder(tiny_checkpoint(tmp_path / name), say=said.append)
        assert len([line for line in said if "models convert" in line]) == count, name
