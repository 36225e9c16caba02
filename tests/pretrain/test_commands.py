"""Settings files, and the commands train.py and train_study.py: what they train, and errors on one line."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipe.packing import _identity, digest_of, documents
from recipe.settings import read_recipe, read_training_study

from evalkit.errors import UsageError
from evalkit.models.zoo.named import models
from tests.pretrain.conftest import EXAMPLE
from tests.pretrain.made import write_recipe
from tests.training.trainers import equal

Command = Callable[..., tuple[int, str, str]]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1])}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"leraning_rate": 1}, "unknown key 'leraning_rate': did you mean 'learning_rate'?"),
    ({"text": [{"file": ["a"]}]}, "'text[0]': unknown key 'file'"),
    ({"text": None}, "it lacks 'text'"),
    ({"text": [{}]}, "'text[0]': "),
    ({"steps": "20"}, "'steps' is "),
    ({"betas": [0.9, 1.0]}, "'betas[1]' is 1.0"),
    ({"schedule": "cosin"}, "'schedule' is "),
    ({"model": "llama-125m-vanila"}, "'model': unknown model 'llama-125m-vanila'"),
    ({"held_out": [{"files": ["none.txt"]}]}, "'held_out[0].files': {folder}/none.txt"),
    ({"text": [{"dataset": "json", "data_files": "none/*.jsonl"}]}, "'text[0].data_files': "),
    ({"evaluate": {"sample": 0}}, "'evaluate.sample' is "),
]
BAD_STUDIES: list[tuple[dict[str, Any], str]] = [
    ({"models": {"a": "nine"}}, "'models.a': unknown model 'nine'"),
    ({"seeds": []}, "'seeds' is "),
    ({"seeds": [2**32]}, "'seeds[0]' is "),  # which numpy does not accept
    ({"seed": [1]}, "unknown key 'seed': did you mean 'seeds'?"),
    *(({"models": {name: "llama-125m-cog"}}, f"'models': the name {name!r} ")
      for name in ("../esc", "", "a\n", "C:")),
]  # fmt: skip


def test_errors_name_file_and_key(shared: Path, tmp_path: Path) -> None:
    for change, message in BAD:
        path = write_recipe(tmp_path, shared, **change)
        with pytest.raises(UsageError) as raised:
            read_recipe(path)
        assert str(raised.value).startswith(f"{path}: {message.format(folder=tmp_path)}")


def test_paths_are_relative_to_the_file(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder whose name has a pattern's characters too; not those of the hub, of URLs, and from the root."""
    folder, other = tmp_path / "texts [1]", tmp_path / "other"
    for texts in (folder, other):
        (texts / "tokens").mkdir(parents=True)
        (texts / "a.jsonl").write_text(json.dumps({"text": texts.name}))
    (folder / "models.yaml").write_bytes((shared / "models.yaml").read_bytes())
    monkeypatch.chdir(other)
    given = [("json", "*.jsonl"), ("json", str(other / "*.jsonl")), ("json", "https://example.org/*.jsonl"),
             ("some/name", "*.jsonl")]  # fmt: skip
    text = [*({"dataset": name, "data_files": files} for name, files in given), {"files": ["a.jsonl"]}]
    recipe = read_recipe(write_recipe(folder, shared, model="models.yaml:cog", tokenizer="tokens", text=text))
    assert (recipe.model, recipe.tokenizer) == (f"{folder}/models.yaml:cog", str(folder / "tokens"))
    near, absolute, remote, hub, files = recipe.text
    assert files.files == (str(folder / "a.jsonl"),) and (near.dataset, hub.dataset) == ("json", "some/name")
    assert (remote.data_files, hub.data_files) == (given[2][1], given[3][1])
    assert list(documents(near)) == ["texts [1]"] and list(documents(absolute)) == ["other"]
    assert _identity(near)["files"] == [digest_of(folder / "a.jsonl")]
    assert _identity(hub)["files"] == _identity(remote)["files"] == []
    # Names that are no paths stay names
    recipe = read_recipe(write_recipe(folder, shared, model="llama-125m-cog", tokenizer="mistralai/Mixtral-8x7B-v0.1"))
    assert (recipe.model, recipe.tokenizer) == ("llama-125m-cog", "mistralai/Mixtral-8x7B-v0.1")


def test_the_papers_settings() -> None:
    """What its appendix states: AdamW, 3e-4, 10,000 updates of warm-up, 2M tokens a batch, rows of 2,048, 28 B tokens,
    16 rows on each of 8 devices and 8 micro-batches; at 1.2B 128 B tokens, 4 rows and 32; and models of evalkit's with
    Mixtral's vocabulary. The small settings are the replication's.
    """
    small, large = (read_recipe(EXAMPLE / f"{name}.yaml") for name in ("paper", "paper_1.2b"))
    for recipe, tokens, rows, parts in ((small, 28e9, 16, 8), (large, 128e9, 4, 32)):
        assert (recipe.learning_rate, recipe.warmup_steps, recipe.length) == (3e-4, 10_000, 2048)
        assert (recipe.precision, recipe.micro_batch) == ("bfloat16", rows)
        assert recipe.batch * recipe.length == 2**21 and recipe.batch == 8 * rows * parts
        assert recipe.tokens == pytest.approx(tokens, rel=1e-3)
        assert {model.name: model.shape for model in models()}[recipe.model].vocabulary == 32_000
        assert {text.dataset for text in recipe.text} == {"HuggingFaceTB/smollm-corpus"}
    assert [(text.config, text.tokens) for text in small.text] == [("cosmopedia-v2", None)]
    assert [(text.config, text.tokens) for text in large.text] == [("cosmopedia-v2", None),
                                                                   ("fineweb-edu-dedup", 100 * 10**9)]  # fmt: skip
    of_size = {"model", "text", "micro_batch", "steps"}
    assert small.model_dump(exclude=of_size) == large.model_dump(exclude=of_size)
    files = "small.yaml", "../replication/recipe.yaml"
    small, replication = (yaml.safe_load((EXAMPLE / path).read_text()) for path in files)
    assert all(small[key] == replication[key] for key in small.keys() - {"model", "text"})


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run a script in this process; return exit code, output and errors."""

    def run(script: str, *arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        code = 0
        try:
            runpy.run_path(str(EXAMPLE / script), run_name="__main__")
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        return code, *capfd.readouterr()

    return run


def test_one_training(command: Command, shared: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, shared, steps=4, save_every=2, held_out_every=None)
    arguments = (recipe, "-o", tmp_path / "out" / "a", "--seed", 2**32 - 1, "--model", f"{shared}/models.yaml:cog")
    code, out, err = command("train.py", *arguments)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert re.fullmatch(r"1 training, 512 tokens; .* about 0:00:\d\d on cpu", lines[1])
    assert re.fullmatch(r"step 2 of 4: loss 6\.\d{3}; [\d,]+ tokens/s, about 0:0\d:\d\d left", lines[3])
    assert lines[-1].startswith("step 4 of 4: held-out loss 6.")
    facts = json.loads((tmp_path / "out" / "a" / "training.json").read_text())
    assert (facts["settings"]["seed"], facts["settings"]["model"]["attention_variant"]) == (2**32 - 1, "cog")
    assert (tmp_path / "out" / "data").is_dir()
    assert command("train.py", *arguments) == (0, f"{tmp_path}/out/a/model: finished\n", "")
    assert "--dry-run" in command("train.py", "--help")[1]


def test_errors_are_one_line(command: Command, shared: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    for change, expected, noun in [
        ({"steps": 0}, 2, f"{tmp_path}/recipe.yaml: 'steps' is 0"),
        ({"length": 65}, 2, f"{shared}/models.yaml: vanilla has a window of 64 tokens"),
        ({"held_out": [{"files": ["short.txt"]}]}, 1, "held_out: "),
    ]:
        code, out, err = command("train.py", write_recipe(tmp_path, shared, **change), "-o", tmp_path / "a")
        assert (code, out, err.count("\n")) == (expected, "", 1) and err.startswith(f"train.py: {noun}")
    code, out, err = command("train.py", write_recipe(tmp_path, shared), "-o", tmp_path / "short.txt" / "a")
    assert (code, out) == (1, "") and err.startswith(f"train.py: {tmp_path}/short.txt/a: ")
    for seed in (-1, 2**32):
        code, _, err = command("train.py", write_recipe(tmp_path, shared), "-o", tmp_path / "a", "--seed", seed)
        assert code == 2 and "--seed" in err.splitlines()[-1]


def test_a_study(shared: Path, tmp_path: Path) -> None:
    write_recipe(tmp_path, shared)
    path, model = tmp_path / "study.yaml", f"{shared}/models.yaml:cog"
    keys: dict[str, Any] = {"recipe": "recipe.yaml", "models": {"a": model}, "seeds": [1, 2], "output": "trained"}
    names = ["a-1.b_C", "-", "größe"]
    (tmp_path / "long.yaml").write_bytes(write_recipe(tmp_path / "own", shared, steps=40).read_bytes())
    own = {"own": {"model": f"{shared}/models.yaml:vanilla", "recipe": "long.yaml"}}
    path.write_text(json.dumps(keys | {"models": dict.fromkeys(names, model) | own, "seeds": [0, 2**32 - 1]}))
    study, recipes = read_training_study(path)
    assert (study.output, list(recipes)) == (str(tmp_path / "trained"), [*names, "own"])
    common = read_recipe(tmp_path / "recipe.yaml")
    assert [recipes[name] for name in names] == 3 * [common.model_copy(update={"model": model})]
    assert recipes["own"] == common.model_copy(update={"model": f"{shared}/models.yaml:vanilla", "steps": 40})
    # A recipe without a model works where a study or the command names one
    write_recipe(tmp_path, shared, model=None)
    assert read_training_study(path)[1] == recipes
    assert read_recipe(tmp_path / "recipe.yaml", model) == recipes["-"]
    with pytest.raises(UsageError, match=r"recipe\.yaml: it lacks 'model'"):
        read_recipe(tmp_path / "recipe.yaml")
    for change, message in BAD_STUDIES:
        path.write_text(json.dumps(keys | change))
        with pytest.raises(UsageError) as raised:
            read_training_study(path)
        assert str(raised.value).startswith(f"{path}: {message}")


@pytest.mark.training
def test_the_trainings_of_a_study(command: Command, shared: Path, tmp_path: Path) -> None:
    write_recipe(tmp_path, shared, steps=2)
    named = {name: f"{shared}/models.yaml:{name}" for name in ("vanilla", "integral")}
    study = {"recipe": "recipe.yaml", "models": named, "seeds": [1, 2], "output": "trained"}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    code, out, err = command("train_study.py", tmp_path / "study.yaml", "--dry-run")
    assert (code, err) == (0, "") and "4 trainings, 1,024 tokens" in out
    trained = tmp_path / "trained"
    assert not list(trained.rglob("model"))
    assert command("train_study.py", tmp_path / "study.yaml")[0] == 0
    facts = {path.parent.name: json.loads(path.read_text())["settings"] for path in trained.rglob("training.json")}
    assert {path.parent.name for path in trained.rglob("model")} == facts.keys()
    assert facts.keys() == {f"{name}-seed{seed}" for name in named for seed in (1, 2)}
    assert len({each["packed_text"] for each in facts.values()}) == 1 and facts["integral-seed2"]["seed"] == 2


@pytest.mark.training
def test_a_real_interrupt(shared: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle: one line, and the same command ends with the weights of an uninterrupted training."""
    recipe = write_recipe(tmp_path, shared, steps=400, report_to=None, held_out_every=None, log_every=1)
    call = [sys.executable, str(EXAMPLE / "train.py"), str(recipe), "-o"]
    process = subprocess.Popen([*call, str(tmp_path / "a")], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    log, end = tmp_path / "a" / "training.csv", time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") > 30) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.startswith("train.py: interrupted") and err.count("\n") == 1
    for name in "ab":
        done = subprocess.run([*call, str(tmp_path / name)], env=ENVIRONMENT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    resumed, whole = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in "ab")
    assert resumed == whole and list((tmp_path / "a" / "tensorboard").iterdir())


@pytest.mark.training
def test_two_processes(shared: Path, tmp_path: Path) -> None:
    """By torchrun on a CPU: whole checkpoints with the random state of both, and the weights of one process but for
    rounding: 20 updates of up to 5e-3, differences below 1e-5.
    """
    from safetensors.torch import load_file

    recipe = write_recipe(tmp_path, shared)
    start = {"one": [sys.executable], "two": [sys.executable, "-m", "torch.distributed.run", "--standalone",
                                              "--nproc-per-node", "2"]}  # fmt: skip
    for name, call in start.items():
        arguments = [str(EXAMPLE / "train.py"), str(recipe), "-o", str(tmp_path / name)]
        done = subprocess.run([*call, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("step 20 of 20: held-out loss") == 1  # one of the processes writes
    for path in ("checkpoint-10", "checkpoint-20", "model"):
        alone, both = (load_file(tmp_path / name / path / "model.safetensors") for name in start)
        assert not equal(alone, both) or path != "model"
        assert max((alone[name] - both[name]).abs().max().item() for name in alone) < 1e-5
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in (tmp_path / "two/checkpoint-10").iterdir()}
    losses = [(tmp_path / name / "training.csv").read_text().splitlines() for name in start]
    assert len(losses[0]) == len(losses[1]) and not (tmp_path / "two" / ".saving").exists()
