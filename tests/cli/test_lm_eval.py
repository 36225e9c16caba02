"""Commands as users of lm-eval type them: each does what it means there, or one line names evalkit's option."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.cli.lm_eval import OPTIONS, with_model_args, with_task_files
from evalkit.cli.root import cli
from evalkit.data import TASKS
from evalkit.data.requests import request_tasks
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
        ([], "--model"),
        (["--tasks"], "--tasks"),
        (["-b", "8"], "--token-budget"),
        (["-x"], "--predict-only"),
        (["--hf_hub_log_args", "hub_results_org=me"], "evalkit export"),
        (["--chat"], "--template chat"),
        (["--batch", "8"], "--token-budget"),
        (["--seed", "0,1234,1234,1234"], "random sample"),
        (["--model", "vllm", "--model_args", "pretrained=org/name"], "vllm: is not a checkpoint"),
        (["--model", "openai-completions", "--tasks", "piqa", "boolq"], "openai-completions: is not a checkpoint"),
        (["gguf"], ".gguf file"),
        (["sglang-generate", "demo"], "sglang-generate: is not a checkpoint"),
        (["--model_args", "pretrained=a,parallelize=True"], "--device-map auto"),
        (["--model_args", '{"pretrained": '], "JSON"),
    ],
)
def test_a_habit_gets_one_line(words: list[str], noun: str, evalkit: Command) -> None:
    complains(evalkit("run", *words), 2, noun)


def test_forms_of_lm_evals_command(evalkit: Command, checkpoint: Path, documents: Path) -> None:
    """All are one run: of the checkpoint, its dtype, and two tasks; with and without the name of the command."""
    local = ["--data-dir", documents, "--allow-unofficial-data", "-L", "2", "--format", "json"]
    first = evalkit("run", checkpoint, "--dtype", "float32", "--tasks", "piqa,boolq", *local)
    assert first.code == 0, first.err
    for words in (
        ["--model", "hf", "--model_args", '{"pretrained": "CKPT", "dtype": "float32"}', "--tasks", "piqa,boolq"],
        ["--model=hf", "--model_args", "pretrained=CKPT", "dtype=float32", "--tasks", "piqa", "boolq"],
        ["--model_args=pretrained=CKPT", "--tasks", "piqa", "--model_args", "dtype='float32'", "--tasks", "boolq"],
        ["-M", "hf", "-a", "pretrained=CKPT,dtype=float32", "-t", "piqa", "boolq", "-f", "0"],
        ["-m", "CKPT", "-t", "p[i]qa,bool*", "--dtype", "float32"],
    ):
        given = [word.replace("CKPT", str(checkpoint)) for word in words]
        for command in ([], ["run"]):
            again = evalkit(*command, *given, *local)
            assert again.out == first.out, again.err
    assert len(list(Path("results/runs").iterdir())) == 1


@pytest.mark.slow
def test_a_pattern_is_of_the_suite_before_it_is_of_all_tasks(evalkit: Command, checkpoint: Path) -> None:
    """Of RULER, of LongBench and of a suite that is given, only their own tasks match."""
    for words, expected in (
        (("ruler", "--tasks", "nia*x"), "niah_single_1"),
        (("longbench", "--tasks", "qaspr*"), "qasper"),
        (("attention", "--tasks", "arc_x*"), "arc_easy"),
        (("run", "--suite", "zeroshot8", "--tasks", "sciq*"), "piqa"),
        (("run", "--tasks", "arc_easy,zzz_*"), "evalkit ls tasks"),
        (("run", "--tasks", "helaswag*"), "hellaswag"),
    ):
        complains(evalkit(words[0], checkpoint, *words[1:]), 2, "unknown", words[-1].rpartition(",")[2], expected)


@pytest.mark.slow
def test_a_pattern_is_announced_once(evalkit: Command, checkpoint: Path) -> None:
    outcome = evalkit(
        "run", checkpoint, "--suite", "lm_eval", "--tasks", "sciq,sci[q],lambada_opena*i", "--rule", "acc"
    )
    complains(outcome, 2, "--rule")
    assert outcome.err.count("lambada_openai") == 1
    outcome = evalkit("run", checkpoint, "--tasks", "zzz_*")
    assert "zzz_*: " not in outcome.err and len(outcome.err) < 300


def test_the_list_of_tasks_has_whole_names(evalkit: Command) -> None:
    lines = evalkit("run", "--tasks", "list").out.splitlines()
    shown = {line.split(" ")[0] for line in lines}
    assert shown >= {*TASKS, *request_tasks()}
    assert max(map(len, lines)) <= 100


def test_no_option_of_evalkit_is_explained_away() -> None:
    known = {name for command in cli.commands.values() for param in command.params for name in param.opts}
    assert not known & OPTIONS.keys()


def test_model_args_are_settings() -> None:
    given = "pretrained=org/name,revision=main,dtype=float32,max_length=4096"
    assert with_model_args("hf", given, {"dtype": "auto", "rule": "acc"}) == (
        "org/name", {"revision": "main", "dtype": "float32", "context": "4096", "rule": "acc"},
    )  # fmt: skip
    for words, noun, kind in (
        ("pretrained=a,parallel=True", "parallel", UnknownNameError),
        ("pretrained=a,parallelize=True", "--device-map", UsageError),
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
