"""Simulated quantisation equals literal loops bit for bit, and its scores are those of each sequence alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, GPT2Config, OPTConfig

import evalkit
from evalkit.errors import CheckpointError, UsageError
from evalkit.models.loading.locate import QUANTISATION
from evalkit.models.loading.spec import model_spec
from evalkit.models.quantisation import Rounding, rounded, rounded_activations
from evalkit.scoring.engine import Engine
from tests.models.loading import load_folder, refused
from tests.scoring.conftest import from_alone, with_choices
from tests.tiny import VOCABULARY, tiny_checkpoint

F = np.float32


def literal_weights(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    new = torch.empty_like(weight)
    for row in range(len(weight)):
        for start in range(0, weight.shape[1], group):
            values = [F(number) for number in weight[row, start : start + group].float().tolist()]
            low, high = min(values), max(values)
            step = max(F(high - low) / F(2**bits - 1), np.finfo(F).tiny)
            for column, value in enumerate(values):
                # np.rint, as torch, rounds halves to even
                new[row, start + column] = float(F(np.rint(F(F(value - low) / step)) * step) + low)
    return new


def literal_activations(states: torch.Tensor, largest: float | None = None) -> torch.Tensor:
    new = torch.empty_like(states)
    for token in range(len(states)):
        values = [F(number) for number in states[token].float().tolist()]
        scale = max((max(abs(value) for value in values) if largest is None else F(largest)) / F(127), np.finfo(F).tiny)
        for channel, value in enumerate(values):
            new[token, channel] = float(F(np.clip(np.rint(value / scale), -127, 127) * scale))
    return new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group"), [(8, 64), (4, 16), (3, 8)])
def test_weights_equal_a_literal_loop_bit_for_bit(dtype: torch.dtype, bits: int, group: int) -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(bits)).to(dtype)
    weight[0], weight[1, :40], weight[2] = 0.25, -1e-30, -weight[2].abs()
    new = rounded(weight, bits, group)
    assert new.equal(literal_weights(weight, bits, group))
    assert all(len(part.unique()) <= 2**bits for part in new.unflatten(1, (-1, group)).flatten(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("largest", [None, 1.5])
def test_activations_equal_a_literal_loop_bit_for_bit(dtype: torch.dtype, largest: float | None) -> None:
    states = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    states[0], states[1, 7] = 0, 90.0
    new = rounded_activations(states, None if largest is None else torch.tensor(largest))
    assert new.equal(literal_activations(states, largest))
    assert new.abs().max() == (90.0 if largest is None else 1.5)


@pytest.mark.parametrize("setting", ["w4g16", "w3a8", "a8t"])
def test_every_linear_layer_but_the_head_computes_with_rounded_numbers(checkpoint: Path, setting: str) -> None:
    """Forward pass of the unchanged model, whose linear layers are replaced by literal ones."""
    spec = model_spec(checkpoint, device="cpu", quantise=setting)
    plain, loaded = load_folder(checkpoint), spec.load(spec.locate(), print)
    match = QUANTISATION.fullmatch(setting)
    assert match
    bits, group, activations = match.groups()
    ids = torch.arange(3, 15)[None]
    largest: dict[str, float] = {}
    for name, layer in plain.model.model.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue

        def forward(states: torch.Tensor, layer: Any = layer, name: str = name) -> torch.Tensor:
            weight = (
                layer.weight
                if bits is None
                else literal_weights(layer.weight, int(bits), int(group or layer.in_features))
            )
            if activations == "a8t" and len(states[0]) > ids.shape[1]:  # calibration
                largest[name] = float(states.abs().max())
            elif activations:
                states = literal_activations(states[0], largest.get(name))[None]
            return linear(states, weight, layer.bias)

        layer.forward = forward  # type: ignore[method-assign]
    text = (Path(evalkit.__file__).parents[1] / "configs" / "models" / "check.txt").read_text(encoding="utf-8")
    with torch.inference_mode():
        if activations == "a8t":
            tokens = plain.tokenizer(text, add_special_tokens=False)["input_ids"]
            plain.model(torch.tensor([[plain.bos_id, *tokens][:512]]))
        assert plain.model(ids).logits.equal(loaded.model(ids).logits)
    assert loaded.model.lm_head.weight.equal(plain.model.lm_head.weight)


def test_scales_are_measured_within_the_window(tmp_path: Path) -> None:
    """Learned positions end at the window, before the 512 tokens of the text do."""
    folder = tmp_path / "opt"
    shutil.copytree(tiny_checkpoint(tmp_path / "tiny"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    options = {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32}
    config = OPTConfig(num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64, **options)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    assert load_folder(folder, quantise="a8t").window == 64


@pytest.mark.parametrize("setting", ["w8a8", "w4g16a8t"])
def test_prefixes_are_shared_and_scores_are_those_of_a_sequence_alone(checkpoint: Path, setting: str) -> None:
    """Another order of sums may move a value to the next of its 255 steps: an error far below that of all steps."""
    spec = model_spec(checkpoint, device="cpu", quantise=setting)
    loaded, exact, said = spec.load(spec.locate(), print), load_folder(checkpoint), list[str]()
    sequences = with_choices((20, 33, 47), vocabulary=400)
    engine = Engine(loaded.model, 1024, said.append)
    engine.check(sequences)
    assert (engine.way, engine.why, said) == ("tree", "", [])
    assert from_alone(engine, loaded.model, sequences) < 0.1 * from_alone(engine, exact.model, sequences)


def test_rounding_that_is_coarser_in_a_batch_is_not_shared(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of sharing runs with the rounding of activations, too."""

    def coarser(states: torch.Tensor, _: Any) -> torch.Tensor:
        step = states.abs().amax(-1, keepdim=True) / (127 if states.shape[-2] < 250 else 12)
        return (states / step).round() * step

    monkeypatch.setattr("evalkit.models.quantisation.rounded_activations", coarser)
    loaded, said = load_folder(checkpoint, quantise="a8"), list[str]()
    engine = Engine(loaded.model, 256, said.append)
    engine.check(with_choices((20, 33), vocabulary=400))
    assert engine.way != "tree"
    assert "rounding explains" in said[0]


def test_only_models_of_whole_linear_layers_are_rounded(checkpoint: Path) -> None:
    options = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64}
    with pytest.raises(CheckpointError, match="c_attn"):
        Rounding("gpt2", AutoModelForCausalLM.from_config(GPT2Config(**options)), "w8")
    refused(checkpoint, "groups of 48", quantise="w4g48")
    for wrong in ("w1", "4", "w4a4", "a8w4", "w4g0"):
        with pytest.raises(UsageError, match="quantise"):
            model_spec(checkpoint, quantise=wrong)
    live = load_folder(checkpoint)
    with pytest.raises(UsageError, match="quantise"):
        evalkit.evaluate(live.model, tokenizer=live.tokenizer, quantise="w8")


def test_a_rounded_run_is_another_one_and_is_paired_with_the_exact_one(
    checkpoint: Path, documents: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"output": tmp_path, "data_dir": documents, "allow_unofficial_data": True}
    options |= {"tasks": ("piqa",), "device": "cpu"}
    exact, coarse = (evalkit.evaluate(checkpoint, **options, quantise=setting) for setting in (None, "w3g16"))
    assert exact.manifest["id"] != coarse.manifest["id"]
    assert "float32-w3g16" in coarse.folder.name
    compared = evalkit.compare(exact, coarse)
    assert compared.claim.settings == {"quantisation": ("none", "w3g16")}
    assert compared.continuous is not None
    assert compared.continuous.average.difference
    assert evalkit.evaluate(checkpoint, **options, quantise="w3g16").folder == coarse.folder
