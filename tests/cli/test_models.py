"""`evalkit models` through its real entry point, and its checkpoints through `evalkit run`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from evalkit.models.zoo.named import models, named_model
from tests.cli.test_root import Command, _no_settings, complains, evalkit
from tests.models.small import TEXT, small
from tests.tiny import tiny_checkpoint

__all__ = ["_no_settings", "evalkit"]  # fixtures


@pytest.fixture(autouse=True)
def _text(_no_settings: None) -> None:
    Path("text.txt").write_text(TEXT, encoding="utf-8")


def test_list(evalkit: Command) -> None:
    found = json.loads(evalkit("models", "ls", "--format", "json").out)
    assert [one["name"] for one in found] == [model.name for model in models()]
    lines = evalkit("models", "ls").out.splitlines()
    assert max(map(len, lines)) <= 100
    row = next(line for line in lines if line.startswith("llama-125m-intg "))
    assert row.split()[1:4] == ["llama", "integral", "10–19/20"]
    assert row.split()[-4:] == ["8", "×", "8", "125,015,808"]


def test_show(evalkit: Command) -> None:
    shown = evalkit("models", "show", "llama-125m-intg-16h-8s").out
    for words in ("integral in layers 10–19 (from 0), vanilla in the others", "16 of 48 channels; 8 signals of 6",
                  "125,015,808: 24,576,000 in the embedding, 100,439,808 in the rest",
                  "61,440 bytes per token in bfloat16", "at 2,048 tokens"):  # fmt: skip
        assert words in shown
    readings = dict(line.split() for line in shown.split("could be)\n\n")[1].splitlines()[2:])
    assert readings == {"num_signals": "8", "signal_rope": "per_signal", "signal_layout": "contiguous",
                        "signal_scale": "signal", "signal_domain": "logits"}  # fmt: skip
    assert "4 pairs of maps of 96 (d_h), with values of 192" in evalkit("models", "show", "llama-125m-diff").out
    assert "could be" not in evalkit("models", "show", "llama-125m-vanilla").out


def test_show_a_checkpoint(evalkit: Command, tmp_path: Path) -> None:
    named = small(tmp_path, "differential")
    by_name = evalkit("models", "show", named.source).out
    assert evalkit("models", "init", named.source, "-o", "out", "--train-tokenizer", "text.txt").code == 0
    for given in ("./out", "out"):
        of_folder = evalkit("models", "show", given).out
        assert of_folder.splitlines()[1:] == by_name.splitlines()[2:]
    tiny_checkpoint(Path("stock"), "gpt_neox")
    assert "gpt_neox; model type gpt_neox" in evalkit("models", "show", "./stock").out


@pytest.mark.parametrize("attention", ["cog", "differential", "integral"])
def test_a_made_model_is_one_that_run_accepts(
    evalkit: Command, documents: Path, tmp_path: Path, attention: str
) -> None:
    source = small(tmp_path, attention, window=4096).source
    made = evalkit("models", "init", source, "--output", "ckpt", "--seed", 7, "--train-tokenizer", "text.txt")
    assert made.code == 0
    assert made.out == f"{attention}, random weights of seed 7, float32: ckpt\n"
    assert "tokens; the model's vocabulary stays at 512" in made.err
    outcome = evalkit("run", "--model", "ckpt", "--data-dir", documents, "--allow-unofficial-data", "--tasks", "piqa",
                      "--limit", 5, "--output", "runs")  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "EvalkitLlamaForCausalLM" in outcome.err
    assert outcome.out.splitlines()[2].split()[:2] == ["PIQA*", "5"]


def test_export_and_convert(evalkit: Command, tmp_path: Path) -> None:
    source = small(tmp_path, "integral").source
    evalkit("models", "init", source, "--output", "own", "--train-tokenizer", "text.txt")
    exported = evalkit("models", "export", "./own", "--output", "exported")
    assert exported.code == 0
    assert "from_pretrained('exported', trust_remote_code=True)" in exported.out
    complains(evalkit("models", "export", "./own", "--output", "exported"), 2, "--output exported", "already exists")
    torch.manual_seed(0)
    DiffLlamaForCausalLM(
        DiffLlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    ).save_pretrained("theirs")
    converted = evalkit("models", "convert", "./theirs", "--output", "converted")
    assert converted.code == 0
    assert "holds no tokenizer" in converted.err
    assert "differential in layers 0–1" in evalkit("models", "show", "./converted").out
    complains(evalkit("models", "convert", "./own", "-o", "x"), 1, "./own", "already in evalkit's format")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sow"], ["unknown command 'sow'", "did you mean 'show'"]),
        (["show", "llama-125m-intq"], ["unknown model 'llama-125m-intq'", "did you mean 'llama-125m-intg'"]),
        (["show", "own.yaml"], ["own.yaml cannot be read"]),
        (["init", "llama-125m-intg"], ["Missing option '--output'"]),
        (["init", "llama-125m-intg", "-o", "x"], ["needs a tokenizer", "--train-tokenizer TEXT"]),
        (["init", "llama-125m-intg", "-o", "text.txt", "--train-tokenizer", "text.txt"], ["already exists"]),
        (["init", "llama-125m-intg", "-o", "x", "--dtype", "fp32", "--tokenizer", "y"], ["unknown dtype 'fp32'"]),
        (
            ["init", "llama-125m-intg", "-o", ".", "--train-tokenizer", "text.txt"],
            ["--output .", "is the working directory"],
        ),
        (["init", "llama-125m-intg", "-o", "x", "--seed", str(2**63), "--train-tokenizer", "text.txt"], ["--seed"]),
        (["show", "nowhere"], ["unknown model 'nowhere'"]),
        (["convert", "./x", "-o", "y", "--rope", "half"], ["'half'", "interleaved"]),
    ],
)
def test_invalid_commands(evalkit: Command, arguments: list[str], words: list[str]) -> None:
    complains(evalkit("models", *arguments), 2, *words)
    assert sorted(path.name for path in Path().iterdir()) == ["text.txt"]


def test_checkpoints_that_cannot_be(evalkit: Command) -> None:
    complains(evalkit("models", "show", "./nowhere"), 1, "nowhere: folder not found")
    tiny_checkpoint(Path("stock"))
    complains(evalkit("models", "export", "./stock", "-o", "x"), 1, "model type 'llama' is none of evalkit's")
    complains(evalkit("models", "convert", "./stock", "-o", "x"), 1, "neither transformers' DiffLlama")
    (Path("stock") / "config.json").write_text('{"model_type": "gpt2"}')
    complains(evalkit("models", "show", "./stock"), 1, "config.json: model_type is 'gpt2'")
    complains(
        evalkit("models", "init", "llama-125m-intg", "-o", "x", "--train-tokenizer", "nowhere.txt"),
        1, "nowhere.txt: cannot be read",
    )  # fmt: skip
    assert not Path("x").exists()


@pytest.mark.parametrize("arguments", [["models", "ls"], ["models", "show", "llama-1.2b-diff"], ["models", "--help"]])
def test_looking_starts_without_anything_heavy(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "evalkit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert "click" in imported
    assert imported.isdisjoint({"torch", "transformers", "tokenizers", "numpy", "pandas"})


def test_every_named_model_can_be_shown(evalkit: Command) -> None:
    for model in models():
        assert f"{named_model(model.name).shape.attention.heads} of " in evalkit("models", "show", model.name).out
