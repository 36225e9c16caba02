"""`evalkit models` through its real entry point, and its checkpoints through `evalkit run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from evalkit.models.zoo.named import models, named_model
from tests.cli.test_root import Command, _no_settings, complains, evalkit
from tests.models.small import TEXT, small
from tests.test_api import heavy_after
from tests.tiny import tiny_checkpoint

__all__ = ["_no_settings", "evalkit"]  # fixtures


@pytest.fixture(autouse=True)
def _text(_no_settings: None) -> None:
    Path("text.txt").write_text(TEXT, encoding="utf-8")


def test_list_and_show(evalkit: Command) -> None:
    listed = json.loads(evalkit("models", "ls", "--format", "json").out)
    assert [model["name"] for model in listed] == [model.name for model in models()]
    for model in models():
        assert f"{named_model(model.name).shape.attention.heads} of " in evalkit("models", "show", model.name).out
    shown = evalkit("models", "show", "llama-125m-intg-16h-8s").out
    for words in ("integral in layers 10–19 (from 0), vanilla in the others", "16 of 48 channels; 8 signals of 6",
                  "125,015,808: 24,576,000 in the embedding, 100,439,808 in the rest",
                  "61,440 bytes per token in bfloat16"):  # fmt: skip
        assert words in shown
    assert "4 pairs of maps of 96 (d_h), with values of 192" in evalkit("models", "show", "llama-125m-diff").out


@pytest.mark.parametrize("attention", ["cog", "differential", "integral"])
def test_a_made_model_is_one_that_run_accepts(
    evalkit: Command, documents: Path, tmp_path: Path, attention: str
) -> None:
    source = small(tmp_path, attention, window=4096).source
    made = evalkit("models", "init", source, "--output", "ckpt", "--seed", 7, "--train-tokenizer", "text.txt")
    assert made.out == f"{attention}, random weights of seed 7, float32: ckpt\n"
    shown = [evalkit("models", "show", given).out.splitlines() for given in (source, "./ckpt")]
    assert shown[0][2:] == shown[1][1:]
    outcome = evalkit("run", "--model", "ckpt", "--data-dir", documents, "--allow-unofficial-data", "--tasks", "piqa",
                      "--limit", 5, "--output", "runs")  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[2].split()[:2] == ["PIQA*", "5"]


def test_export_and_convert(evalkit: Command, tmp_path: Path) -> None:
    source = small(tmp_path, "integral").source
    evalkit("models", "init", source, "--output", "own", "--train-tokenizer", "text.txt")
    assert "from_pretrained('exported'" in evalkit("models", "export", "./own", "--output", "exported").out
    complains(evalkit("models", "export", "./own", "--output", "exported"), 2, "--output exported")
    torch.manual_seed(0)
    DiffLlamaForCausalLM(
        DiffLlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    ).save_pretrained("theirs")
    assert evalkit("models", "convert", "./theirs", "--output", "converted").code == 0
    assert "differential in layers 0–1" in evalkit("models", "show", "./converted").out
    complains(evalkit("models", "convert", "./own", "-o", "x"), 1, "./own")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sow"], ["'sow'", "'show'"]),
        (["show", "llama-125m-intq"], ["'llama-125m-intq'", "'llama-125m-intg'"]),
        (["show", "own.yaml"], ["own.yaml"]),
        (["init", "llama-125m-intg"], ["--output"]),
        (["init", "llama-125m-intg", "-o", "x"], ["--train-tokenizer"]),
        (["init", "llama-125m-intg", "-o", "text.txt", "--train-tokenizer", "text.txt"], ["text.txt"]),
        (["init", "llama-125m-intg", "-o", "x", "--dtype", "fp32", "--tokenizer", "y"], ["'fp32'"]),
        (["init", "llama-125m-intg", "-o", ".", "--train-tokenizer", "text.txt"], ["--output ."]),
        (["init", "llama-125m-intg", "-o", "x", "--seed", str(2**63), "--train-tokenizer", "text.txt"], ["--seed"]),
    ],
)
def test_invalid_commands(evalkit: Command, arguments: list[str], words: list[str]) -> None:
    complains(evalkit("models", *arguments), 2, *words)
    assert sorted(path.name for path in Path().iterdir()) == ["text.txt"]


def test_checkpoints_that_cannot_be(evalkit: Command) -> None:
    complains(evalkit("models", "show", "./nowhere"), 1, "nowhere")
    tiny_checkpoint(Path("stock"))
    complains(evalkit("models", "export", "./stock", "-o", "x"), 1, "'llama'")
    complains(evalkit("models", "convert", "./stock", "-o", "x"), 1, "DiffLlama")
    (Path("stock") / "config.json").write_text('{"model_type": "gpt2"}')
    complains(evalkit("models", "show", "./stock"), 1, "config.json", "'gpt2'")
    assert not Path("x").exists()


def test_looking_starts_without_anything_heavy() -> None:
    command = ["models", "show", "llama-1.2b-diff"]
    assert heavy_after(f"from evalkit.cli.root import cli\ncli.main({command!r}, standalone_mode=False)") == set()
