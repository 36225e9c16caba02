"""Extended contexts from the command line and from Python to the run folder: run ids, messages and manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import evalkit
from evalkit.benchmarks.lm_eval.harness import Harness
from evalkit.benchmarks.lm_eval.requests import RequestRow
from evalkit.benchmarks.run import evaluate, planned
from evalkit.errors import UsageError
from evalkit.models.loading.locate import silent
from tests.benchmarks.kinds import Lines
from tests.benchmarks.lm_eval.made import made_tasks
from tests.journals import entries_of
from tests.tiny import tiny_checkpoint

WINDOW = 300
"""Fewer tokens than the longest of the made-up documents have."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=WINDOW)


def test_a_stretched_run_is_a_run_of_its_own(model: Path, documents: Path, tmp_path: Path) -> None:
    """Neither a context within the window nor a missing one shows in its identity."""
    common = {"data_dir": documents, "allow_unofficial_data": True, "tasks": ("piqa",), "limit": 2, "output": tmp_path}
    run = evaluate(str(model), progress=Lines(), context=1200, **common)
    extension = run.manifest["specification"]["context_extension"]
    expected = {"method": "yarn", "target": 1200, "original": WINDOW, "factor": 4.0}
    assert extension.items() >= expected.items()
    assert extension["attention_factor"] == pytest.approx(1.138629, abs=1e-6)
    loaded = run.manifest["loaded"]
    assert (loaded["window"], loaded["context_extension"]["method"]) == (1200, "yarn")
    plain = evaluate(str(model), progress=Lines(), **common)
    assert not plain.scores["ll_continuation"].equals(run.scores["ll_continuation"])

    def manifest(**options: Any) -> dict[str, Any]:
        return dict(planned(model, common | options, silent).manifest)

    same = [manifest(), manifest(context="none"), manifest(context=WINDOW)]
    assert {each["id"] for each in same} == {plain.manifest["id"]}
    assert same[0]["specification"]["context_extension"] is None
    ids = {plain.manifest["id"], run.manifest["id"], manifest(context=1200, context_method="linear")["id"]}
    assert len(ids) == 3


def test_lm_evals_tasks_and_the_harness_take_longer_texts(model: Path, tmp_path: Path) -> None:
    """A text of lm-eval's is split into windows of the extended length."""
    options = {"include_path": made_tasks(tmp_path / "tasks"), "output": tmp_path / "runs", "context": 96}
    small = tiny_checkpoint(tmp_path / "small", window=24)
    with pytest.raises(UsageError, match=r"made_answers.*--context-method dynamic-yarn"):
        evaluate(str(small), tasks=("made_answers",), context_method="dynamic-yarn", progress=Lines(), **options)
    run = evaluate(str(small), tasks=("made_texts",), progress=Lines(), **options)
    assert run.manifest["specification"]["context_extension"]["factor"] == 4.0
    assert run.manifest["loaded"]["window"] == 96
    answers = [row for _, rows in entries_of(run, RequestRow) for row in rows]
    assert 24 < max(answer.continuation_tokens for answer in answers) <= 96
    harness = evalkit.harness(str(model), context=1200, context_method="linear")
    assert harness.max_length == Harness(harness.loaded, context="none").max_length == 1200
    with pytest.raises(UsageError, match="the model is already loaded"):
        Harness(harness.loaded, context=2400)
