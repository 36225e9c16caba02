"""GGUF files: equal numbers, atomic caching, and one-line errors of damaged files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from evalkit.errors import CheckpointError
from evalkit.models.loading import gguf as module
from evalkit.models.loading.load import LoadedModel, load
from evalkit.models.loading.locate import locate
from tests.tiny import TOKENS, tiny_checkpoint

HEADS, KEY_VALUE_HEADS = 4, 2
TEXT = "The river rose in the night. Der Fluss stieg über Nacht; 夜里河水上涨。"
ROLES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """Return GGUF's name of a Llama weight."""
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in outer:
        return f"{outer[stem]}.weight"
    _, _, layer, role = stem.split(".", 3)
    return f"blk.{layer}.{ROLES[role]}.weight"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Permute rows to GGUF's order, with rotary pairs adjacent: [heads × dim, hidden]."""
    half = weight.shape[0] // heads // 2
    return weight.view(heads, 2, half, -1).transpose(1, 2).reshape(weight.shape)


def write_gguf(source: Path, path: Path) -> Path:
    """Write the Llama checkpoint in `source` as an unquantised GGUF file."""
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(192)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(512)
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (TOKENS - 2))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, weight in load_file(source / "model.safetensors").items():
        heads = {"q_proj": HEADS, "k_proj": KEY_VALUE_HEADS}.get(name.split(".")[-2])
        tensor = weight if heads is None else interleaved(weight, heads)
        writer.add_tensor(gguf_name(name), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("source"), heads=HEADS, key_value_heads=KEY_VALUE_HEADS, window=192)


@pytest.fixture
def file(source: Path, tmp_path: Path) -> Path:
    return write_gguf(source, tmp_path / "small.F32.gguf")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The GGUF files that have been dequantised."""
    names: list[str] = []
    original = module._read
    monkeypatch.setattr(module, "_read", lambda path, copy: names.append(path.name) or original(path, copy))
    return names


def opened(file: Path, **options: Any) -> LoadedModel:
    return load(locate(str(file)), device="cpu", **options)


def logits(loaded: LoadedModel) -> torch.Tensor:
    result: torch.Tensor = loaded.model(loaded.tokenizer(TEXT, return_tensors="pt")["input_ids"]).logits
    return result


def test_same_numbers_as_the_checkpoint_it_was_made_from(
    source: Path, file: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Dequantised once; to the same bits where the cache cannot hold the copy."""
    original = load(locate(str(source)), device="cpu")
    capfd.readouterr()
    first, second = opened(file), opened(file)
    assert reads == [file.name] and capfd.readouterr() == ("", "")
    assert torch.allclose(logits(first), logits(original), atol=1e-5)
    assert (first.architecture, first.window, first.dtype) == ("LlamaForCausalLM", 192, "float32")
    assert (first.name, first.bos_id, first.eos_id) == ("small.F32", 0, 1)
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "a file" / "cache"))
    said: list[str] = []
    direct = opened(file, say=said.append)
    assert any("no room" in line for line in said)
    for loaded in (first, second):
        assert torch.equal(logits(loaded), logits(direct))
        assert loaded.tokenizer.backend_tokenizer.to_str() == direct.tokenizer.backend_tokenizer.to_str()
        assert loaded.facts() == direct.facts() and loaded.fingerprint == direct.fingerprint


def test_a_copy_of_another_file_or_damaged_is_not_used(
    file: Path, cache: Path, tmp_path: Path, reads: list[str]
) -> None:
    expected = logits(opened(file))
    [ours] = (cache / "gguf").iterdir()
    other = write_gguf(tiny_checkpoint(tmp_path / "other", seed=1, window=192), tmp_path / "other.F32.gguf")
    assert not torch.allclose(logits(opened(other)), expected)
    [theirs] = (path for path in (cache / "gguf").iterdir() if path != ours)
    settings = ours / "generation_config.json"
    for damage in (
        lambda: (shutil.rmtree(ours), shutil.copytree(theirs, ours)),
        lambda: settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": 5})),
        (ours / "tokenizer.json").unlink,
    ):
        damage()
        loaded = opened(file)
        assert torch.equal(logits(loaded), expected) and loaded.model.generation_config.eos_token_id == 1
    assert len(reads) == 5
    # Another file under the same name
    shutil.copy(other, file)
    assert not torch.allclose(logits(opened(file)), expected)


def test_writing_that_breaks_off_leaves_nothing(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    root = cache / "gguf"
    with monkeypatch.context() as during:
        during.setattr(Path, "rename", full)
        opened(file)
    assert list(root.iterdir()) == []
    content = file.read_bytes()
    for keep in (8, -1000):
        file.write_bytes(content[:keep])
        with pytest.raises(CheckpointError, match=r"small\.F32\.gguf: cannot be read"):
            opened(file)
    assert list(root.iterdir()) == []


@pytest.mark.slow
def test_demo(demo: Path) -> None:
    cold, warm = opened(demo), opened(demo)
    for loaded in (cold, warm):
        assert (loaded.parameters, loaded.window, loaded.bos_id, loaded.eos_id) == (134_515_008, 8192, 1, 2)
    assert all(map(torch.equal, cold.model.parameters(), warm.model.parameters()))
