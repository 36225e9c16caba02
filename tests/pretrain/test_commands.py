"""The commands train.py and train_study.py: help, errors on one line, exit codes, and what is trained."""

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

import pytest
import yaml
from recipe import running

from tests.pretrain.settings_files import EXAMPLE, write_recipe
from tests.training.trainers import equal

Command = Callable[..., tuple[int, str, str]]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1])}


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
    assert re.fullmatch(r"text: .*", lines[0])
    assert re.fullmatch(r"1 training, 512 tokens; .* about 0:00:\d\d on cpu", lines[1])
    assert lines[2] == f"{tmp_path}/out/a: 4 updates of 128 tokens"
    assert re.fullmatch(r"step 2 of 4: loss 6\.\d{3}; [\d,]+ tokens/s, about 0:0\d:\d\d left", lines[3])
    assert re.fullmatch(r"step 4 of 4: held-out loss 6\.\d{3}; [\d,]+ tokens/s, about 0:00:00 left", lines[-1])
    facts = json.loads((tmp_path / "out" / "a" / "training.json").read_text())
    assert (facts["settings"]["seed"], facts["settings"]["model"]["attention_variant"]) == (2**32 - 1, "cog")
    assert (tmp_path / "out" / "data").is_dir()
    assert command("train.py", *arguments) == (0, f"{tmp_path}/out/a/model: finished\n", "")
    help_text = command("train.py", "--help")[1]
    assert "resumes from the newest checkpoint" in help_text and "--dry-run" in help_text


@pytest.mark.training
def test_a_study(command: Command, shared: Path, tmp_path: Path) -> None:
    write_recipe(tmp_path, shared, steps=2)
    models = {name: f"{shared}/models.yaml:{name}" for name in ("vanilla", "integral")}
    study = {"recipe": "recipe.yaml", "models": models, "seeds": [1, 2], "output": "trained"}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    code, out, err = command("train_study.py", tmp_path / "study.yaml", "--dry-run")
    assert (code, err) == (0, "")
    assert "4 trainings, 1,024 tokens" in out
    trained = tmp_path / "trained"
    assert not list(trained.rglob("model"))
    assert command("train_study.py", tmp_path / "study.yaml")[0] == 0
    assert sorted(path.parent.name for path in trained.rglob("model")) == [
        "integral-seed1", "integral-seed2", "vanilla-seed1", "vanilla-seed2",
    ]  # fmt: skip
    facts = {path.parent.name: json.loads(path.read_text())["settings"] for path in trained.rglob("training.json")}
    assert len({each["packed_text"] for each in facts.values()}) == 1
    assert facts["integral-seed2"]["seed"] == 2


def test_errors_are_one_line(command: Command, shared: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, shared, steps=0)
    code, out, err = command("train.py", recipe, "-o", tmp_path / "a")
    assert (code, out, err) == (
        2,
        "",
        f"train.py: {recipe}: 'steps' is 0: Input should be greater than or equal to 1\n",
    )
    recipe = write_recipe(tmp_path, shared, length=65)
    code, _, err = command("train.py", recipe, "-o", tmp_path / "a")
    assert code == 2
    assert err == f"train.py: {shared}/models.yaml: vanilla has a window of 64 tokens, fewer than 'length'\n"
    (tmp_path / "short.txt").write_text("short")
    recipe = write_recipe(tmp_path, shared, held_out=[{"files": ["short.txt"]}])
    code, _, err = command("train.py", recipe, "-o", tmp_path / "a")
    assert code == 1
    assert re.fullmatch(r"train\.py: held_out: \d tokens, fewer than one row of 32\n", err)
    (tmp_path / "file").write_text("")
    code, out, err = command("train.py", write_recipe(tmp_path, shared), "-o", tmp_path / "file" / "a")
    assert (code, out, err) == (1, "", f"train.py: {tmp_path}/file/a: Not a directory\n")
    for seed in (-1, 2**32):  # which numpy does not accept
        code, _, err = command("train.py", recipe, "-o", tmp_path / "a", "--seed", seed)
        assert code == 2 and "--seed" in err.splitlines()[-1]


def test_interrupted(command: Command, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "train", interrupt)
    code, _, err = command("train.py", write_recipe(tmp_path, shared), "-o", tmp_path / "a")
    assert (code, err) == (130, "train.py: interrupted; the same command resumes from the newest checkpoint\n")


@pytest.mark.training
def test_a_real_interrupt(shared: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle: one line, and the same command ends with the weights of an uninterrupted training."""
    recipe = write_recipe(tmp_path, shared, steps=400, report_to=None, held_out_every=None, log_every=1)
    call = [sys.executable, str(EXAMPLE / "train.py"), str(recipe), "-o"]
    process = subprocess.Popen([*call, str(tmp_path / "a")], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "a" / "training.csv"
    end = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") > 30) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stderr is not None
    with process.stderr as stderr:
        assert stderr.read() == "train.py: interrupted; the same command resumes from the newest checkpoint\n"
    for name in "ab":
        done = subprocess.run([*call, str(tmp_path / name)], env=ENVIRONMENT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    one, other = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in "ab")
    assert one == other
    assert list((tmp_path / "a" / "tensorboard").iterdir())


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
        # One of the processes writes
        assert done.stdout.count("step 20 of 20: held-out loss") == 1
    for path in ("checkpoint-10", "checkpoint-20", "model"):
        one, two = (load_file(tmp_path / name / path / "model.safetensors") for name in start)
        assert not equal(one, two) or path != "model"
        assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-5
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in (tmp_path / "two/checkpoint-10").iterdir()}
    losses = [(tmp_path / name / "training.csv").read_text().splitlines() for name in start]
    assert len(losses[0]) == len(losses[1])
    assert not (tmp_path / "two" / ".saving").exists()
