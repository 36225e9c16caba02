"""`evalkit run --watch`: real trainings and real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import evalkit
from evalkit.benchmarks.session import ModelHolder
from evalkit.cli import main
from evalkit.comparison.comparison import compare_sides
from evalkit.comparison.comparison_report import page_unit
from evalkit.comparison.sides import Side
from evalkit.studies.watch import Watcher
from tests.tiny import tiny_checkpoint
from tests.training.trainers import trainer_of

NUMBER = r"[+-]\d+\.\d"
CHANGE = rf"; {NUMBER} points \[{NUMBER}, {NUMBER}\] since step ([\d,]+)"
LINE = re.compile(rf"step ([\d,]+): .*\d+\.\d ± \d+\.\d \(ppl\)({CHANGE})?")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less in this process; the commands that tests start wait as long as they do for users."""
    waiting = partial(Watcher, settled=0.5, poll=0.05, stalled=1.0)
    monkeypatch.setattr("evalkit.studies.watch.Watcher", waiting)


@pytest.fixture
def training(tmp_path: Path) -> Path:
    (tmp_path / "training").mkdir()
    return tmp_path / "training"


def arguments(training: Path, documents: Path, *more: str) -> list[str]:
    return ["run", "--watch", str(training), "--data-dir", str(documents), "--allow-unofficial-data",
            "--output", str(training.parent / "runs"), "--tasks", "piqa,boolq,arc_easy", *more]  # fmt: skip


def command(options: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(options)
    return int(left.value.code or 0), *capsys.readouterr()


def finished(training: Path) -> list[str]:
    found = evalkit.list_runs(training.parent / "runs")
    return sorted(Path(str(run.manifest["model"])).name for run in found if run.complete)


def test_a_curve_grows(training: Path, documents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, step in enumerate((100, 1000, 20)):
        tiny_checkpoint(training / f"checkpoint-{step}", seed=seed, window=1024)
    plot = training.parent / "curve.png"
    code, out, err = command(arguments(training, documents, "--until", "1000", "--plot", str(plot)), capsys)
    assert code == 0, err
    lines = [LINE.fullmatch(line) for line in out.splitlines()]
    assert [(line[1], line[3]) for line in lines if line] == [("20", None), ("100", "20"), ("1,000", "100")]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert finished(training) == ["checkpoint-100", "checkpoint-1000", "checkpoint-20"]
    for line in out.splitlines():
        step = int(line.partition(":")[0].removeprefix("step ").replace(",", ""))
        run = evalkit.load_run(str(training / f"checkpoint-{step}"), root=training.parent / "runs")
        assert f"{100 * run.results().average.accuracy:.1f}" in line


def test_again_it_repeats_nothing_and_keeps_removed_checkpoints(
    training: Path, documents: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, step in enumerate((10, 20, 30)):
        tiny_checkpoint(training / f"checkpoint-{step}", seed=seed, window=1024)
    assert command(arguments(training, documents, "--until", "20"), capsys)[0] == 0
    assert finished(training) == ["checkpoint-10", "checkpoint-20"]
    shutil.rmtree(training / "checkpoint-10")
    loaded: list[str] = []
    load = ModelHolder.model_of

    def noting(own: ModelHolder, plan: Any, say: Any) -> Any:
        loaded.append(plan.checkpoint.given)
        return load(own, plan, say)

    monkeypatch.setattr(ModelHolder, "model_of", noting)
    code, out, _ = command(arguments(training, documents, "--until", "30"), capsys)
    assert code == 0
    assert [Path(given).name for given in loaded] == ["checkpoint-30"]
    # Step 10, whose checkpoint is removed, is still in the curve
    assert re.findall(r"since step (\d+)", out) == ["10", "20"]


def test_one_that_fails_is_named_and_the_others_go_on(
    training: Path, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20, 30):
        tiny_checkpoint(training / f"checkpoint-{step}", seed=step, window=1024)
    (training / "checkpoint-20" / "tokenizer.json").write_text("{}")
    code, out, err = command(arguments(training, documents, "--until", "30"), capsys)
    assert code == 1
    assert re.findall(r"^step (\d+)", out, re.MULTILINE) == ["10", "30"]
    assert len(re.findall("^checkpoint-20 failed: ", err, re.MULTILINE)) == 1
    assert err.splitlines()[-1].startswith("evalkit: not evaluated: checkpoint-20: ")


def test_memory_and_disk_of_one_checkpoint_do_not_end_it(
    training: Path, documents: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30):
        tiny_checkpoint(training / f"checkpoint-{step}", seed=step, window=1024)
    errors: dict[str, BaseException] = {
        "checkpoint-10": MemoryError(), "checkpoint-20": OSError(28, "No space left on device", "/cache/x"),
    }  # fmt: skip
    load = ModelHolder.model_of

    def failing(own: ModelHolder, plan: Any, say: Any) -> Any:
        if error := errors.get(Path(plan.checkpoint.given).name):
            raise error
        return load(own, plan, say)

    monkeypatch.setattr(ModelHolder, "model_of", failing)
    code, out, err = command(arguments(training, documents, "--until", "30"), capsys)
    assert code == 1
    assert re.findall(r"^step (\d+)", out, re.MULTILINE) == ["30"]
    assert "checkpoint-10 failed: out of memory; close other programs, or give a smaller --token-budget" in err
    assert "checkpoint-20 failed: /cache/x: No space left on device" in err
    assert "Traceback" not in err


def test_the_curve_is_under_the_requested_rule(
    training: Path, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finished runs have every rule's results, and their ids do not depend on the rule."""
    for seed, step in enumerate((10, 20)):
        tiny_checkpoint(training / f"checkpoint-{step}", seed=seed, window=1024)
    assert command(arguments(training, documents, "--until", "20"), capsys)[0] == 0
    plot = training.parent / "curve.pdf"
    more = ("--until", "20", "--rule", "acc_norm", "--plot", str(plot))
    code, out, err = command(arguments(training, documents, *more), capsys)
    assert code == 0, err
    lines = out.splitlines()
    assert len(lines) == 2
    assert "since step 10" in lines[1]
    assert plot.stat().st_size
    shown = []
    for line, step in zip(lines, (10, 20), strict=True):
        run = evalkit.load_run(str(training / f"checkpoint-{step}"), root=training.parent / "runs")
        assert f"{100 * run.results('acc_norm').average.accuracy:.1f} " in line
        assert "(acc_norm)" in line
        shown.append(run)
    [found] = compare_sides([Side(str(number), (run,)) for number, run in enumerate(shown)], "acc_norm")
    assert f"; {page_unit(found).difference(found.average.difference)} points" in lines[1]
    # A new run, beside those that were started under the other rule, one of them of a removed checkpoint
    shutil.rmtree(training / "checkpoint-10")
    tiny_checkpoint(training / "checkpoint-30", seed=3, window=1024)
    code, out, err = command(arguments(training, documents, "--until", "30", "--rule", "acc_norm"), capsys)
    assert (code, re.findall(r"since step (\d+)", out)) == (0, ["10", "20"]), err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--model", "demo"], "--model cannot be used with --watch"),
        (["demo"], "CKPT cannot be used with --watch"),
        (["--show-prompts", "1"], "--show-prompts cannot be used with --watch"),
        (["--format", "json"], "--format cannot be used with --watch"),
        (["--plot", "curve.txt"], "--plot curve.txt: figures are written as .png, .pdf or .svg"),
        (["--suite", "zeroshot9"], "unknown suite 'zeroshot9'"),
    ],
)
def test_options_that_do_not_apply(
    more: list[str], said: str, training: Path, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = command(arguments(training, documents, *more), capsys)
    assert (code, said in err) == (2, True), err


def test_options_without_a_folder(training: Path, documents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("--until", "5"), ("--idle", "5"), ("--plot", "a.png")):
        code, _, err = command(["run", "demo", name, value], capsys)
        assert (code, err) == (2, f"evalkit: {name} needs --watch; give both, or neither\n")
    code, _, err = command(arguments(training / "nowhere", documents), capsys)
    assert code == 2
    assert "nowhere: is not a folder; give the folder that the training saves checkpoints in" in err


def test_nothing_appears(training: Path, documents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (training / "logs").mkdir()
    code, _, err = command(arguments(training, documents, "--idle", "0.001"), capsys)
    assert code == 1
    assert err.splitlines()[-1].startswith(f"evalkit: no checkpoint appeared in {training}; expected folders with")


def test_wrong_tasks_end_it(training: Path, documents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An option that is invalid for every checkpoint is not reported for each."""
    tiny_checkpoint(training / "checkpoint-10", window=1024)
    options = arguments(training, documents)
    options[options.index("piqa,boolq,arc_easy")] = "piqq"
    code, _, err = command(options, capsys)
    assert code == 2
    assert "piqq" in err.splitlines()[-1]


def start(options: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        [sys.executable, "-m", "evalkit", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_it_is_ended_in_mid_run_and_started_again(
    kind: signal.Signals, training: Path, documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, step in enumerate((10, 20)):
        tiny_checkpoint(training / f"checkpoint-{step}", seed=seed, window=1024)
    options = arguments(training, documents, "--until", "20", "--token-budget", "128")
    runs = training.parent / "runs"

    def second_is_begun() -> bool:
        return any(path.read_bytes().count(b"\n") >= 2 for path in runs.glob("*checkpoint-20*/journal.jsonl"))

    process = start(options)
    wait_for(lambda: second_is_begun() or process.poll() is not None)
    process.send_signal(kind)
    out, err = process.communicate()
    assert process.returncode == (130 if kind == signal.SIGINT else -kind), err
    if kind == signal.SIGINT:
        assert err.splitlines()[-1].endswith("run the same command again to resume")
    assert finished(training) == ["checkpoint-10"]
    [journal] = runs.glob("*checkpoint-20*/journal.jsonl")
    kept = journal.read_bytes().rpartition(b"\n")[0]
    code, out, err = command(options, capsys)
    assert code == 0, err
    assert re.findall(r"^step (\d+)", out, re.MULTILINE) == ["10", "20"]
    assert journal.read_bytes().startswith(kept)
    for step in (10, 20):
        [watched] = [run for run in evalkit.list_runs(runs) if f"checkpoint-{step}" in run.folder.name]
        alone = evalkit.evaluate(training / f"checkpoint-{step}", tasks="piqa,boolq,arc_easy", data_dir=documents,
                                 allow_unofficial_data=True, token_budget=128, output=tmp_path / "alone")  # fmt: skip
        assert watched.scores.equals(alone.scores)


@pytest.mark.slow
def test_a_real_training_that_keeps_two_checkpoints(
    training: Path, documents: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its evaluations are those of a callback in the training."""
    process = start(arguments(training, documents, "--until", "6"))
    trainer = trainer_of(checkpoint, training, save_strategy="steps", save_steps=2)
    options = {"data_dir": documents, "allow_unofficial_data": True, "output": training.parent / "live"}
    trainer.add_callback(evalkit.TrainerCallback(trainer, every=2, tasks="piqa,boolq,arc_easy", **options))
    trainer.train()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert re.findall(r"^step (\d+)", out, re.MULTILINE) == ["2", "4", "6"]
    for step in (2, 4, 6):
        saved = evalkit.load_run(str(training / f"checkpoint-{step}"), root=training.parent / "runs")
        live = evalkit.load_run(f"training step {step}", root=training.parent / "live")
        assert saved.scores.equals(live.scores)
        assert json.dumps(saved.results().to_json()) == json.dumps(live.results().to_json())
