"""Stretched models: every rotary module has the formula's frequencies, or the checkpoint is rejected with a reason."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPTJConfig,
    LlamaConfig,
    NanoChatConfig,
    Phi3Config,
    PretrainedConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from evalkit.compatibility.transformers import quiet
from evalkit.errors import CheckpointError, ScoringError
from evalkit.models.context.extension import ContextSettings, Extension, rotary_frequencies
from evalkit.models.context.stretch import finish, stretch
from evalkit.models.loading.load import LoadedModel, load
from evalkit.models.loading.locate import locate
from evalkit.models.loading.spec import extension_of
from tests.marks import fast
from tests.models.loading import edit_config
from tests.models.test_gguf import write_gguf
from tests.models.variants.building import COG, DIFFERENTIAL, FAMILIES, INTEGRAL, config_of
from tests.tiny import Family, tiny_checkpoint, tiny_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
}
STRETCHED: dict[str, tuple[dict[str, Any], int]] = {
    "cog": (COG, 16),
    "integral": (INTEGRAL, 8),
    "integral, whole heads": (INTEGRAL | {"signal_rope": "full_head"}, 16),
    "differential, heads kept": (DIFFERENTIAL | {"diff_heads": "keep"}, 8),
    "differential, heads halved": (DIFFERENTIAL, 16),
}
"""Each with the channels of what rotates as a head of its own, of heads of 16."""


def saved(config: PretrainedConfig, folder: Path) -> Path:
    """A checkpoint of random weights under a config."""
    tiny_tokenizer(folder)
    torch.manual_seed(0)
    with quiet():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def stretched(folder: Path, target: int = 8192, method: str = "yarn", dtype: str = "auto", **more: Any) -> LoadedModel:
    checkpoint = locate(str(folder))
    extension = extension_of(checkpoint, ContextSettings(context=target, method=method, **more))
    return load(checkpoint, device="cpu", dtype=dtype, extension=extension)


def rotary_modules(loaded: LoadedModel) -> dict[str, Any]:
    return {name: module for name, module in loaded.model.named_modules() if hasattr(module, "inv_freq")}


def assert_rotates(module: Any, extension: Extension, size: int, theta: float = 1e4) -> None:
    frequencies, scaling = rotary_frequencies(extension, size, theta)
    assert module.inv_freq.dtype == torch.float32
    np.testing.assert_allclose(module.inv_freq.double().numpy(), frequencies, rtol=5e-7)
    assert module.attention_scaling == pytest.approx(scaling, rel=1e-9)


@pytest.mark.parametrize(("dtype", "family"), [
    ("float32", "llama"), ("bfloat16", "gpt_neox"), pytest.param("bfloat16", "qwen2", marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("method", ["yarn", "linear", "ntk", "none"])
def test_frequencies_are_the_formulas(tmp_path: Path, family: Family, method: str, dtype: str) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", family, window=512, hidden=256)
    loaded = stretched(folder, 2048, method, dtype)
    assert (loaded.window, loaded.dtype, loaded.extension.factor) == (2048, dtype, 1.0 if method == "none" else 4.0)
    [module] = rotary_modules(loaded).values()
    size = 16 if family == "gpt_neox" else 64
    assert_rotates(module, loaded.extension, size)
    if method in ROPE_INIT_FUNCTIONS:
        expected, scaling = ROPE_INIT_FUNCTIONS[method](module.config)
        assert torch.equal(module.inv_freq, expected) and module.attention_scaling == scaling
    cos, sin = module(torch.zeros(1, 1), torch.arange(2048)[None])
    _, scaling = rotary_frequencies(loaded.extension, size, 1e4)
    assert torch.allclose(cos**2 + sin**2, torch.full_like(cos, scaling**2))


@pytest.mark.parametrize("variant", STRETCHED)
@pytest.mark.parametrize("backbone", fast(["gpt_neox"], FAMILIES))
def test_variants_are_stretched_in_every_layer(tmp_path: Path, backbone: str, variant: str) -> None:
    """The backbone's module, and that of each layer whose signals or halves rotate separately."""
    keys, size = STRETCHED[variant]
    folder = saved(config_of(backbone, keys, vocab_size=512), tmp_path / "model")
    whole, size = (8, size // 2) if backbone == "gpt_neox" else (16, size)
    loaded = stretched(folder, 512)
    modules = rotary_modules(loaded)
    own = {name: module for name, module in modules.items() if ".layers." in name}
    assert len(own) == (0 if size == whole else 2)
    for name, module in modules.items():
        assert_rotates(module, loaded.extension, size if name in own else whole, 5e3)


def test_a_short_text_is_read_differently_and_an_unstretched_one_is_not(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", window=64)
    ids = torch.arange(40)[None]
    plain = load(locate(str(folder))).model(ids).logits
    assert torch.equal(stretched(folder, 64).model(ids).logits, plain)
    assert torch.equal(stretched(folder, 256, "none").model(ids).logits, plain)
    assert torch.allclose(stretched(folder, 256, "dynamic-yarn").model(ids).logits, plain, atol=1e-5)
    for method in ("yarn", "linear", "ntk"):
        loaded = stretched(folder, 256, method)
        assert not torch.allclose(loaded.model(ids).logits, plain, atol=1e-3)
        assert loaded.extension is not None and loaded.facts()["window"] == 256
        assert loaded.facts()["context_extension"] == loaded.extension.specification()
        assert f"from 64 to 256 tokens by {method}" in loaded.describe()


@pytest.mark.parametrize("backbone", fast(["gpt_neox"], ["llama", "gpt_neox"]))
def test_dynamic_yarn_reads_each_length_as_yarn_of_that_length_does(tmp_path: Path, backbone: str) -> None:
    """In any order: earlier sequences have no effect. It scores, but does not generate past the window."""
    sizes = {"vocab_size": 512, "max_position_embeddings": 32, "initializer_range": 0.02}
    folder = saved(config_of(backbone, INTEGRAL, **sizes), tmp_path / "model")
    dynamic = stretched(folder, 128, "dynamic-yarn").model
    plain = load(locate(str(folder)))
    for length in (100, 20, 128, 32):
        ids = torch.arange(length)[None]
        still = plain if length <= 32 else stretched(folder, length)
        assert torch.allclose(dynamic(ids).logits, still.model(ids).logits, atol=1e-6)
    assert dynamic.generate(torch.arange(8)[None], max_new_tokens=8, do_sample=False).shape[1] <= 16
    with pytest.raises(ScoringError, match="past 32 tokens"):
        dynamic.generate(torch.arange(28)[None], max_new_tokens=8, min_new_tokens=8, do_sample=False)
    with pytest.raises(ScoringError, match="one complete sequence at a time"):
        dynamic(torch.arange(80).view(2, 40))


def test_an_own_stretching_is_replaced_and_theta_kept(tmp_path: Path) -> None:
    own = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024, "rope_theta": 5e5}
    folder = saved(LlamaConfig(**SHAPE, rope_parameters=own | {"mscale": 2.0, "mscale_all_dim": 1.0}), tmp_path / "m")
    for method in ("yarn", "ntk"):
        loaded = stretched(folder, 4096, method, original=1024)
        [module] = rotary_modules(loaded).values()
        assert_rotates(module, loaded.extension, 64, 5e5)
    source = tiny_checkpoint(tmp_path / "source", window=192)
    loaded = stretched(write_gguf(source, tmp_path / "small.gguf"), 768)
    [module] = rotary_modules(loaded).values()
    assert_rotates(module, loaded.extension, 16)
    assert (loaded.window, loaded.extension.original) == (768, 192)


GPTJ = GPTJConfig(n_embd=64, n_layer=2, n_head=4, n_positions=256, vocab_size=512, rotary_dim=8)
CANNOT: dict[str, tuple[PretrainedConfig, str]] = {
    "GPT-J": (GPTJ, "'gptj' has no rope_parameters"),
    "ALiBi": (FalconConfig(**SHAPE | {"hidden_size": 64}, alibi=True), "layers 0, 1 of FalconForCausalLM do not use"),
    "Phi-3": (Phi3Config(**SHAPE, num_key_value_heads=2, bos_token_id=0, eos_token_id=1), "'phi3' that takes yarn"),
    # It normalises queries and keys after it has rotated them
    "NanoChat": (NanoChatConfig(**SHAPE, num_key_value_heads=2), "NanoChatForCausalLM cancels yarn's attention factor"),
}


@pytest.mark.parametrize("kind", CANNOT)
def test_models_that_would_not_be_stretched_are_refused(tmp_path: Path, kind: str) -> None:
    config, words = CANNOT[kind]
    folder = saved(config, tmp_path / "model")
    with pytest.raises(CheckpointError, match=words):
        stretched(folder, 8192)
    if kind == "NanoChat":
        assert stretched(folder, 8192, "ntk").window == 8192


def test_models_and_layers_without_rotary_positions(tmp_path: Path) -> None:
    """The window of ALiBi, which has none in its config, may be given; SmolLM3's fourth layers have no positions."""
    config = BloomConfig(vocab_size=512, hidden_size=64, n_layer=2, n_head=4, pad_token_id=None)
    folder = saved(config, tmp_path / "bloom")
    assert stretched(folder, 700, original=700).window == 700
    with pytest.raises(CheckpointError, match="cannot be stretched"):
        stretched(folder, 1400, original=700)
    shape = SHAPE | {"num_hidden_layers": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("smollm3", **shape, no_rope_layers=[1, 1, 1, 0])
    folder = saved(config, tmp_path / "smollm3")
    assert stretched(folder, dtype="bfloat16").window == 8192


def built(folder: Path, **changes: Any) -> tuple[Any, Any]:
    """Return a model loaded with an extended config, and the extension that `finish` checks."""
    extension = extension_of(locate(str(folder)), ContextSettings(context=8192))
    assert extension is not None
    changed = AutoConfig.from_pretrained(folder)
    expected = stretch("model", changed, extension)
    for name, value in changes.items():
        setattr(changed, name, value)
    return AutoModelForCausalLM.from_pretrained(folder, config=changed, dtype=torch.float32).eval(), expected


def test_traps_after_loading_are_found(tmp_path: Path) -> None:
    """The ways in which an extension is lost silently."""
    folder = saved(LlamaConfig(**SHAPE), tmp_path / "llama")
    model, expected = built(folder)
    finish("model", model, expected)

    def refused(model: Any, words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            finish("model", model, expected)

    refused(model.to(torch.bfloat16), "frequencies are not yarn")
    # Set after loading
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    plain.config.rope_parameters = model.config.rope_parameters
    refused(plain, r"model\.rotary_emb: its rotary frequencies are not")
    # The right frequencies, but queries and keys not multiplied
    model, _ = built(folder)
    model.model.rotary_emb.attention_scaling = 1.0
    refused(model, r"attention scaling is 1.0, not 1\.138")
    # Without the original window: a ramp for 8,192
    parameters = {k: v for k, v in model.config.rope_parameters.items() if k != "original_max_position_embeddings"}
    refused(built(folder, rope_parameters=parameters)[0], "frequencies are not")
    refused(AutoModelForCausalLM.from_config(GPTJ), "GPTJForCausalLM do not use")


def test_a_lost_share_of_partial_rotary_embeddings_is_found(tmp_path: Path) -> None:
    """Replaced instead of merged, GPT-NeoX would silently rotate all channels of a head."""
    folder = tiny_checkpoint(tmp_path / "neox", "gpt_neox", window=512, hidden=256)
    model, expected = built(folder)
    parameters = {k: v for k, v in model.config.rope_parameters.items() if k != "partial_rotary_factor"}
    with pytest.raises(CheckpointError, match="frequencies are not"):
        finish("model", built(folder, rope_parameters=parameters)[0], expected)
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e-320})
    with pytest.raises(CheckpointError, match="frequencies are not"):
        stretched(folder)


@pytest.mark.parametrize("layers", [[3], [1, 2]])
def test_a_single_deviating_layer_is_detected(tmp_path: Path, layers: list[int]) -> None:
    folder = saved(LlamaConfig(**SHAPE | {"num_hidden_layers": 4}), tmp_path / "llama")
    model, expected = built(folder)
    model = model.to(torch.bfloat16)
    for name, buffer in built(folder)[0].named_buffers():
        model.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer
    finish("model", model, expected)
    plain = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb

    def unstretched(_: Any, args: Any, settings: dict[str, Any]) -> Any:
        return args, settings | {"position_embeddings": plain(args[0], settings["position_ids"])}

    def unscaled(_: Any, args: Any, settings: dict[str, Any]) -> Any:
        rotary = copy.deepcopy(model.model.rotary_emb)
        rotary._forward_pre_hooks.clear()
        rotary.attention_scaling = 1.0
        return args, settings | {"position_embeddings": rotary(args[0], settings["position_ids"])}

    for own_way, words in (
        (unstretched, f"layers {', '.join(map(str, layers))} of"),
        (unscaled, "cancels yarn's attention factor"),
    ):
        hooks = [model.model.layers[n].register_forward_pre_hook(own_way, with_kwargs=True) for n in layers]
        with pytest.raises(CheckpointError, match=words):
            finish("model", model, expected)
        for hook in hooks:
            hook.remove()
