"""Unsupported or invalid lm-eval tasks end in a one-line error, before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from evalkit.cli import main
from tests.benchmarks.lm_eval.made import ANSWERS, CHOICE, made_tasks, write_task
from tests.tiny import tiny_checkpoint

DOCUMENTS = [{"question": "Why?", "choices": ["a", "b"], "gold": 1, "text": "t", "answer": "a"}]
CODE = "def gold(doc):\n    return doc['gold']\n\n\ndef fails(doc):\n    raise ValueError('no such luck')\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=128)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_tasks(tmp_path_factory.mktemp("tasks"), count=2)


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Offline, and without a model."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evalkit.models.loading.load.load", None)


def refused(capsys: pytest.CaptureFixture[str], model: Path, *arguments: object) -> tuple[int, str]:
    """Return exit code and last line of a failing command."""
    with pytest.raises(SystemExit) as left:
        main(["run", "--model", str(model), "--output", "runs", *map(str, arguments)])
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert not list(Path("runs").glob("*"))
    return int(left.value.code or 0), err.splitlines()[-1]


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"doc_to_image": "picture"}, 2, "task made_bad has images or audio"),
        ({"doc_to_audio": "sound"}, 2, "task made_bad has images or audio"),
        ({"unsafe_code": True}, 2, "task made_bad runs generated code"),
        ({"output_type": "rank"}, 2, "task made_bad has the output type 'rank'; evalkit supports multiple_choice"),
        ({"doc_to_text": "{{ question.nothing.here }}"}, 1, "task made_bad: lm-eval cannot load it"),
        ({"test_split": "dev"}, 1, "task made_bad: lm-eval cannot load it"),
        ({"num_fewshot": 3}, 1, "task made_bad: lm-eval cannot build the request of document 0"),
        ({"dataset_path": "nobody/nothing", "dataset_kwargs": None}, 1,
         "task made_bad: its documents (nobody/nothing) cannot be loaded: the hub cannot be reached (HF_HUB_OFFLINE"),
    ],
)  # fmt: skip
def test_an_unsupported_task(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, change: dict[str, Any], code: int, words: str
) -> None:
    write_task(tmp_path / "bad", CHOICE | {"task": "made_bad"} | change, DOCUMENTS)
    found = refused(capsys, model, "--include-path", tmp_path / "bad", "--tasks", "made_bad")
    assert found[0] == code
    assert found[1].startswith(f"evalkit: {words}")


def test_a_task_inside_a_group_is_named(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    write_task(folder, CHOICE, DOCUMENTS)
    write_task(folder, CHOICE | {"task": "made_seen", "doc_to_image": "picture"}, DOCUMENTS)
    group = {"group": "made_group", "task": ["made_choice", {"group": "inner", "task": ["made_seen"]}]}
    (folder / "group.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")
    found = refused(capsys, model, "--include-path", folder, "--tasks", "made_group")
    assert found == (2, "evalkit: task made_seen has images or audio; evalkit evaluates text only")


def test_code_beside_a_task_file_that_fails(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    path = write_task(tmp_path / "bad", CHOICE | {"task": "made_bad"}, DOCUMENTS)
    path.with_name("code.py").write_text(CODE, encoding="utf-8")
    text = path.read_text(encoding="utf-8").replace("doc_to_target: '{{gold}}'", "doc_to_target: !function code.fails")
    path.write_text(text, encoding="utf-8")
    code, line = refused(capsys, model, "--include-path", path.parent, "--tasks", "made_bad")
    assert (code, line) == (1, "evalkit: task made_bad: lm-eval cannot load it (ValueError: no such luck)")


def test_more_text_than_the_window_is_reported_by_document(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    long = ANSWERS | {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 500}}
    write_task(tmp_path / "bad", long, DOCUMENTS)
    code, line = refused(capsys, model, "--include-path", tmp_path / "bad", "--tasks", "made_answers")
    assert code == 1
    assert line.startswith(
        "evalkit: made_answers document 0: asks for 500 tokens of text, and the model's window is 128"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "made_choise"], "unknown task 'made_choise': did you mean 'made_choice'?"),
        (["--tasks", "lambada_openi"], "unknown task 'lambada_openi': did you mean 'lambada_openai'?"),
        (["--tasks", "made_choice,made_pair"], "task made_choice is named twice, the second time by 'made_pair'"),
        (["--tasks", "made_choice,made_choice"], "a task is named twice"),
        ([], "lm-eval's tasks must be named: --tasks"),
        (["--tasks", "made_answers", "--template", "inst"], "task made_answers: its output type is generate_until"),
        (["--tasks", "made_texts", "--rule", "acc"], "task made_texts: its output type is loglikelihood_rolling, but"),
        (["--tasks", "made_choice", "--data-dir", "."], "--data-dir .: is for evalkit's own tasks"),
        (["--tasks", "made_choice", "--suite", "zeroshot8"], "--include-path adds lm-eval tasks, but suite zeroshot8"),
        (["--tasks", "made_choice", "--suite", "lm_evl"], "unknown suite 'lm_evl': did you mean 'lm_eval'?"),
        (["--tasks", "made_choice", "--num-fewshot", "-1"], "--num-fewshot is -1"),
    ],
)
def test_invalid_requests(
    capsys: pytest.CaptureFixture[str], model: Path, made: Path, arguments: list[str], words: str
) -> None:
    code, line = refused(capsys, model, "--include-path", made, *arguments)
    assert code == 2
    assert line.startswith(f"evalkit: {words}")


@pytest.mark.parametrize("option", [("--template", "inst"), ("--rule", "acc_norm"), ("--vary", "template")])
def test_prompts_and_rules_that_lm_evals_tasks_do_not_have(
    capsys: pytest.CaptureFixture[str], model: Path, option: tuple[str, str]
) -> None:
    code, line = refused(capsys, model, "--suite", "lm_eval", "--tasks", "piqa", *option)
    assert code == 2
    assert line.startswith(f"evalkit: {option[0]}: suite lm_eval") and "leave out --suite lm_eval" in line


def test_an_invalid_folder(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    arguments = ("--tasks", "made_choice", "--include-path")
    (tmp_path / "empty").mkdir()
    assert "no such folder" in refused(capsys, model, *arguments, tmp_path / "none")[1]
    assert "found no task file" in refused(capsys, model, *arguments, tmp_path / "empty")[1]


@pytest.mark.parametrize(("task", "words"), [("humaneval", "runs generated code"), ("mmmu_val", "has images")])
def test_lm_evals_own_tasks_that_cannot_be_served(
    capsys: pytest.CaptureFixture[str], model: Path, task: str, words: str
) -> None:
    code, line = refused(capsys, model, "--suite", "lm_eval", "--tasks", task)
    assert code == 2
    assert words in line
