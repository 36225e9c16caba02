"""Extended contexts from the command line and from Python to the run folder: run ids, messages and manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import evalkit
from evalkit.benchmarks.lm_eval.harness import Harness
from evalkit.benchmarks.lm_eval.requests import RequestRow
from evalkit.benchmarks.run import evaluate
from evalkit.errors import CheckpointError, UsageError
from evalkit.runs.folder import Run
from tests.benchmarks.lm_eval.made import made_tasks
from tests.benchmarks.multiple_choice.test_evaluation import Lines
from tests.journals import entries_of
from tests.tiny import tiny_checkpoint

WINDOW = 300
"""Fewer tokens than the longest of the made-up documents have."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=WINDOW)


def run_of(model: Path, documents: Path, output: Path, progress: Lines | None = None, **options: Any) -> Run:
    asked = {"data_dir": documents, "allow_unofficial_data": True, "tasks": ("piqa",), "limit": 2}
    return evaluate(str(model), output=output, progress=progress or Lines(), **(asked | options))


def test_a_stretched_run_is_a_run_of_its_own(model: Path, documents: Path, tmp_path: Path) -> None:
    plain = run_of(model, documents, tmp_path)
    lines = Lines()
    stretched = run_of(model, documents, tmp_path, lines, context=1200)
    assert stretched.manifest["specification"]["context_extension"] == {
        "method": "yarn",
        "target": 1200,
        "original": WINDOW,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": pytest.approx(1.138629, abs=1e-6),
    }
    loaded = stretched.manifest["loaded"]
    assert (loaded["window"], loaded["context_extension"]["method"]) == (1200, "yarn")
    assert f"original context window {WINDOW} tokens (config.json, max_position_embeddings)" in lines.said
    assert any("context stretched from 300 to 1,200 tokens by yarn: factor 4" in line for line in lines.said)
    [path] = stretched.folder.glob("lm_eval/results_*.json")
    exported = json.loads(path.read_text(encoding="utf-8"))
    assert (exported["max_length"], exported["evalkit"]["context_extension"]["factor"]) == (1200, 4.0)
    other = run_of(model, documents, tmp_path, context=1200, context_method="linear")
    assert len({run.folder for run in (plain, stretched, other)}) == 3
    assert not plain.scores["ll_continuation"].equals(stretched.scores["ll_continuation"])


def test_what_changes_nothing_is_the_same_run(model: Path, documents: Path, tmp_path: Path) -> None:
    """Neither a context within the window nor a missing one shows in a run's identity."""
    lines = Lines()
    asked: list[dict[str, Any]] = [{}, {"context": "none"}, {"context": WINDOW}]
    runs = [run_of(model, documents, tmp_path, lines, **one) for one in asked]
    assert len({run.folder for run in runs}) == 1
    assert runs[0].manifest["specification"]["context_extension"] is None
    assert any("nothing is stretched" in line for line in lines.said)


def test_a_file_names_what_flags_do_not(model: Path, documents: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("context: 900\nattention_factor: 1.5\n", encoding="utf-8")
    run = run_of(model, documents, tmp_path, context_config=str(path))
    kept = run.manifest["specification"]["context_extension"]
    assert (kept["target"], kept["factor"], kept["attention_factor"]) == (900, 3.0, 1.5)
    left = run_of(model, documents, tmp_path, context_config=str(path), context="none")
    assert left.manifest["specification"]["context_extension"] is None
    with pytest.raises(UsageError, match="--context is '8k'; it must be a whole number"):
        run_of(model, documents, tmp_path, context="8k")
    with pytest.raises(UsageError, match="give --context"):
        run_of(model, documents, tmp_path, context_method="linear")


def test_lm_evals_tasks_take_longer_texts(model: Path, tmp_path: Path) -> None:
    """A text of lm-eval's is split into windows of the extended length."""
    tasks = made_tasks(tmp_path / "tasks")
    lines = Lines()
    asked = {"include_path": tasks, "output": tmp_path / "runs", "progress": lines, "context": 96}
    small = tiny_checkpoint(tmp_path / "small", window=24)
    with pytest.raises(UsageError, match=r"made_answers.*--context-method dynamic-yarn"):
        evaluate(str(small), tasks=("made_answers",), context_method="dynamic-yarn", **asked)
    run = evaluate(str(small), tasks=("made_texts",), **asked)
    assert run.manifest["specification"]["context_extension"]["factor"] == 4.0
    assert run.manifest["loaded"]["window"] == 96
    answers = [row for _, rows in entries_of(run, RequestRow) for row in rows]
    assert 24 < max(answer.continuation_tokens for answer in answers) <= 96


def test_the_harness_takes_the_same_words(model: Path) -> None:
    harness = evalkit.harness(str(model), context=1200, context_method="linear")
    assert harness.max_length == 1200
    assert harness.loaded.extension is not None
    assert harness.loaded.extension.describe() == "context stretched from 300 to 1,200 tokens by linear: factor 4"
    assert Harness(harness.loaded, context="none").max_length == 1200
    with pytest.raises(UsageError, match="the model is already loaded"):
        Harness(harness.loaded, context=2400)
    with pytest.raises(CheckpointError, match=r"not found"):
        evalkit.harness(str(model / "nowhere"), context=1200)
