"""docs/training.md: its code and its commands run."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path

import pytest

import evalkit
from evalkit.cli import main
from evalkit.studies.watch import Watcher
from tests.tiny import tiny_checkpoint
from tests.training.loops import built, train
from tests.training.trainers import trainer_of

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
STEPS = {"1000": "2", "2000": "4", "20000": "4"}
"""Steps of the page → steps of a short training."""


def shortened(text: str) -> str:
    return re.sub(r"\b\d+000\b", lambda found: STEPS[found[0]], text)


@pytest.mark.training
def test_its_code_and_commands(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evalkit.studies.watch.Watcher", partial(Watcher, settled=0.2, poll=0.02, stalled=0.6))
    start = tiny_checkpoint(tmp_path / "start", window=1024)
    trainer = trainer_of(start, tmp_path / "my-training", max_steps=4, save_strategy="steps", save_steps=2)
    callback = partial(evalkit.TrainerCallback, data_dir=documents, allow_unofficial_data=True)
    monkeypatch.setattr(evalkit, "TrainerCallback", callback, raising=False)
    in_loop = partial(evalkit.InLoop, data_dir=documents, allow_unofficial_data=True, on_error="raise")
    monkeypatch.setattr(evalkit, "InLoop", in_loop, raising=False)
    logged: list[int] = []
    given = {
        "trainer": trainer,
        "model": built("nano"),
        "tokenizer": trainer.processing_class,
        "batches": [None] * 4,
        "train_step": lambda model, _: train(model, 1),
        "log": lambda metrics, step: logged.extend([step] * bool(metrics)),
    }
    for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(shortened(code), "docs/training.md", "exec"), given)
    assert logged == [2, 4]
    commands = re.findall(r"^(?:    )?evalkit (.*)$", PAGE, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["compare", "compare", "run", "run"]
    for command in commands:
        words = shlex.split(shortened(command))
        if words[0] == "run":
            words += ["--data-dir", str(documents), "--allow-unofficial-data"]
            words += [] if "--until" in words else ["--until", "4"]
        with pytest.raises(SystemExit) as left:
            main(words)
        out, err = capsys.readouterr()
        assert left.value.code == 0, err
        assert words[0] != "run" or re.findall(r"^step (\d+): [\d.]+ ± [\d.]+ \(ppl\)", out, re.MULTILINE) == ["2", "4"]
        assert Path("curve.png").is_file()
