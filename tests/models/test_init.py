"""Random checkpoints: deterministic by seed, written atomically, and valid for evalkit."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from evalkit.errors import CheckpointError, UnknownNameError, UsageError
from evalkit.models.variants.settings import KEYS
from evalkit.models.zoo.named import write_random
from evalkit.models.zoo.shapes import parameters
from tests.models.loading import load_folder
from tests.models.small import ATTENTIONS, BASES, TEXT, small
from tests.tiny import tiny_tokenizer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.mark.parametrize("backbone", BASES)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_loads(tmp_path: Path, text: Path, attention: str, backbone: str) -> None:
    model = small(tmp_path, attention, backbone)
    said: list[str] = []
    write_random(model, tmp_path / "out", seed=1, texts=[text], say=said.append)
    loaded = load_folder(tmp_path / "out", say=said.append)
    assert loaded.parameters == parameters(model.shape).total
    assert (loaded.bos_id, loaded.eos_id, loaded.window) == (1, 2, 256)
    assert len(said) == 1 and "tokens; the model's vocabulary stays at 512" in said[0]
    written = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert {key: written[key] for key in model.config} == model.config
    assert set(KEYS[attention]) <= set(written)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text(encoding="utf-8"))
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)
    logits = loaded.model(torch.arange(20)[None]).logits
    assert torch.isfinite(logits).all() and logits.std() > 0.1


def test_the_seed_decides_every_bit(tmp_path: Path) -> None:
    model, words = small(tmp_path, "differential"), str(tiny_tokenizer(tmp_path / "words"))
    state = torch.get_rng_state()
    for name, seed, dtype in (("a", 3, "float32"), ("b", 3, "float32"), ("c", 4, "float32"), ("d", 3, "bfloat16")):
        write_random(model, tmp_path / name, seed=seed, dtype=dtype, tokenizer=words)
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c, d = (load_file(tmp_path / name / "model.safetensors") for name in "abcd")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert not torch.equal(a["model.layers.0.self_attn.lambda_q1"], c["model.layers.0.self_attn.lambda_q1"])
    for name, weight in a.items():
        assert torch.equal(weight, b[name])
        assert torch.equal(weight.bfloat16(), d[name])
    assert load_folder(tmp_path / "d").dtype == "bfloat16"


def test_the_tokenizers_files_are_copied_and_its_ids_taken(tmp_path: Path) -> None:
    words = tiny_tokenizer(tmp_path / "words")
    write_random(small(tmp_path, "integral"), tmp_path / "out", seed=0, tokenizer=str(words))
    for path in words.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    words = tiny_tokenizer(tmp_path / "words")
    content = json.loads((words / "tokenizer.json").read_text(encoding="utf-8"))
    content["added_tokens"].append(dict(content["added_tokens"][0], id=600, content="<far>"))
    content["model"]["vocab"]["<far>"] = 600
    (words / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(
        CheckpointError, match="the tokenizer has ids up to 600, but the model's embedding has 512 rows"
    ) as caught:
        write_random(small(tmp_path, "vanilla"), tmp_path / "out", seed=0, tokenizer=str(words))
    assert str(words) in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_act", "sillu", r"cannot be built \(KeyError 'sillu'\)"),
        ("rms_norm_eps", "1e-5", "expected float, got str"),
        ("rope_parameters", {"rope_type": "yarn"}, r"cannot be built \(KeyError 'factor'\)"),
    ],
)
def test_what_transformers_cannot_build(tmp_path: Path, text: Path, key: str, value: object, words: str) -> None:
    model = small(tmp_path, "integral")
    wrong = replace(model, config=model.config | {key: value})
    with pytest.raises(UsageError, match=words) as caught:
        write_random(wrong, tmp_path / "out", seed=0, texts=[text])
    assert str(caught.value).startswith(f"{model.source}: model 'integral'")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_not_overwritten(tmp_path: Path, text: Path) -> None:
    model, output = small(tmp_path, "vanilla"), tmp_path / "out"
    output.mkdir()
    write_random(model, output, seed=0, texts=[text])
    before = (output / "model.safetensors").read_bytes()
    for taken in (output, text):
        with pytest.raises(UsageError, match=r"already exists; choose another folder"):
            write_random(model, taken, seed=1, texts=[text])
    assert (output / "model.safetensors").read_bytes() == before


def test_one_way_to_a_tokenizer(tmp_path: Path, text: Path) -> None:
    model = small(tmp_path, "vanilla")
    for ways in ({}, {"tokenizer": str(tmp_path), "texts": [text]}):
        with pytest.raises(UsageError, match=r"either --tokenizer FOLDER\|HUB-NAME or --train-tokenizer TEXT"):
            write_random(model, tmp_path / "out", seed=0, **ways)
    with pytest.raises(UnknownNameError, match="unknown dtype 'fp32'"):
        write_random(model, tmp_path / "out", seed=0, dtype="fp32", texts=[text])
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        write_random(model, tmp_path / "out", seed=0, tokenizer=str(tmp_path))


def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(CheckpointError, match=r"out: cannot be written \(No space left on device\); free space"):
        write_random(small(tmp_path, "vanilla"), tmp_path / "out", seed=0, texts=[text])
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "llama-vanilla.yaml"}


def test_an_output_that_cannot_be_made(tmp_path: Path, text: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written \(Not a directory\)"):
        write_random(small(tmp_path, "vanilla"), text / "below", seed=0, texts=[text])
