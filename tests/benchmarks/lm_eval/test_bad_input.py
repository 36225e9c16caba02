"""Unsupported or invalid lm-eval tasks end in a one-line error, before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalkit.cli import main
from tests.benchmarks.lm_eval.made import CHOICE, made_tasks, write_task

DOCUMENTS = [{"question": "Why?", "choices": ["a", "b"], "gold": 1, "text": "t", "answer": "a"}]

Refused = Callable[..., tuple[int, str]]


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> Refused:
    """Run a command that fails offline and without a model; return exit code and last line."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evalkit.models.loading.load.load", None)

    def run(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            main(["run", "--model", str(checkpoint), "--output", "runs", *map(str, arguments)])
        err = capsys.readouterr().err
        assert "Traceback" not in err
        assert not list(Path("runs").glob("*"))
        return int(left.value.code or 0), err.splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("change", "code", "noun"),
    [
        ({"doc_to_image": "picture"}, 2, "images"),
        ({"doc_to_text": "{{ question.nothing.here }}"}, 1, "made_bad"),
        ({"dataset_path": "nobody/nothing", "dataset_kwargs": None}, 1, "nobody/nothing"),
    ],
)
def test_an_unsupported_task(refused: Refused, tmp_path: Path, change: dict[str, Any], code: int, noun: str) -> None:
    write_task(tmp_path / "bad", CHOICE | {"task": "made_bad"} | change, DOCUMENTS)
    exit_code, line = refused("--include-path", tmp_path / "bad", "--tasks", "made_bad")
    assert exit_code == code and line.startswith("evalkit: task made_bad") and noun in line


def test_no_code_of_a_group_runs_if_one_of_its_tasks_is_unsupported(refused: Refused, tmp_path: Path) -> None:
    """Where a nested group defines the task itself."""
    folder = tmp_path / "bad"
    path = write_task(folder, CHOICE, DOCUMENTS)
    (folder / "code.py").write_text("open('sprung', 'w')\n\n\ndef process(docs):\n    return docs\n", encoding="utf-8")
    path.write_text(path.read_text(encoding="utf-8") + "process_docs: !function code.process\n", encoding="utf-8")
    inline = CHOICE | {"task": "inner", "unsafe_code": True, "dataset_path": "json"}
    group = {"group": "made_group", "task": ["made_choice", {"group": "deeper", "task": [inline]}]}
    (folder / "group.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")
    code, line = refused("--include-path", folder, "--tasks", "made_group")
    assert code == 2 and "task made_group::deeper::inner " in line
    assert not Path("sprung").exists()


def test_invalid_requests(refused: Refused, tmp_path: Path) -> None:
    """Names, options of other suites, and folders without task files."""
    for arguments, noun in (
        (["made_choise"], "made_choice"),
        (["made_choice,made_pair"], "made_choice"),
        (["made_answers", "--template", "inst"], "generate_until"),
        *((["made_choice", "--suite", "lm_eval", option, value], option)
          for option, value in (("--rule", "acc_norm"), ("--vary", "template"))),
        *((["made_choice", "--include-path", tmp_path / name], tmp_path / name) for name in ("none", ".")),
    ):  # fmt: skip
        code, line = refused("--include-path", made_tasks(Path("tasks"), count=2), "--tasks", *arguments)
        assert code == 2 and str(noun) in line
