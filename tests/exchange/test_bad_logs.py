"""Invalid logs: a one-line error that names file and line, and nothing is written. Most are in tests/guards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.run import evaluate
from evalkit.data import Library
from evalkit.display import Progress
from evalkit.errors import DataError, UsageError
from evalkit.exchange import logs
from evalkit.exchange.exports import export_run
from evalkit.exchange.metric_runs import import_logs
from evalkit.models.loading.locate import silent
from tests.exchange.logged import lines, rewrite

Rejected = Callable[..., str]


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


@pytest.fixture
def rejected(documents: Path, tmp_path: Path) -> Rejected:
    """Import files that must be rejected; return the message."""

    def run(*paths: Path, kind: type[Exception] = DataError) -> str:
        library = Library(documents, allow_unofficial=True, say=silent)
        with pytest.raises(kind) as error:
            import_logs(paths, None, tmp_path / "imported", library, silent)
        assert not (tmp_path / "imported").exists() and "\n" not in str(error.value)
        return str(error.value)

    return run


def sample_file(log: Path, task: str = "arc_easy") -> Path:
    [path] = log.glob(f"samples_{task}_*.jsonl")
    return path


def change_results(log: Path, **changes: Any) -> Path:
    [path] = log.glob("results_*.json")
    named = {name.replace("_", "-") if name.startswith("n_") else name: value for name, value in changes.items()}
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | named), encoding="utf-8")
    return path


def test_a_damaged_file(log: Path, rejected: Rejected, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sample_file(log)
    data = path.read_bytes()
    for damaged in (data[:-40], b"[1]\n" + data, data.replace(b"Question", b"\xff", 1), b""):
        path.write_bytes(damaged)
        assert str(path) in rejected(path)
    path.write_bytes(data)
    monkeypatch.setattr(logs, "MOST_DOCUMENT_BYTES", 1000)
    assert "1,000 bytes" in rejected(path)
    assert "samples_<task>_<time>.jsonl" in rejected(change_results(log), kind=UsageError)


def test_files_that_do_not_belong_together(log: Path, rejected: Rejected, tmp_path: Path) -> None:
    path, other = sample_file(log), Path(shutil.copytree(log, tmp_path / "other"))
    assert "arc_easy" in rejected(path, sample_file(other), kind=UsageError)
    results = json.loads(next(other.glob("results_*")).read_text(encoding="utf-8"))
    change_results(other, config=results["config"] | {"model_dtype": "bfloat16"})
    assert rejected(path, sample_file(other, "piqa"), kind=UsageError).startswith("dtype: ")
    change_results(other, config=results["config"], n_shot=results["n-shot"] | {"piqa": 5})
    assert rejected(path, sample_file(other, "piqa"), kind=UsageError).startswith("solved examples: ")
    change_results(log, model_name="")
    assert "--model NAME" in rejected(path, kind=UsageError)


def test_choices_that_contradict_their_log_likelihoods(log: Path, rejected: Rejected) -> None:
    """Of a task that is not pinned, whatever the results file says: another acc, and a request too few."""
    [beside] = log.glob("results_*.json")
    beside.write_text(beside.read_text(encoding="utf-8").replace('"arc_easy"', '"own"'), encoding="utf-8")
    results = json.loads(beside.read_text(encoding="utf-8"))
    change_results(log, task_hashes={}, results={}, configs={"own": results["configs"]["own"]})
    path = sample_file(log).rename(log / sample_file(log).name.replace("arc_easy", "own"))
    original = lines(path)
    rewrite(path, [line | {"acc": 1.0 - line["acc"]} for line in original])
    assert f"{path}, line " in (message := rejected(path)) and "log-likelihoods" in message
    original[1]["arguments"].popitem()
    rewrite(path, original)
    assert f"{path}, line " in (message := rejected(path)) and "log-likelihoods" in message
