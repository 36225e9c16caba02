"""`evalkit run --watch`: real trainings and real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import evalkit
from evalkit.benchmarks.session import ModelHolder
from evalkit.cli import main
from evalkit.comparison.comparison import compare_sides
from evalkit.comparison.sentences import page_unit
from evalkit.comparison.sides import Side
from evalkit.runs.folder import Run
from evalkit.studies.watch import Watcher
from tests.tiny import tiny_checkpoint
from tests.training.trainers import trainer_of

NUMBER = r"[+-]\d+\.\d"
CHANGE = rf"; {NUMBER} points \[{NUMBER}, {NUMBER}\] since step ([\d,]+)"
LINE = re.compile(rf"step ([\d,]+): .*\d+\.\d ± \d+\.\d \(ppl\)({CHANGE})?")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less in this process; commands in processes of their own wait as long as they do for users."""
    monkeypatch.setattr("evalkit.studies.watch.Watcher", partial(Watcher, settled=0.2, poll=0.02, stalled=0.6))


@pytest.fixture
def training(tmp_path: Path) -> Path:
    (tmp_path / "training").mkdir()
    return tmp_path / "training"


def made(training: Path, *steps: int) -> None:
    """Write checkpoints."""
    for step in steps:
        tiny_checkpoint(training / f"checkpoint-{step}", seed=step, window=1024)


def arguments(training: Path, documents: Path, *more: str) -> list[str]:
    return ["run", "--watch", str(training), "--data-dir", str(documents), "--allow-unofficial-data",
            "--output", str(training.parent / "runs"), "--tasks", "piqa,boolq", *more]  # fmt: skip


def command(options: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(options)
    return int(left.value.code or 0), *capsys.readouterr()


def run_of(training: Path, step: int) -> Run:
    return evalkit.load_run(str(training / f"checkpoint-{step}"), root=training.parent / "runs")


def test_a_curve_grows(
    training: Path, documents: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again, it repeats nothing, keeps removed checkpoints, and is under the requested rule."""
    made(training, 1000, 20)
    plot = training.parent / "curve.png"
    code, out, err = command(arguments(training, documents, "--until", "1000", "--plot", str(plot)), capsys)
    assert code == 0, err
    lines = [LINE.fullmatch(line) for line in out.splitlines()]
    assert [(line[1], line[3]) for line in lines if line] == [("20", None), ("1,000", "20")]
    assert plot.read_bytes().startswith(b"\x89PNG")
    for line, step in zip(out.splitlines(), (20, 1000), strict=True):
        assert f"{100 * run_of(training, step).results().average.value:.1f}" in line
    shutil.rmtree(training / "checkpoint-20")
    made(training, 2000)
    loaded: list[str] = []
    load = ModelHolder.model_of

    def noting(holder: ModelHolder, plan: Any, say: Any) -> Any:
        loaded.append(Path(plan.checkpoint.given).name)
        return load(holder, plan, say)

    monkeypatch.setattr(ModelHolder, "model_of", noting)
    # Finished runs have every rule's results, and their ids do not depend on the rule
    code, out, err = command(arguments(training, documents, "--until", "2000", "--rule", "acc_norm"), capsys)
    assert (code, loaded) == (0, ["checkpoint-2000"]), err
    assert re.findall(r"since step ([\d,]+)", out) == ["20", "1,000"]
    before, after = (run_of(training, step) for step in (20, 1000))
    line = out.splitlines()[0]
    assert f"{100 * after.results('acc_norm').average.value:.1f} " in line and "(acc_norm)" in line
    [found] = compare_sides([Side("a", (before,)), Side("b", (after,))], "acc_norm")
    assert f"; {page_unit(found).difference(found.average.difference)} points" in line


def test_nothing_appears(training: Path, documents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = command(arguments(training, documents, "--idle", "0.001"), capsys)
    assert code == 1 and str(training) in err.splitlines()[-1]


def start(options: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "evalkit", *options], env=environment, **pipes)


@pytest.mark.training
def test_a_real_training_that_keeps_two_checkpoints(training: Path, documents: Path, checkpoint: Path) -> None:
    """Its evaluations are those of a callback in the training."""
    process = start(arguments(training, documents, "--until", "6"))
    trainer = trainer_of(checkpoint, training, save_strategy="steps", save_steps=2)
    options = {"data_dir": documents, "allow_unofficial_data": True, "output": training.parent / "live"}
    trainer.add_callback(evalkit.TrainerCallback(trainer, every=2, tasks="piqa,boolq", **options))
    trainer.train()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert re.findall(r"^step (\d+)", out, re.MULTILINE) == ["2", "4", "6"]
    for step in (2, 4, 6):
        live = evalkit.load_run(f"training step {step}", root=training.parent / "live")
        assert run_of(training, step).scores.equals(live.scores)
        assert json.dumps(run_of(training, step).results().to_json()) == json.dumps(live.results().to_json())
