"""Invalid logs: a one-line error that names file and line, and nothing is written. More are in tests/guards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.run import evaluate
from evalkit.cli import main
from evalkit.data import Library
from evalkit.display import Progress
from evalkit.errors import DataError, UsageError
from evalkit.exchange import logs
from evalkit.exchange.exports import export_run
from evalkit.exchange.metric_runs import import_logs
from evalkit.models.loading.locate import silent
from tests.importing.logged import lines, rewrite

Line = dict[str, Any]


@pytest.fixture(scope="module")
def exported(checkpoint: Path, documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of two tasks, with its results file."""
    folder = tmp_path_factory.mktemp("bad")
    run = evaluate(
        str(checkpoint), data_dir=documents, allow_unofficial_data=True, tasks=("arc_easy", "piqa"), template="plain",
        log_samples=True, output=folder / "runs", progress=Progress(live=False),
    )  # fmt: skip
    export_run(run, "lm_eval", output=folder / "log")
    return folder / "log"


@pytest.fixture
def log(exported: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(exported, tmp_path / "log"))


def sample_file(log: Path, task: str = "arc_easy") -> Path:
    [path] = log.glob(f"samples_{task}_*.jsonl")
    return path


def change_results(log: Path, **changes: Any) -> Path:
    [path] = log.glob("results_*.json")
    content = json.loads(path.read_text(encoding="utf-8")) | {
        name.replace("_", "-", 1): v for name, v in changes.items()
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def rejected(documents: Path, tmp_path: Path) -> Callable[..., str]:
    """Import files that must be rejected; return the message."""

    def run(*paths: Path, kind: type[Exception] = DataError) -> str:
        library = Library(documents, allow_unofficial=True, say=silent)
        with pytest.raises(kind) as error:
            import_logs(paths, None, tmp_path / "imported", library, silent)
        assert not (tmp_path / "imported").exists()
        assert "\n" not in str(error.value)
        return str(error.value)

    return run


def likelihood(value: Any) -> Callable[[Line], None]:
    def change(line: Line) -> None:
        line["filtered_resps"][0], line["resps"][0] = [value, "False"], [[value, "False"]]

    return change


def target(text: str) -> Callable[[Line], None]:
    return lambda line: line.update(target=text, target_hash=hashlib.sha256(text.encode()).hexdigest())


@pytest.mark.parametrize(
    ("change", "noun"),
    [
        (likelihood("-inf"), "-inf"),
        (likelihood(-1.5), "log-likelihood"),
        (lambda line: line.update(metrics=["f1"]), "f1"),
        (lambda line: line.update(target="17"), "target_hash"),
        *(
            pytest.param(change, noun, marks=pytest.mark.hostile)
            for change, noun in (
                (likelihood("-1e308"), "-1e+308"),
                (likelihood("-١"), "log-likelihood"),
                (likelihood("none"), "log-likelihood"),
                (target("²"), "target ²"),
                (target("9" * 5000), "target 999"),
                (lambda line: line["arguments"]["gen_args_0"].update(arg_0="x"), "prompt_hash"),
                (lambda line: line.update(acc=1e308), "'acc'"),
                (lambda line: line.update(filtered_resps=[]), "log-likelihood"),
                (lambda line: line.update(arguments={}), "'arguments'"),
                (lambda line: line.update(arguments={"a": {"arg_0": "x"}}), "gen_args_0"),
                (lambda line: line["arguments"].update(gen_args_0={"arg_0": 1}), "has no text"),
                (lambda line: line.pop("doc"), "'doc'"),
                (lambda line: line.pop("doc_hash"), "'doc_hash'"),  # earlier versions of lm-eval wrote no hashes
                (lambda line: line.update(doc_id="1"), "'doc_id'"),
                (lambda line: line.update(doc_id=-1), "'doc_id'"),
                (lambda line: line.update(doc_id=10**200), "'doc_id'"),
            )
        ),
    ],
)
def test_a_changed_line(change: Callable[[Line], Any], noun: str, log: Path, rejected: Callable[..., str]) -> None:
    path = sample_file(log)
    content = lines(path)
    change(content[3])
    rewrite(path, content)
    message = rejected(path)
    assert message.startswith(f"{path}, line 4: ") and noun in message


@pytest.mark.hostile
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-40],
        lambda data: data.replace(b"\n", b"\n\n", 1),
        lambda data: b"[1]\n" + data,
        lambda data: data.replace(b"Question", b"\xff", 1),
        lambda data: b"[" * 10_000 + data,
        lambda data: b"",
    ],
)
def test_a_damaged_file(damage: Callable[[bytes], bytes], log: Path, rejected: Any) -> None:
    path = sample_file(log)
    path.write_bytes(damage(path.read_bytes()))
    assert str(path) in rejected(path)


def test_a_file_that_is_too_large_or_no_file(
    log: Path, rejected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(logs, "MOST_DOCUMENT_BYTES", 1000)
    assert "more than 1,000 bytes" in rejected(sample_file(log))
    pipe = tmp_path / "samples_b_2026-01-01T00-00-00.000000.jsonl"
    assert str(pipe) in rejected(pipe)
    os.mkfifo(pipe)
    assert str(pipe) in rejected(pipe)
    assert "samples_<task>_<time>.jsonl" in rejected(change_results(log), kind=UsageError)
    assert "samples_*.jsonl" in rejected(kind=UsageError)


def test_files_that_do_not_belong_together(log: Path, rejected: Any, tmp_path: Path) -> None:
    path, other = sample_file(log), tmp_path / "other"
    shutil.copytree(log, other)
    assert "are both of task arc_easy" in rejected(path, sample_file(other), kind=UsageError)
    results = json.loads(next(other.glob("results_*")).read_text(encoding="utf-8"))
    change_results(other, config=results["config"] | {"model_dtype": "bfloat16"})
    message = rejected(path, sample_file(other, "piqa"), kind=UsageError)
    assert message.startswith("dtype: arc_easy has float32 and piqa has bfloat16")
    change_results(other, config=results["config"], n_shot=results["n-shot"] | {"piqa": 5})
    message = rejected(path, sample_file(other, "piqa"), kind=UsageError)
    assert message.startswith("solved examples: arc_easy has 0 and piqa has 5")
    assert "give --model NAME" in rejected(sample_file(_unnamed(log)), kind=UsageError)


def _unnamed(log: Path) -> Path:
    [path] = log.glob("results_*.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | {"model_name": ""}), encoding="utf-8")
    return log


@pytest.mark.parametrize(
    "changes",
    [
        {"n_shot": {"arc_easy": -1}},
        {"n_samples": {"arc_easy": {"original": 5, "effective": 6}}},
        pytest.param({"n_shot": {"arc_easy": 10**300}}, marks=pytest.mark.hostile),
        pytest.param({"n_samples": {"arc_easy": {"original": 10**7, "effective": 6}}}, marks=pytest.mark.hostile),
        pytest.param({"evalkit": {"sample": -1}}, marks=pytest.mark.hostile),
        pytest.param({"results": 1}, marks=pytest.mark.hostile),
    ],
    ids=str,
)
def test_a_results_file_that_is_invalid(changes: dict[str, Any], log: Path, rejected: Any) -> None:
    path = change_results(log, **changes)
    message = rejected(sample_file(log))
    assert str(path) in message or "arc_easy" in message


def flip(content: list[Line]) -> None:
    for line in content:
        line["acc"] = 1.0 - line["acc"]


def without_a_request(content: list[Line]) -> None:
    content[1]["arguments"].popitem()


@pytest.mark.parametrize("change", [flip, without_a_request])
def test_choices_that_contradict_their_log_likelihoods(change: Any, log: Path, rejected: Any) -> None:
    """Of a task that is not pinned, whatever the results file says."""
    [beside] = log.glob("results_*.json")
    beside.write_text(beside.read_text(encoding="utf-8").replace('"arc_easy"', '"own"'), encoding="utf-8")
    results = json.loads(beside.read_text(encoding="utf-8"))
    change_results(log, task_hashes={}, results={}, configs={"own": results["configs"]["own"]})
    path = sample_file(log).rename(log / sample_file(log).name.replace("arc_easy", "own"))
    content = lines(path)
    change(content)
    rewrite(path, content)
    assert f"{path}, line " in (message := rejected(path)) and "log-likelihoods" in message


def test_the_command(log: Path, documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return int(ended.value.code or 0), capsys.readouterr().out

    data, output = ["--data-dir", str(documents), "--allow-unofficial-data"], str(tmp_path / "runs")
    code, printed = run("import", *map(str, log.glob("samples_*.jsonl")), *data, "-o", output)
    [folder] = printed.splitlines()
    assert code == 0
    for command in (["ls", "runs", "-o", output], ["rescore", folder], ["integrity", folder]):
        code, printed = run(*command)
        assert code == 0 and "imported from a log of evalkit" in printed.replace("\n", " ")
    assert run("import", str(tmp_path / "absent"))[0] == 2
