"""Averages of checkpoints equal literal means in float64, load as the checkpoints do, and need checkpoints that fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evalkit.errors import CheckpointError, UsageError
from evalkit.models.loading.locate import locate
from evalkit.models.zoo.averaging import average_checkpoints
from tests.models.loading import edit_config, load_folder, rewrite
from tests.tiny import tiny_checkpoint, tiny_tokenizer


def averaged(folders: Sequence[Path], output: Path, decay: float | None = None) -> Path:
    average_checkpoints([locate(str(folder)) for folder in folders], output, decay)
    return output


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Checkpoints of a training in float32, the last one in several shards."""
    return [tiny_checkpoint(tmp_path / f"checkpoint-{seed}", seed=seed, max_shard_size=size)
            for seed, size in ((1, "1GB"), (2, "1GB"), (3, "100KB"))]  # fmt: skip


@pytest.mark.parametrize(("decay", "shares"), [(None, (1 / 3, 1 / 3, 1 / 3)), (0.75, (0.5625, 0.1875, 0.25))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_means_are_literal_ones(decay: float | None, shares: tuple[float, ...], dtype: str, tmp_path: Path) -> None:
    folders = [tiny_checkpoint(tmp_path / str(seed), seed=seed, dtype=dtype) for seed in (1, 2, 3)]
    content, stored = weights(averaged(folders, tmp_path / "out", decay)), [weights(folder) for folder in folders]
    assert content.keys() == stored[0].keys()
    for name, tensor in content.items():
        literal = torch.stack([share * of[name].double() for share, of in zip(shares, stored, strict=True)]).sum(0)
        assert tensor.dtype == stored[0][name].dtype
        # Half a unit in the last digit, and the rounding of float64 and, on the way to bfloat16, of float32
        half = torch.finfo(tensor.dtype).eps * literal.abs() * (0.5 + 1e-4) + 1e-15
        assert ((tensor.double() - literal).abs() <= half).all()


def test_the_average_is_a_checkpoint(three: list[Path], tmp_path: Path) -> None:
    """Files of tokenizer, config and generation are the last one's; a mean of shards is no sum of them."""
    out = averaged(three, tmp_path / "out")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (three[-1] / name).read_bytes()
    loaded, stored = load_folder(out), [weights(folder)["model.embed_tokens.weight"].double() for folder in three]
    assert torch.allclose(loaded.model.model.embed_tokens.weight.double(), sum(stored) / 3, atol=1e-7)


def test_tied_weights_and_buffers(tmp_path: Path) -> None:
    """A stored copy of a tied head stays equal to the embedding to the last bit; so do equal buffers, integers too."""
    folders = [tiny_checkpoint(tmp_path / str(seed), seed=seed, tied=True) for seed in (1, 2, 3)]
    assert "lm_head.weight" not in weights(averaged(folders, tmp_path / "tied"))
    assert load_folder(tmp_path / "tied").model.lm_head.weight is not None
    buffers = {"model.table": torch.arange(5), "model.frequencies": torch.full((4,), 0.1)}
    for folder in folders:
        rewrite(folder, lambda of: of.update(buffers, **{"lm_head.weight": of["model.embed_tokens.weight"].clone()}))
    content = weights(averaged(folders, tmp_path / "out"))
    assert content["lm_head.weight"].equal(content["model.embed_tokens.weight"])
    assert content["model.table"].equal(buffers["model.table"])
    assert content["model.frequencies"].equal(buffers["model.frequencies"])
    rewrite(folders[2], lambda of: of.update({"model.table": torch.arange(5) + 1}))
    with pytest.raises(CheckpointError, match=r"model\.table"):
        averaged(folders, tmp_path / "again")


def test_checkpoints_that_do_not_fit(three: list[Path], tmp_path: Path) -> None:
    """Named are both checkpoints and what differs; nothing is written."""
    name = "model.layers.0.mlp.up_proj.weight"

    def changed(change: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(three[1], folder)
        change(folder)
        return folder

    for change, noun in (
        (lambda folder: edit_config(folder, rope_theta=5e5), "rope_theta"),
        (lambda folder: rewrite(folder, lambda of: of.pop(name)), f"{name} .*absent"),
        (lambda folder: rewrite(folder, lambda of: of.update(extra=torch.ones(2))), "extra .*absent"),
        (lambda folder: rewrite(folder, lambda of: of.update({name: of[name][:-1].clone()})), name),
        (lambda folder: rewrite(folder, lambda of: of.update({name: of[name].bfloat16()})), f"{name} .*bfloat16"),
        (lambda folder: tiny_tokenizer(folder, bos="<begin>"), "tokenizers"),
        (lambda folder: edit_config(folder, quantization_config={"quant_method": "fp8"}), "quantised"),
    ):
        with pytest.raises(CheckpointError, match=noun):
            averaged([three[0], changed(change)], tmp_path / "out")
    for folders in ([three[0]], [three[0], three[0]], [three[0], changed(lambda folder: None), three[1]]):
        with pytest.raises(UsageError, match=r"two checkpoints|once"):
            averaged(folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # What does not change the model may differ
    changed(lambda folder: edit_config(folder, transformers_version="0"))
    averaged([three[0], tmp_path / "changed"], tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["transformers_version"] == "0"
