"""Hostile input through the real entry point: a line on standard error and exit code 1 or 2; more in tests/guards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from evalkit.inputs.values import LONGEST_TEXT
from tests.arguments import arguments
from tests.benchmarks.lm_eval.made import CHOICE, write_task
from tests.cli.conftest import Command, Outcome, _no_settings, complains, evalkit, run
from tests.documents import made_up, rewrite

__all__ = ["_no_settings", "evalkit", "run"]  # fixtures

NAMES = {
    "escape": "a\x1b[2Jb",
    "line": "a\nb",
    "bidi": "a\u202eb",
    "separator": "a\u2028b",
    "bytes": "a\udcffb",
    "long": "x" * 5000,
    "deep": "x/" * 3000,
    "home": "~nobody-of-this-name/x",
    "empty": "",
}
FILES = {
    "closed": "[" * 900 + "]" * 900,
    "twice": "limit: 1\nlimit: 2",
    "half": 'model: "\\ud800"',
    "latin": b"a: \xff",
    "digits": f"a: {'9' * 5000}",
}
OBJECTS = {
    "half": '{"a": "\\ud800"}',
    "deep": "[" * 50_000,
    "closed": '{"a":' * 900 + "1" + "}" * 900,
    "twice": '{"a": 1, "a": 2}',
    "latin": b'{"a": "\xff"}',
    "digits": f'{{"a": {"9" * 5000}}}',
}


def sampled(values: dict[str, Any]) -> list[Any]:
    """Mark all but the first value as hostile."""
    marks = [(), *[pytest.mark.hostile] * (len(values) - 1)]
    return [pytest.param(value, id=key, marks=mark) for (key, value), mark in zip(values.items(), marks, strict=True)]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def is_clean(text: str) -> bool:
    """Whether there are no control characters except line feeds."""
    return not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text if c != "\n")


def refused(outcome: Outcome) -> str:
    """Return the one-line error."""
    assert outcome.code in (1, 2), outcome
    complains(outcome, outcome.code)
    last = outcome.err.split("\n")[-2]
    assert is_clean(outcome.err) and len(last) < 2100
    return last


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("name", sampled(NAMES))
def test_names_of_anything(evalkit: Command, checkpoint: Path, name: str) -> None:
    commands: list[list[Any]] = [
        [name], ["ls", name], ["models", name], ["rescore", name], ["integrity", name], ["compare", name, name],
        ["compare", "--group", name, "--group", f"b={name}"], ["export", name, "--to", "hub"], ["table", name],
        ["table", f"{name}.yaml"], ["table", "main_res", "--source", "runs", "--runs", name],
        ["table", "main_res", "--rule", name, "--source", name], ["models", "show", name],
        ["models", "show", f"{name}.yaml"], ["models", "init", name, "--output", "made"],
        ["models", "convert", name, "--output", "made"], ["longbench", "score", name], ["longbench", "rescore", name],
        ["needle", "--model", name], ["longbench", "--model", name], ["run", "--config", name, "--model", "x"],
    ]  # fmt: skip
    options = ("model", "revision", "tokenizer", "suite", "tasks", "template", "rule", "limit", "dtype", "attention",
               "context-config", "context-method", "token-budget", "data-dir", "format")  # fmt: skip
    common = {"--model": checkpoint, "--suite": "zeroshot8", "--tasks": "piqa"}
    commands += [["run", *arguments(common, [f"--{option}={name}"])] for option in options]
    for command in commands:
        refused(evalkit(*command))


@pytest.mark.parametrize("content", sampled(FILES))
def test_yaml_of_anything(evalkit: Command, checkpoint: Path, documents: Path, content: str | bytes) -> None:
    file = write(Path("own.yaml"), content)
    write(Path("tasks/own.yaml"), content)
    common = ["run", "--model", checkpoint, "--tasks", "piqa"]
    documented = [*common, "--data-dir", documents, "--allow-unofficial-data"]
    for command in (
        *([*documented, option, file] for option in ("--config", "--template", "--context-config")),
        [*common, "--include-path", "tasks"],
        ["table", file],
        ["table", "main_res", "--source", "runs", "--runs", file],
        ["models", "show", file],
        ["models", "init", file, "--output", "made"],
    ):
        assert "own.yaml" in refused(evalkit(*command))


@pytest.mark.parametrize("content", sampled(OBJECTS))
def test_json_of_anything(evalkit: Command, checkpoint: Path, documents: Path, content: str | bytes) -> None:
    options = ["--data-dir", documents, "--allow-unofficial-data", "--tasks", "piqa"]
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        folder = Path(shutil.copytree(checkpoint, Path(f"with {name}")))
        write(folder / name, content)
        assert f"with {name}" in refused(evalkit("run", "--model", f"./{folder}", *options))
    assert "with config.json" in refused(evalkit("models", "show", "./with config.json"))
    weights = Path(shutil.copytree(checkpoint, "headed")) / "model.safetensors"
    header = content if isinstance(content, bytes) else content.encode()
    write(weights, len(header).to_bytes(8, "little") + header)
    assert "model.safetensors" in refused(evalkit("run", "--model", "./headed", *options))
    for path in ("data/piqa.jsonl", "rows/qasper.jsonl", "texts.jsonl"):
        write(Path(path), content)
    init = ("models", "init", "llama-125m-intg", "--output", "made", "--train-tokenizer", "texts.jsonl")
    for words, command in (
        ("data/piqa.jsonl, line 1", ("run", "--model", checkpoint, "--tasks", "piqa", "--data-dir", "data")),
        ("rows/qasper.jsonl", ("longbench", "--model", checkpoint, "--tasks", "qasper", "--data-dir", "rows")),
        ("rows/qasper.jsonl", ("longbench", "score", "rows")),
        ("texts.jsonl", init),
    ):
        assert words in refused(evalkit(*command))


@pytest.mark.hostile
def test_documents_and_tasks_of_anything(run: Command, evalkit: Command, checkpoint: Path) -> None:
    for change, words in (
        ({"endings": ["a", "b", "[step] [x]", "d"]}, "'endings[2]'"),
        ({"ctx_a": "x" * (LONGEST_TEXT + 1)}, "'ctx_a'"),
        ({"ctx_a": "a\udc00"}, "surrogate"),
    ):
        rewrite(made_up(Path("documents")) / "hellaswag.jsonl", 2, change)
        last = refused(run("--data-dir", "documents", "--tasks", "hellaswag"))
        assert "documents/hellaswag.jsonl, line 2" in last and words in last
    for prompt in ("{{ question * 9000000 }}", "{{ '\\ud800' }}"):
        documents = [{"question": "Why?", "choices": ["a", "b"], "gold": 1}]
        write_task(Path("tasks"), CHOICE | {"doc_to_text": prompt}, documents)
        last = refused(evalkit("run", "--model", checkpoint, "--include-path", "tasks", "--tasks", "made_choice"))
        assert "made_choice document 0" in last


@pytest.mark.hostile
def test_a_terminal_that_lacks_characters() -> None:
    command = [sys.executable, "-m", "evalkit", "table", "abl_top_app", "--audit"]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=True)
    assert done.stderr == b"" and done.stdout.isascii()
