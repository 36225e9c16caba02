"""Commands as users of lm-eval type them: each does what it means there, or one line names evalkit's option."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.cli.lm_eval import OPTIONS, with_model_args, with_task_files
from evalkit.cli.root import cli
from evalkit.errors import EvalkitError, UnknownNameError, UsageError
from tests.cli.conftest import Command, complains


@pytest.mark.parametrize(
    ("words", "noun"),
    [
        (["--batch_size", "8"], "--token-budget"),
        (["--apply_chat_template"], "--template chat"),
        (["--output_path", "here"], "--output"),
        (["--write_out"], "--show-prompts"),
        (["--limit", "0.1"], "0.1"),
        (["--model", "hf"], "--model CKPT"),
    ],
)
def test_a_habit_gets_one_line(words: list[str], noun: str, evalkit: Command) -> None:
    complains(evalkit("run", *words), 2, noun)


def test_no_option_of_evalkit_is_explained_away() -> None:
    known = {name for command in cli.commands.values() for param in command.params for name in param.opts}
    assert not known & OPTIONS.keys()


def test_model_args_are_settings() -> None:
    given = "pretrained=org/name,revision=main,dtype=float32,max_length=4096"
    assert with_model_args("hf", given, {"dtype": "auto", "rule": "acc"}) == (
        "org/name", {"revision": "main", "dtype": "float32", "context": "4096", "rule": "acc"},
    )  # fmt: skip
    for words, noun, kind in (
        ("pretrained=a,parallelize=True", "parallelize", UnknownNameError),
        ("pretrained=a,trust_remote_code=True", "--trust-remote-code", UsageError),
        ("pretrained=a,pretrained=b", "twice", UsageError),
        ("pretrained", "--model-args pretrained: .*pretrained=VALUE", UsageError),
        ("pretrained=a,max_length=abc", "max_length is 'abc'", UsageError),
        ("pretrained=a,max_length=-4", "max_length is -4", UsageError),
        ("pretrained=a,device=gpu", "--model-args device=gpu: device gpu", UsageError),
    ):
        with pytest.raises(kind, match=noun):
            with_model_args("hf", words, {})
    with pytest.raises(UsageError, match="org/name"):
        with_model_args("org/name", given, {})


def test_a_task_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: my_task\ndoc_to_text: !function utils.text\n", encoding="utf-8")
    options = with_task_files({"tasks": (str(tmp_path / "mine.yaml"), "piqa"), "include_path": None})
    assert options == {"tasks": ("my_task", "piqa"), "include_path": tmp_path}
    (tmp_path / "empty.yaml").touch()
    for name in ("empty.yaml", "absent.yaml"):
        with pytest.raises(EvalkitError, match=name):
            with_task_files({"tasks": (str(tmp_path / name),)})
