"""What a training computes, compared with a plain loop of torch; and how it begins, ends and fails."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from recipe.folder import Training
from recipe.loss_log import read_log
from recipe.running import run
from recipe.training import prepare, train
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import evalkit as package
from evalkit import list_runs
from evalkit.errors import UsageError
from tests.cli.test_root import Command, _no_settings, evalkit
from tests.pretrain.settings_files import ATTENTIONS
from tests.pretrain.trainings import train_without_space, trained, training_of
from tests.tiny import TRAINING_TEXT

__all__ = ["_no_settings", "evalkit"]  # fixtures


def plain_loop(training: Training, steps: int) -> dict[str, torch.Tensor]:
    """Return the weights after some steps of a loop that shares no code with the recipe.

    From text to tokens by the tokenizers library; rows by numpy; the loss, the learning rate, clipping and weight decay
    by their formulas; AdamW by its definition (arXiv 1711.05101, algorithm 2, with decay scaled by the learning rate).
    """
    recipe = training.recipe
    tokenizer = Tokenizer.from_file(str(Path(recipe.tokenizer or "") / "tokenizer.json"))
    first, last = (tokenizer.token_to_id(token) for token in ("<s>", "</s>"))
    lines = Path(recipe.text[0].files[0]).read_text().splitlines()
    tokens = [
        token for line in lines for token in (first, *tokenizer.encode(json.loads(line)["text"]).ids, last)
    ]  # fmt: skip
    count = len(tokens) // recipe.length
    rows = torch.tensor(tokens[: count * recipe.length]).view(count, recipe.length)
    order = np.concatenate([np.random.default_rng([training.seed, epoch]).permutation(count) for epoch in range(9)])
    model = AutoModelForCausalLM.from_pretrained(training.initial).train()
    weights = dict(model.named_parameters())
    moments = {name: (torch.zeros_like(weight), torch.zeros_like(weight)) for name, weight in weights.items()}
    one, two = recipe.betas
    for step in range(steps):
        batch = rows[torch.from_numpy(order[step * recipe.batch : (step + 1) * recipe.batch].copy())]
        logits = model(input_ids=batch, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, list(weights.values()))
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        assert norm > recipe.clip, "nothing would be clipped"
        rate = recipe.learning_rate * min(step / recipe.warmup_steps, cosine(recipe, step))
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            mean, square = moments[name]
            gradient = gradient * (recipe.clip / norm)
            mean.mul_(one).add_((1 - one) * gradient)
            square.mul_(two).add_((1 - two) * gradient**2)
            change = (mean / (1 - one ** (step + 1))) / ((square / (1 - two ** (step + 1))).sqrt() + 1e-8)
            decay = 0.0 if name.endswith("norm.weight") else recipe.weight_decay
            with torch.no_grad():
                weight.sub_(rate * (change + decay * weight))
    return {name: weight.detach() for name, weight in weights.items()}


def cosine(recipe: Any, step: int) -> float:
    if step < recipe.warmup_steps:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - recipe.warmup_steps) / (recipe.steps - recipe.warmup_steps)))


@pytest.mark.parametrize(
    ("model", "micro"),
    [("vanilla", None), pytest.param("differential", 2, marks=pytest.mark.training),
     pytest.param("cog", 1, marks=pytest.mark.training), pytest.param("integral", 4, marks=pytest.mark.training)],
)  # fmt: skip
def test_the_weights_are_those_of_a_plain_loop(shared: Path, tmp_path: Path, model: str, micro: int | None) -> None:
    """After six updates of up to 5e-3 each: agreement to 1e-6 of float32's 6e-8; without weight decay, or with other
    rows, they differ by 1e-4 and more.
    """
    training = trained(shared, tmp_path / "x", model=model, micro_batch=micro, seed=3, steps=6, warmup_steps=2,
                       clip=0.2, weight_decay=1.0)  # fmt: skip
    expected, found = plain_loop(training, 6), load_file(training.model / "model.safetensors")
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], atol=2e-6, rtol=0, msg=name)
    start = load_file(training.initial / "model.safetensors")
    assert all((found[name] - start[name]).abs().max() > 5e-3 for name in found)


def test_the_log_has_the_losses_of_its_rows(shared: Path, tmp_path: Path) -> None:
    training = trained(shared, tmp_path / "x", learning_rate=1e-12, log_every=5, held_out_every=None, steps=5)
    [row, held_out] = read_log(training.output / "training.csv")
    assert (row["step"], row["tokens"], row["held_out_loss"]) == ("5", str(5 * 4 * 32), "")
    assert (held_out["step"], held_out["loss"]) == ("5", "")
    # 512 nearly equal logits
    assert float(row["loss"]) == pytest.approx(math.log(512), abs=0.1)
    assert float(held_out["held_out_loss"]) == pytest.approx(math.log(512), abs=0.1)
    assert float(row["loss"]) != float(held_out["held_out_loss"])


@pytest.mark.training
@pytest.mark.parametrize("model", ATTENTIONS)
def test_mixed_precision(shared: Path, tmp_path: Path, model: str, capfd: pytest.CaptureFixture[str]) -> None:
    """bfloat16, recomputed activations: the loss falls, the weights are float32, and nothing is written to stderr."""
    training = trained(shared, tmp_path / "x", model=model, precision="bfloat16", checkpointing=True, steps=30)
    losses = [float(row["loss"]) for row in read_log(training.output / "training.csv") if row["loss"]]
    assert losses[-1] < losses[0] - 0.5
    assert {weight.dtype for weight in load_file(training.model / "model.safetensors").values()} == {torch.float32}
    assert capfd.readouterr().err == ""


def test_the_checkpoint_loads(shared: Path, tmp_path: Path, evalkit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """In transformers and in evalkit: `evalkit perplexity` has the sum of transformers' losses."""
    training = trained(shared, tmp_path / "x", model="cog")
    sentence = TRAINING_TEXT[0]
    (tmp_path / "sentence.txt").write_text(sentence)
    outcome = evalkit("perplexity", training.model, "--text", tmp_path / "sentence.txt", "-o", tmp_path / "runs")
    assert outcome.code == 0, outcome.err
    model = AutoModelForCausalLM.from_pretrained(training.model)
    assert type(model).__name__ == "EvalkitLlamaForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(training.model)
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(sentence)["input_ids"]]])
    nats = model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    [run] = list_runs(tmp_path / "runs")
    found = run.stored["whole"]["bits_per_byte"]
    assert found == pytest.approx(nats / math.log(2) / len(sentence.encode()), rel=1e-5)
    # Trained on this sentence among others
    before = AutoModelForCausalLM.from_pretrained(training.initial)(input_ids=ids, labels=ids).loss.item()
    assert nats / (ids.shape[1] - 1) < before - 0.5


def test_a_finished_training_says_so(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = trained(shared, tmp_path / "x", steps=2)
    before = {path: path.stat().st_mtime_ns for path in training.output.rglob("*")}
    capsys.readouterr()
    run([training], dry_run=False)
    assert capsys.readouterr().out == f"{training.model}: finished\n"
    assert {path: path.stat().st_mtime_ns for path in training.output.rglob("*") if path in before} == before


def test_other_settings_in_the_same_folder(shared: Path, tmp_path: Path) -> None:
    output = tmp_path / "x"
    trained(shared, output, steps=2)
    for change in ({"learning_rate": 1e-3}, {"steps": 4}, {"seed": 1}, {"model": "cog"}):
        with pytest.raises(UsageError, match=rf"x: was begun with other settings \({next(iter(change))}\)"):
            run([training_of(shared, output, **({"steps": 2} | change))], dry_run=False)
    with pytest.raises(UsageError, match=r"batch 4 .* micro-batches of 3"):
        trained(shared, tmp_path / "y", micro_batch=3)
    # What does not change the weights may change
    run([training_of(shared, output, steps=2, log_every=1, micro_batch=2, keep=1)], dry_run=True)


def test_other_text_in_the_same_folder(shared: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    for number, content in enumerate(("one " * 99, "two " * 99)):
        text.write_text(content)
        training = training_of(shared, tmp_path / "x", steps=2, text=[{"files": [str(text)]}])
        if number == 0:
            run([training], dry_run=True)
            (training.output / "training.csv").write_text("step\n")
            continue
        with pytest.raises(UsageError, match="packed_text"):
            run([training], dry_run=True)


@pytest.mark.training
def test_a_dry_run_binds_to_nothing(shared: Path, tmp_path: Path) -> None:
    """Another dry run replaces its settings and the model, and the training is that of a folder of its own."""
    others: list[dict[str, Any]] = [{"steps": 3}, {"seed": 1}, {"model": "cog"}, {}]
    for change in others:
        run([training_of(shared, tmp_path / "x", **({"steps": 2} | change))], dry_run=True)
    found, expected = (trained(shared, tmp_path / name, steps=2) for name in ("x", "own"))
    for path in ("training.json", "initial/config.json", "initial/model.safetensors", "model/model.safetensors"):
        assert (found.output / path).read_bytes() == (expected.output / path).read_bytes()


def test_settings_that_are_replaced_before_the_first_update(shared: Path, tmp_path: Path) -> None:
    """By another process: no training from another's weights."""
    one, other = (training_of(shared, tmp_path / "x", seed=seed, steps=2) for seed in (0, 1))
    sources = prepare(one, print)
    assert sources is not None
    with FileLock(one.lock), pytest.raises(UsageError, match="x: another process trains here"):
        prepare(other, print)
    assert prepare(other, print) is not None
    with pytest.raises(UsageError, match=r"x: was begun with other settings \(seed\)"):
        train(one, sources)
    assert not one.begun


DAMAGED = {"": "not valid JSON", '{"settings": {"seed"': "not valid JSON", "[]": "holds no settings",
           '{"settings": 1}': "holds no settings"}  # fmt: skip


@pytest.mark.training
@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_settings(shared: Path, tmp_path: Path, content: str) -> None:
    training = training_of(shared, tmp_path / "x", steps=2)
    run([training], dry_run=True)
    whole = training.settings.read_bytes()
    training.settings.write_text(content)
    run([training], dry_run=True)  # nothing has begun
    assert training.settings.read_bytes() == whole
    run([training], dry_run=False)
    training.settings.write_text(content)
    message = rf"x/training.json.* {DAMAGED[content]}.*; restore it, or remove it if the settings are those"
    with pytest.raises(UsageError, match=message):
        run([training], dry_run=False)
    training.settings.unlink()
    shutil.rmtree(training.model)
    run([training], dry_run=False)
    assert training.settings.read_bytes() == whole


def test_a_folder_in_use(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used, free = (training_of(shared, tmp_path / name, steps=2) for name in ("used", "free"))
    run([used], dry_run=True)
    with FileLock(used.output / ".lock"):
        with pytest.raises(UsageError, match="used: another process trains here"):
            run([used], dry_run=False)
        run([used, free], dry_run=False)
    assert "used: another process trains here; skipped" in capsys.readouterr().out
    assert (used.model.exists(), free.model.exists()) == (False, True)
    run([used, free], dry_run=False)
    assert used.model.exists()


def test_an_estimate(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = training_of(shared, tmp_path / "x")
    run([training, training_of(shared, tmp_path / "y")], dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"text: \d+ rows of 32 tokens; a training reads 80, each 0\.\d\d times", lines[-2])
    assert re.fullmatch(
        r"2 trainings, 5,120 tokens; 2\.2 MB of checkpoints at the end \([\d,.]+ [GM]B are free\); "
        r"about 0:0\d:\d\d on cpu",
        lines[-1],
    )
    assert not (training.output / "training.csv").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of resources")
def test_no_space(processes: ForkServerContext, shared: Path, tmp_path: Path) -> None:
    """For the optimizer, which is twice as large as the weights; the same command resumes."""
    training = training_of(shared, tmp_path / "x")
    run([training], dry_run=True)
    size = (training.initial / "model.safetensors").stat().st_size
    message = tmp_path / "message"
    process = processes.Process(target=train_without_space, args=(training, int(size * 1.5), message))
    process.start()
    process.join()
    assert re.match(
        rf"CheckpointError: {training.output}: a checkpoint cannot be written \(.+\); free space; the same command",
        message.read_text(),
    )
    assert training.newest is None
    run([training], dry_run=False)
    assert training.model.exists()


@pytest.mark.training
def test_evaluations_during_the_training(
    shared: Path, tmp_path: Path, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"tasks": ["piqa"], "data_dir": documents, "allow_unofficial_data": True, "output": tmp_path / "runs"}
    monkeypatch.setattr(package, "TrainerCallback", partial(package.TrainerCallback, **here))
    trained(shared, tmp_path / "x", model="long", steps=4, evaluate={"sample": 2, "every": 2})
    runs = list_runs(tmp_path / "runs")
    assert sorted(str(run.manifest["model"]) for run in runs) == ["x step 2", "x step 4"]
