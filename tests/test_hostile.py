"""Hostile input through the real entry point: one line on standard error and exit code 1 or 2, at once."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from evalkit.inputs.values import LONGEST_TEXT
from tests.arguments import arguments
from tests.benchmarks.lm_eval.made import CHOICE, write_task
from tests.cli.test_root import Command, Outcome, _no_settings, complains, evalkit, run
from tests.documents import made_up, rewrite
from tests.inputs.test_reading import BOMB
from tests.pages.test_blocks import decoded as block_of

__all__ = ["_no_settings", "evalkit", "run"]  # fixtures

NAMES = {
    "line": "a\nb",
    "return": "a\rb",
    "escape": "a\x1b[2Jb",
    "bidi": "a\u202eb",
    "separator": "a\u2028b",
    "bytes": "a\udcffb",
    "long": "x" * 5000,
    "deep": "x/" * 3000,
    "home": "~nobody-of-this-name/x",
    "empty": "",
}
_FAST = ("escape", "bytes", "long", "empty")
"""Names that all commands are given in CI; the others are slow tests."""
FILES = {
    "deep": "[" * 50_000,
    "closed": "[" * 900 + "]" * 900,
    "bomb": BOMB,
    "cycle": "a: &a [*a]",
    "twice": "limit: 1\nlimit: 2",
    "half": 'model: "\\ud800"',
    "latin": b"a: \xff",
    "large": "system: " + "x " * 2_500_000,
    "digits": f"a: {'9' * 5000}",
    "object": "a: !!python/object/apply:os.system [ls]",
}
OBJECTS = {
    "deep": "[" * 50_000,
    "closed": '{"a":' * 900 + "1" + "}" * 900,
    "half": '{"a": "\\ud800"}',
    "twice": '{"a": 1, "a": 2}',
    "latin": b'{"a": "\xff"}',
    "digits": f'{{"a": {"9" * 5000}}}',
}


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def is_clean(text: str) -> bool:
    """Check that there are no control characters except line feeds."""
    return not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text if c != "\n")


def refused(outcome: Outcome) -> str:
    """Return the one-line error."""
    assert outcome.code in (1, 2), outcome
    complains(outcome, outcome.code)
    assert is_clean(outcome.err)
    last = outcome.err.split("\n")[-2]
    assert len(last) < 2100
    return last


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, id=key, marks=() if key in _FAST else pytest.mark.slow) for key, name in NAMES.items()],
)
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


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_yaml_of_anything(evalkit: Command, checkpoint: Path, documents: Path, content: str | bytes) -> None:
    file = write(Path("own.yaml"), content)
    write(Path("tasks/own.yaml"), content)
    common = ["run", "--model", checkpoint, "--tasks", "piqa", "--data-dir", documents, "--allow-unofficial-data"]
    for command in (
        [*common, "--config", file],
        [*common, "--template", file],
        [*common, "--context-config", file],
        ["run", "--model", checkpoint, "--tasks", "piqa", "--include-path", "tasks"],
        ["table", file],
        ["table", "main_res", "--source", "runs", "--runs", file],
        ["models", "show", file],
        ["models", "init", file, "--output", "made"],
    ):
        before = time.process_time()
        assert "own.yaml" in refused(evalkit(*command))
        assert time.process_time() - before < 20


@pytest.mark.parametrize("content", OBJECTS.values(), ids=OBJECTS)
def test_json_of_anything(evalkit: Command, checkpoint: Path, documents: Path, content: str | bytes) -> None:
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        folder = Path(shutil.copytree(checkpoint, Path(f"with {name}")))
        write(folder / name, content)
        common = {"--data-dir": documents, "--allow-unofficial-data": None, "--tasks": "piqa"}
        assert f"with {name}" in refused(evalkit("run", "--model", f"./{folder}", *arguments(common, [])))
    assert "with config.json" in refused(evalkit("models", "show", "./with config.json"))
    whole = Path(shutil.copytree(checkpoint, "headed")) / "model.safetensors"
    header = content if isinstance(content, bytes) else content.encode()
    write(whole, len(header).to_bytes(8, "little") + header)
    assert "model.safetensors" in refused(evalkit("run", "--model", "./headed", "--data-dir", documents, "--tasks",
                                                  "piqa", "--allow-unofficial-data"))  # fmt: skip
    write(Path("data/piqa.jsonl"), content)
    assert "data/piqa.jsonl, line 1" in refused(
        evalkit("run", "--model", checkpoint, "--tasks", "piqa", "--data-dir", "data")
    )
    write(Path("rows/qasper.jsonl"), content)
    assert "rows/qasper.jsonl, line 1" in refused(
        evalkit("longbench", "--model", checkpoint, "--tasks", "qasper", "--data-dir", "rows")
    )
    assert "rows/qasper.jsonl, line 1" in refused(evalkit("longbench", "score", "rows"))
    write(Path("texts.jsonl"), content)
    assert "texts.jsonl" in refused(
        evalkit("models", "init", "llama-125m-intg", "--output", "made", "--train-tokenizer", "texts.jsonl")
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"endings": ["a", "b", "[title]", "d"]}, "'endings[2]': has no text outside of brackets"),
        ({"endings": ["a", "b", "[step] [x]", "d"]}, "'endings[2]': has no text outside of brackets"),
        ({"ctx_a": "x" * (LONGEST_TEXT + 1)}, "'ctx_a': has 8,388,609 characters; expected at most 8,388,608"),
        ({"ctx_a": "a\udc00"}, "holds half of a surrogate pair"),
    ],
    ids=["title", "brackets", "long", "half"],
)
def test_documents_with_anything(run: Command, change: dict[str, Any], said: str) -> None:
    rewrite(made_up(Path("documents")) / "hellaswag.jsonl", 2, change)
    outcome = run("--data-dir", "documents", "--tasks", "hellaswag")
    last = refused(outcome)
    assert "documents/hellaswag.jsonl, line 2 (hellaswag): " in last and said in last


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"doc_to_text": "{{ question * 9000000 }}"}, "made_choice document 0: its text has"),
        ({"doc_to_text": "{{ '\\ud800' }}"}, "made_choice document 0: its text holds half of a surrogate pair"),
    ],
    ids=["long", "half"],
)
def test_tasks_of_anything(evalkit: Command, checkpoint: Path, change: dict[str, Any], said: str) -> None:
    write_task(Path("tasks"), CHOICE | change, [{"question": "Why?", "choices": ["a", "b"], "gold": 1}])
    assert said in refused(evalkit("run", "--model", checkpoint, "--include-path", "tasks", "--tasks", "made_choice"))


def test_a_hostile_output_folder_is_printed_on_one_line(run: Command, evalkit: Command) -> None:
    outcome = run("--output", "runs\n\x1b[2J\u202e")
    assert outcome.code == 0
    assert is_clean(outcome.out)
    assert outcome.out.splitlines()[-1].startswith("runs\\n\\x1b[2J\\u202e/")
    listed = evalkit("ls", "runs", "--output", "none\n\x1b[2J")
    assert is_clean(listed.out)
    assert "none in none\\n\\x1b[2J" in listed.out


def test_documents_cannot_order_the_terminal(run: Command) -> None:
    rewrite(made_up(Path("documents")) / "piqa.jsonl", 1, {"goal": "a\x1b[2J\u202eb"})
    shown = run("--data-dir", "documents", "--tasks", "piqa", "--show-prompts", 1)
    assert shown.code == 0
    assert is_clean(shown.out)
    assert "a\\x1b[2J\\u202eb" in shown.out


def test_documents_cannot_turn_a_page(run: Command, evalkit: Command) -> None:
    """Changes of direction are shown by their codes, in texts of the page and in what its script reads."""
    text = "a\u202eb \u2066c\u2069\u200f"
    rewrite(made_up(Path("documents")) / "piqa.jsonl", 1, {"goal": text, "sol1": text})
    assert run("--data-dir", "documents", "--tasks", "piqa", "--output", "runs\u202e").code == 0
    assert evalkit("report", *Path("runs\u202e").iterdir(), "-o", "page.html").code == 0
    page = Path("page.html").read_text(encoding="utf-8")
    blocks = re.findall(r'<script[^>]*id="block-\d+"[^>]*>(.*?)</script>', page, re.DOTALL)
    [index] = re.findall(r'<script[^>]*id="document-index"[^>]*>(.*?)</script>', page, re.DOTALL)
    contents = [
        page,
        *(json.dumps(part, ensure_ascii=False) for part in (json.loads(index), *(block_of(one)[0] for one in blocks))),
    ]
    assert not any(mark in content for content in contents for mark in text if not mark.isprintable())
    assert any("a\\\\u202eb \\\\u2066c\\\\u2069\\\\u200f" in content for content in contents)


def test_a_terminal_that_lacks_characters(evalkit: Command) -> None:
    command = [sys.executable, "-m", "evalkit", "table", "abl_top_app", "--audit"]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=True)
    assert done.stderr == b""
    assert done.stdout.isascii()


# Values that would be changed


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("limit: 2.7", "key 'limit': '2.7' is not a valid integer"),
        ("limit: true", "key 'limit': 'true' is not a valid integer"),
        ("limit: ''", "key 'limit' is empty; leave it out"),
        ("limit: [1, 2]", "key 'limit' is a list; give one value"),
        ("context: 4096.7", "'4096.7'"),
        ("show-prompts: 1.5", "key 'show-prompts': '1.5' is not a valid integer range"),
        ("log-samples: maybe", "key 'log-samples': 'maybe' is not a valid boolean"),
        ("log-samples: 2", "key 'log-samples': '2' is not a valid boolean"),
        ("suite: ''", "key 'suite' is empty"),
        ("tasks: []", "key 'tasks' must be a list of names or numbers, with at least one"),
        ("tasks: [piqa, {a: 1}]", "key 'tasks' must be a list of names or numbers"),
        ("rule: [acc]", "key 'rule' is a list; give one value"),
        ("data-dir: {a: 1}", "key 'data-dir' is a mapping; give one value"),
        ("data_dir: a\ndata-dir: b", "key 'data-dir' occurs twice"),
        ('data-dir: "a\\0b"', "--data-dir a\\x00b: holds a NUL character"),
        ("revision: 0123", "ckpt@0123"),
    ],
)
def test_config_values_are_taken_as_they_are_written(evalkit: Command, content: str, said: str) -> None:
    Path("own.yaml").write_text(content, encoding="utf-8")
    assert said in refused(evalkit("run", "--model", "./ckpt", "--config", "own.yaml"))


def test_switches_of_a_config_file(run: Command) -> None:
    Path("own.yaml").write_text("log-samples: yes\ntrust-remote-code: no\ntasks: [piqa, boolq]", encoding="utf-8")
    outcome = run("--config", "own.yaml")
    assert outcome.code == 0, outcome.err
    assert list(Path("runs").glob("*/lm_eval/samples_*"))


@pytest.mark.parametrize("name", ["LIMIT", "SUITE", "TASKS", "DATA_DIR", "LOG_SAMPLES", "CONFIG", "RULE"])
@pytest.mark.parametrize("value", ["", " "])
def test_empty_variables(evalkit: Command, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"EVALKIT_{name}", value)
    said = refused(evalkit("run", "--model", "./none"))
    assert said == f"evalkit: EVALKIT_{name} is set and empty; unset it, or give a value"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--model", "a", "--model", "b"], "--model is given 2 times (a, b); give it once"),
        (["run", "--model", "a", "--limit", "1", "-L", "2"], "--limit is given 2 times (1, 2); give it once"),
        (["run", "--model", "a", "--tasks", "piqa", "--tasks", "boolq"], "--tasks is given 2 times (piqa, boolq)"),
        (["models", "init", "a", "--output", "b", "--output", "c"], "--output is given 2 times (b, c); give it once"),
        (["longbench", "score", "a", "--format", "csv", "--format", "json"], "--format is given 2 times"),
        (["run", "--config", "a", "--config", "b"], "--config is given 2 times"),
        (["run", "--model", "a", "--suite", ""], "--suite is empty; leave it out, or give a value"),
        (["run", "--model", "a", "--tasks", ""], "--tasks is empty; leave it out, or give a value"),
        (["data", "--data-dir", ""], "--data-dir is empty"),
        (["ls", ""], " is empty; leave it out, or give a value"),
        (["compare", "a", "b", "--fail-if-worse", "--margin", "inf"], "inf is not a finite number"),
        (["compare", "a", "b", "--fail-if-worse", "--margin", "nan"], "nan is not a finite number"),
        (["compare", "a", "b", "--fail-if-worse", "--margin", "1e400"], "1e400 is not a finite number"),
        (["table", "main_res", "--output", "."], "is a folder; name a file with --output"),
        (["table", "main_res", "--output", "/"], "is a folder; name a file with --output"),
    ],
)
def test_options_that_would_be_taken_for_others(evalkit: Command, arguments: list[str], said: str) -> None:
    assert said in refused(evalkit(*arguments))


def test_options_that_may_be_repeated(evalkit: Command) -> None:
    assert "unknown run 'x'" in refused(evalkit("compare", "--group", "a=x", "--group", "b=y", "--curve", "--curve"))


def test_shares_of_a_whole_in_tables(evalkit: Command) -> None:
    Path("values.csv").write_text("model,piqa\nintg_125m,150\n", encoding="utf-8")
    Path("runs.yaml").write_text(json.dumps({"values": "values.csv"}), encoding="utf-8")
    said = refused(evalkit("table", "main_res", "--source", "runs", "--runs", "runs.yaml"))
    assert all(part in said for part in ("values.csv, line 2", "intg_125m", "piqa", "150"))
