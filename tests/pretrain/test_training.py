"""What a training computes, compared with a plain loop of torch; how it begins, fails, is killed and resumed."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import time
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from recipe.folder import Training, checkpoints
from recipe.loss_log import read_log
from recipe.running import run
from recipe.training import prepare, train
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import evalkit
from evalkit.display import Progress
from evalkit.errors import CheckpointError, UsageError
from tests.pretrain.conftest import ATTENTIONS
from tests.pretrain.made import run_all, state_of, train_until, train_without_space, trained, training_of
from tests.tiny import TRAINING_TEXT
from tests.training.trainers import equal


def plain_loop(training: Training, steps: int) -> dict[str, torch.Tensor]:
    """Return the weights after some steps of a loop that shares no code with the recipe.

    From text to tokens by the tokenizers library; rows by numpy; the loss, the learning rate, clipping and weight decay
    by their formulas; AdamW by its definition (arXiv 1711.05101, algorithm 2, with decay scaled by the learning rate).
    """
    recipe = training.recipe
    tokenizer = Tokenizer.from_file(str(Path(recipe.tokenizer or "") / "tokenizer.json"))
    first, last = (tokenizer.token_to_id(token) for token in ("<s>", "</s>"))
    lines = Path(recipe.text[0].files[0]).read_text().splitlines()
    tokens = [token for line in lines for token in (first, *tokenizer.encode(json.loads(line)["text"]).ids, last)]
    count = len(tokens) // recipe.length
    rows = torch.tensor(tokens[: count * recipe.length]).view(count, recipe.length)
    order = np.concatenate([np.random.default_rng([training.seed, epoch]).permutation(count) for epoch in range(9)])
    model = AutoModelForCausalLM.from_pretrained(training.initial).train()
    weights = dict(model.named_parameters())
    moments = {name: (torch.zeros_like(weight), torch.zeros_like(weight)) for name, weight in weights.items()}
    first_beta, second_beta = recipe.betas
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
            mean.mul_(first_beta).add_((1 - first_beta) * gradient)
            square.mul_(second_beta).add_((1 - second_beta) * gradient**2)
            variance = square / (1 - second_beta ** (step + 1))
            change = (mean / (1 - first_beta ** (step + 1))) / (variance.sqrt() + 1e-8)
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
    expected, weights = plain_loop(training, 6), load_file(training.model / "model.safetensors")
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=2e-6, rtol=0, msg=name)
    start = load_file(training.initial / "model.safetensors")
    assert all((weights[name] - start[name]).abs().max() > 5e-3 for name in weights)


def test_the_log_has_the_losses_of_its_rows(shared: Path, tmp_path: Path) -> None:
    training = trained(shared, tmp_path / "x", learning_rate=1e-12, log_every=5, held_out_every=None, steps=5)
    [row, held_out] = read_log(training.output / "training.csv")
    assert (row["step"], row["tokens"], row["held_out_loss"]) == ("5", str(5 * 4 * 32), "")
    assert (held_out["step"], held_out["loss"]) == ("5", "")
    losses = float(row["loss"]), float(held_out["held_out_loss"])
    assert losses[0] != losses[1] and losses == pytest.approx([math.log(512)] * 2, abs=0.1)  # 512 nearly equal logits


@pytest.mark.training
@pytest.mark.parametrize("model", ATTENTIONS)
def test_mixed_precision(shared: Path, tmp_path: Path, model: str, capfd: pytest.CaptureFixture[str]) -> None:
    """bfloat16, recomputed activations: the loss falls, the weights are float32, and nothing is written to stderr."""
    training = trained(shared, tmp_path / "x", model=model, precision="bfloat16", checkpointing=True, steps=30)
    losses = [float(row["loss"]) for row in read_log(training.output / "training.csv") if row["loss"]]
    assert losses[-1] < losses[0] - 0.5
    assert {weight.dtype for weight in load_file(training.model / "model.safetensors").values()} == {torch.float32}
    assert capfd.readouterr().err == ""


def test_the_checkpoint_loads(shared: Path, tmp_path: Path) -> None:
    """In transformers and in evalkit, whose perplexity has the sum of transformers' losses. The oldest are removed."""
    training = trained(shared, tmp_path / "x", model="cog", save_every=5, keep=2)
    assert names(training.output) == ["checkpoint-15", "checkpoint-20"] and not (training.output / ".saving").exists()
    sentence = TRAINING_TEXT[0]
    (tmp_path / "sentence.txt").write_text(sentence)
    result = evalkit.evaluate(training.model, suite="perplexity", settings={"text": [tmp_path / "sentence.txt"]},
                              output=tmp_path / "runs", progress=Progress(live=False))  # fmt: skip
    model, tokenizer = (kind.from_pretrained(training.model) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert type(model).__name__ == "EvalkitLlamaForCausalLM"
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(sentence)["input_ids"]]])
    nats = model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    expected = nats / math.log(2) / len(sentence.encode())
    assert result.stored["whole"]["value"] == pytest.approx(expected, rel=1e-5)
    # Trained on this sentence among others
    before = AutoModelForCausalLM.from_pretrained(training.initial)(input_ids=ids, labels=ids).loss.item()
    assert nats / (ids.shape[1] - 1) < before - 0.5


@pytest.mark.slow
def test_other_settings_or_text_in_the_same_folder(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What does not change the weights may change; a finished training is left as it is."""
    text = tmp_path / "text.txt"
    text.write_text("one " * 99)
    given: dict[str, Any] = {"steps": 2, "text": [{"files": [str(text)]}]}
    training = trained(shared, tmp_path / "x", **given)
    before = {path: path.stat().st_mtime_ns for path in training.output.rglob("*")}
    capsys.readouterr()
    run([training], dry_run=False)
    assert capsys.readouterr().out == f"{training.model}: finished\n"
    assert {path: path.stat().st_mtime_ns for path in training.output.rglob("*") if path in before} == before
    for change in ({"learning_rate": 1e-3}, {"steps": 4}, {"seed": 1}, {"model": "cog"}):
        with pytest.raises(UsageError, match=rf"x: .*\({next(iter(change))}\)"):
            run([training_of(shared, training.output, **(given | change))], dry_run=False)
    with pytest.raises(UsageError, match=r"batch 4 .* micro-batches of 3"):
        trained(shared, tmp_path / "y", micro_batch=3)
    run([training_of(shared, training.output, **given, log_every=1, micro_batch=2, keep=1)], dry_run=True)
    begun = training_of(shared, tmp_path / "z", **given)
    run([begun], dry_run=True)
    (begun.output / "training.csv").write_text("step\n")
    text.write_text("two " * 99)
    with pytest.raises(UsageError, match="packed_text"):
        run([begun], dry_run=True)


@pytest.mark.training
def test_a_dry_run_binds_to_nothing(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another dry run replaces its settings and the model, and the training is that of a folder of its own."""
    others: list[dict[str, Any]] = [{"steps": 3}, {"seed": 1}, {"model": "cog"}, {}]
    for change in others:
        run([training_of(shared, tmp_path / "x", **({"steps": 2} | change))], dry_run=True)
        assert not (tmp_path / "x" / "training.csv").exists()
    assert re.fullmatch(r"1 training, 256 tokens; .* of checkpoints at the end \(.*\); about 0:0\d:\d\d on cpu",
                        capsys.readouterr().out.splitlines()[-1])  # fmt: skip
    training, expected = (trained(shared, tmp_path / name, steps=2) for name in ("x", "own"))
    for path in ("training.json", "initial/config.json", "initial/model.safetensors", "model/model.safetensors"):
        assert (training.output / path).read_bytes() == (expected.output / path).read_bytes()


def test_folders_of_other_processes(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder in use is skipped; no training begins from the weights of other settings."""
    used, free = (training_of(shared, tmp_path / name, steps=2) for name in ("used", "free"))
    sources = prepare(used, print)
    with FileLock(used.lock):
        with pytest.raises(UsageError, match="used: another process"):
            run([used], dry_run=False)
        run([used, free], dry_run=False)
    assert "used: another process" in capsys.readouterr().out
    assert (used.model.exists(), free.model.exists()) == (False, True)
    assert prepare(training_of(shared, used.output, seed=1, steps=2), print) is not None
    with pytest.raises(UsageError, match=r"used: .*\(seed\)"):
        train(used, sources)
    assert not used.begun


DAMAGED = {"": "not valid JSON", '{"settings": {"seed"': "not valid JSON", "[]": "holds no settings",
           '{"settings": 1}': "holds no settings"}  # fmt: skip


@pytest.mark.training
def test_damaged_settings(shared: Path, tmp_path: Path) -> None:
    training = training_of(shared, tmp_path / "x", steps=2)
    run([training], dry_run=True)
    whole = training.settings.read_bytes()
    for content in DAMAGED:  # nothing has begun
        training.settings.write_text(content)
        run([training], dry_run=True)
        assert training.settings.read_bytes() == whole
    run([training], dry_run=False)
    for content, message in DAMAGED.items():
        training.settings.write_text(content)
        with pytest.raises(UsageError, match=rf"x/training.json.* {message}"):
            run([training], dry_run=False)
    training.settings.unlink()
    shutil.rmtree(training.model)
    run([training], dry_run=False)
    assert training.settings.read_bytes() == whole


@pytest.mark.training
def test_evaluations_during_the_training(
    shared: Path, tmp_path: Path, documents: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their scores are printed, in training.csv, and with their runs in the training's folder."""
    here = {"tasks": ["piqa"], "data_dir": documents, "allow_unofficial_data": True}
    monkeypatch.setattr(evalkit, "TrainerCallback", partial(evalkit.TrainerCallback, **here))
    training = trained(shared, tmp_path / "x", model="long", steps=4, evaluate={"sample": 2, "every": 2})
    runs = {str(run.manifest["model"]): run for run in evalkit.list_runs(training.output / "runs")}
    assert sorted(runs) == ["x step 2", "x step 4"]
    rows = {int(row["step"]): row for row in read_log(training.output / "training.csv") if row["score"]}
    printed = capsys.readouterr().out
    for step in (2, 4):
        average = runs[f"x step {step}"].results().average
        assert float(rows[step]["score"]) == pytest.approx(average.value)
        stored, error = rows[step]["score_error"], average.stderr
        assert stored == "" if error is None else float(stored) == pytest.approx(error)
        shown = "" if error is None else f" ± {error:.4f}"
        line = f"accuracy {average.value:.4f}{shown} (2 documents of each task); "
        assert f"step {step} of 4: zeroshot8 {average.name} {line}" in printed


# Killed and resumed

FILES = {"config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt",
         "tokenizer.json", "tokenizer_config.json", "trainer_state.json", "training_args.bin"}  # fmt: skip
CASES = [
    ("vanilla", "step 14", ["checkpoint-10"]),
    ("cog", "step 18", ["checkpoint-10"]),
    ("differential", "step 3", []),
    ("vanilla", "weights", ["checkpoint-10"]),
    ("integral", "settled", ["checkpoint-10"]),
    ("vanilla", "model", ["checkpoint-10", "checkpoint-20"]),
]
needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints(folder)]


@needs_signals
@pytest.mark.parametrize(
    ("model", "moment", "left"),
    [pytest.param(*case, marks=[] if case[1] == "weights" else pytest.mark.training) for case in CASES],
)
def test_equal_after_a_kill(
    processes: ForkServerContext, shared: Path, tmp_path: Path, model: str, moment: str, left: list[str]
) -> None:
    """Weights, optimizer and log equal those of an uninterrupted training."""
    whole = trained(shared, tmp_path / "whole", model=model)
    killed, marker = training_of(shared, tmp_path / "killed", model=model), tmp_path / "marker"
    process = processes.Process(target=train_until, args=(killed, moment, marker))
    process.start()
    end = time.monotonic() + 120
    while not marker.exists() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    process.kill()
    process.join()
    assert marker.exists() and process.exitcode == -9
    assert names(killed.output) == left and not killed.model.exists()
    assert all({path.name for path in folder.iterdir()} == FILES for folder in checkpoints(killed.output))
    run([killed], dry_run=False)
    assert names(killed.output) == names(whole.output) == ["checkpoint-10", "checkpoint-20"]
    for folder in checkpoints(whole.output):
        assert equal(state_of(killed.output / folder.name), state_of(folder))
    for path in ("model/model.safetensors", "training.csv"):
        assert (killed.output / path).read_bytes() == (whole.output / path).read_bytes()
    assert sorted(path.name for path in killed.output.iterdir()) == sorted(path.name for path in whole.output.iterdir())


@pytest.mark.training
def test_a_damaged_checkpoint(shared: Path, tmp_path: Path) -> None:
    """It is named; without it, the training is resumed from the one before, with the same end.

    Weights change if the optimizer is lost, so that the comparisons with resumed trainings can fail.
    """
    whole = trained(shared, tmp_path / "whole", save_every=5)
    last, damaged = whole.output / "checkpoint-20", whole.output / "checkpoint-15"
    before = state_of(last)
    shutil.rmtree(whole.model)
    shutil.rmtree(last)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "trainer_state.json"):
        for size in (100, 0):
            content = (damaged / name).read_bytes()
            (damaged / name).write_bytes(content[:size])
            with pytest.raises(CheckpointError, match=r"/whole/checkpoint-15: .*remove this folder"):
                run([whole], dry_run=False)
            (damaged / name).write_bytes(content)
    shutil.rmtree(damaged)
    run([whole], dry_run=False)
    assert equal(state_of(last), before)
    for folder in (last, whole.model):
        shutil.rmtree(folder)
    (whole.newest / "optimizer.pt").unlink()
    run([whole], dry_run=False)
    assert not equal(state_of(last)["weights"], before["weights"])


@needs_signals
@pytest.mark.training
def test_two_processes_share_the_work(processes: ForkServerContext, shared: Path, tmp_path: Path) -> None:
    """Begun at the same moment: each training is done by one of them, and nothing is left of the other."""
    trainings = [training_of(shared, tmp_path / model, model=model) for model in ("vanilla", "cog", "integral")]
    both = [processes.Process(target=run_all, args=(trainings,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(240)
    assert [process.exitcode for process in both] == [0, 0]
    for training in trainings:
        assert training.model.is_dir() and names(training.output) == ["checkpoint-10", "checkpoint-20"]
        steps = [row["step"] for row in read_log(training.output / "training.csv") if row["loss"]]
        assert steps == ["3", "6", "9", "10", "12", "15", "18", "20"]


@needs_signals
@pytest.mark.slow
def test_no_space(processes: ForkServerContext, shared: Path, tmp_path: Path) -> None:
    """For the optimizer, which is twice as large as the weights; the same command resumes."""
    training, message = training_of(shared, tmp_path / "x"), tmp_path / "message"
    run([training], dry_run=True)
    size = (training.initial / "model.safetensors").stat().st_size
    process = processes.Process(target=train_without_space, args=(training, int(size * 1.5), message))
    process.start()
    process.join()
    assert re.match(rf"CheckpointError: {training.output}: .*free space", message.read_text())
    assert training.newest is None
    run([training], dry_run=False)
    assert training.model.exists()
