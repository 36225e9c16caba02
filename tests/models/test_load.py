"""From files to a model that scores: its numbers, its description, and weights that do not fit it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTJConfig

from evalkit.errors import UnknownNameError, UsageError
from evalkit.models.context.extension import context_window
from evalkit.models.loading.spec import model_spec
from evalkit.models.parts import resolve_device
from tests.models.loading import load_folder, refused
from tests.tiny import VOCABULARY, Family, tiny_checkpoint, tiny_tokenizer

FAMILIES: tuple[tuple[Family, str], ...] = (
    ("llama", "LlamaForCausalLM"),
    ("gpt_neox", "GPTNeoXForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
)


def rewrite(folder: Path, change: Any) -> None:
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("family", "architecture"), FAMILIES)
def test_families(tmp_path: Path, family: Family, architecture: str) -> None:
    path = tiny_checkpoint(tmp_path / "small", family, window=384, adds_bos=True)
    loaded = load_folder(path, attention="eager")
    stored = load_file(path / "model.safetensors")
    assert loaded.architecture == architecture == type(loaded.model).__name__
    assert loaded.parameters == sum(tensor.numel() for tensor in stored.values())
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    ids = torch.arange(2, 60)[None]
    assert torch.equal(loaded.model(ids).logits, reference(ids).logits)
    assert (loaded.dtype, loaded.device, loaded.window, loaded.name) == ("float32", "cpu", 384, "small")
    assert (loaded.bos_id, loaded.eos_id) == (0, 1)
    assert loaded.model.config._attn_implementation == loaded.attention == "eager"
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_description(saved: Path) -> None:
    first, second = load_folder(saved).describe().splitlines()
    assert first == "small: LlamaForCausalLM, 139.6K parameters, float32 on cpu, sdpa attention"
    assert second == "context window 256 tokens, BOS <s> (0), EOS </s> (1)"


def test_tokenizer_without_special_tokens(tmp_path: Path) -> None:
    loaded = load_folder(tiny_checkpoint(tmp_path, bos=None, eos=None))
    assert (loaded.bos_id, loaded.eos_id) == (None, None)
    assert loaded.describe().endswith("BOS none, EOS none")


def test_tied_weights_count_once(tmp_path: Path) -> None:
    tied = load_folder(tiny_checkpoint(tmp_path / "tied", tied=True))
    untied = load_folder(tiny_checkpoint(tmp_path / "untied"))
    assert untied.parameters - tied.parameters == VOCABULARY * 64


def test_dtype_is_the_checkpoints_own_unless_asked_otherwise(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, dtype="bfloat16")
    own, wide = load_folder(path), load_folder(path, dtype="float32")
    assert (own.dtype, wide.dtype) == ("bfloat16", "float32")
    assert {parameter.dtype for parameter in own.model.parameters()} == {torch.bfloat16}
    for narrow, parameter in zip(own.model.parameters(), wide.model.parameters(), strict=True):
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, narrow.float())


def test_shards(tmp_path: Path) -> None:
    whole = load_folder(tiny_checkpoint(tmp_path / "whole"))
    shards = load_folder(tiny_checkpoint(tmp_path / "shards", max_shard_size="100KB"))
    ids = torch.arange(20)[None]
    assert torch.equal(whole.model(ids).logits, shards.model(ids).logits)


def test_nothing_is_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rewrite(folder, lambda stored: stored.update({"unused": torch.ones(3)}))  # transformers prints warnings
    load_folder(folder)
    assert capfd.readouterr() == ("", "")


def test_missing_weights_are_refused(folder: Path) -> None:
    rewrite(folder, lambda stored: [stored.pop(name) for name in list(stored) if "layers.1." in name])
    assert "and 6 more" in refused(folder, r"9 weights are missing and would be random: model\.layers\.1\.")


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    rewrite(folder, lambda stored: stored.update({"model.norm.weight": torch.ones(65)}))
    refused(folder, r"model\.norm\.weight is \(65,\), not \(64,\)")


def test_unused_weights_are_reported_once(folder: Path) -> None:
    rewrite(folder, lambda stored: stored.update({"value_head.weight": torch.ones(3)}))
    said: list[str] = []
    load_folder(folder, say=said.append)
    assert len(said) == 1 and "1 weights that the model does not use: value_head.weight" in said[0]


def test_tokenizer_missing(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.rename(tmp_path / path.name)
    refused(folder, r"holds no tokenizer; .*--tokenizer FOLDER\|HUB-NAME")
    assert load_folder(folder, tokenizer=str(tmp_path)).bos_id == 0


def test_tokenizer_larger_than_the_embedding(folder: Path, tmp_path: Path) -> None:
    other = tiny_tokenizer(tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    content["added_tokens"].append(dict(content["added_tokens"][0], id=VOCABULARY + 8, content="<far>"))
    content["model"]["vocab"]["<far>"] = VOCABULARY + 8
    (other / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    refused(folder, r"ids up to 520, but the model's embedding has 512 rows", tokenizer=str(other))


def test_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    refused(folder, "the tokenizer cannot be read")


def test_tokenizer_without_offsets(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    refused(folder, "has no character offsets")


def test_device() -> None:
    assert resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu") == "cpu"
    for nonsense in ("gpu", "cuda:x", "meta", ""):
        with pytest.raises(UsageError, match="--device"):
            model_spec("demo", device=nonsense)


def test_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match="has no cuda device"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == "cuda:1"
    with pytest.raises(UsageError, match="has 2 cuda device"):
        resolve_device("cuda:2")


def test_attention_that_does_not_exist(saved: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown attention implementation 'spda': did you mean 'sdpa'"):
        load_folder(saved, attention="spda")


def test_window() -> None:
    from transformers import BloomConfig, GPT2Config, LlamaConfig, WhisperConfig

    class Tokenizer:
        model_max_length = 10**30

    said: list[str] = []
    tokenizer = Tokenizer()
    assert context_window("x", LlamaConfig(max_position_embeddings=77).to_dict(), tokenizer, said.append) == 77
    assert context_window("x", GPT2Config(n_positions=88).to_dict(), tokenizer, said.append) == 88
    assert context_window("x", WhisperConfig(max_target_positions=66).to_dict(), tokenizer, said.append) == 66
    assert said == []
    assert context_window("x", BloomConfig().to_dict(), tokenizer, said.append) == 2048
    assert len(said) == 1
    tokenizer.model_max_length = 99
    assert context_window("x", BloomConfig().to_dict(), tokenizer, said.append) == 99
    assert len(said) == 1


def test_attention_that_an_architecture_has_not(tmp_path: Path) -> None:
    """GPT-J has eager attention only: `auto` selects it, and requesting sdpa is an error that says what to do."""
    tiny_tokenizer(tmp_path)
    config = GPTJConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, n_positions=64, rotary_dim=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert load_folder(tmp_path).attention == "eager"
    assert "--attention eager" in refused(tmp_path, "has no sdpa attention", attention="sdpa")


def test_attention_is_sdpa_where_there_is_one(tmp_path: Path) -> None:
    assert load_folder(tiny_checkpoint(tmp_path / "small")).attention == "sdpa"
