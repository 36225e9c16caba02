"""From a request to a finished run folder: run ids, resumption, and the state after a failure."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.run import planned
from evalkit.errors import DataError, RunError, ScoringError, UsageError
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import Run
from evalkit.runs.journal import Journal
from evalkit.runs.rules import RULES
from tests.benchmarks.kinds import Lines
from tests.benchmarks.multiple_choice.made import run_of
from tests.documents import made_up, rewrite
from tests.tiny import tiny_checkpoint

Evaluate = Callable[..., Run]
SMALL: dict[str, Any] = {"tasks": ("piqa", "arc_easy"), "token_budget": 110}
"""A run of a few documents in small batches."""


@pytest.fixture
def small(checkpoint: Path, documents: Path, tmp_path: Path) -> Evaluate:
    """Evaluate with these options; keyword arguments change the rest."""

    def run(model: Path = checkpoint, **changes: Any) -> Run:
        return run_of(model, **({"output": tmp_path / "runs", "data_dir": documents} | SMALL | changes))

    return run


def test_every_choice_and_segment_is_scored_once_and_every_rule_is_stored(finished: Run) -> None:
    scores = finished.scores
    documents = scores.groupby(["task", "subtask", "doc_id"], sort=False)
    assert documents.ngroups == 7 * 6 + 57
    assert (documents["choice"].agg(list) == documents["choices"].first().map(lambda n: list(range(n)))).all()
    for segment in ("special", "instruction", "context", "continuation", "end"):
        assert (scores[f"n_{segment}"] > 0).all() or segment == "context"
        assert np.isfinite(scores[f"ll_{segment}"]).all() and (scores[f"ll_{segment}"] <= 0).all()
    assert (scores["n_end"] == 1).all() and scores["ll_unconditional"].isna().all()
    stored = json.loads((finished.folder / "results.json").read_text(encoding="utf-8"))
    assert set(stored["rules"]) == set(RULES) - {"pmi"}
    for rule, content in stored["rules"].items():
        assert content == json.loads(json.dumps(finished.results(rule).to_json()))
    assert sum(task["seconds"] for task in stored["tasks"]) > 0


def test_the_run_id_is_of_what_changes_the_numbers(checkpoint: Path, documents: Path, tmp_path: Path) -> None:
    other_weights = tiny_checkpoint(tmp_path / "weights" / checkpoint.name, window=4096, seed=1)
    moved = Path(shutil.copytree(checkpoint, tmp_path / "elsewhere" / checkpoint.name))
    other_documents = made_up(tmp_path / "documents")
    rewrite(other_documents / "piqa.jsonl", 1, {"goal": "Another goal."})
    common = SMALL | {"data_dir": documents, "allow_unofficial_data": True, "output": tmp_path}

    def manifests(*changes: dict[str, Any]) -> list[dict[str, Any]]:
        options = [common | change for change in changes]
        return [planned(each.pop("model", checkpoint), each, silent).manifest for each in options]

    others = [{"limit": 3}, {"sample": 3}, {"template": "plain"}, {"dtype": "bfloat16"}, {"attention": "eager"}]
    others += [{"rule": "pmi"}, {"tasks": ("piqa",)}, {"model": other_weights}, {"data_dir": other_documents}]
    assert len({manifest["id"] for manifest in manifests({}, *others)}) == len(others) + 1
    written = {"tasks": "piqa, arc_easy", "token_budget": "auto", "data_dir": str(documents)}
    same = manifests({}, {"rule": "acc"}, {"token_budget": 512}, {"model": moved}, {"device": "cpu"}, written)
    assert len({manifest["id"] for manifest in same}) == 1


def test_a_run_killed_after_running_out_of_memory_resumes(
    small: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured memory must not change the plan, or batches would be mistaken for others."""
    import torch

    from evalkit.scoring.forward import Forward

    whole = small(output=tmp_path / "whole", token_budget=200)
    score, append, written = Forward.score, Journal.append, []

    def scarce(own: Forward, tree: Any, trunk: Any) -> Any:
        if len(tree.tokens) > 120:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(own, tree, trunk)

    def interrupt(journal: Journal, entry: Any, rows: Any, packed: Any = None) -> Any:
        stored = append(journal, entry, rows)
        written.append((entry.task, entry.batch))
        if len(written) == 2:
            raise KeyboardInterrupt
        return stored

    monkeypatch.setattr(Journal, "append", interrupt)
    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(Forward, "score", scarce)
        small(token_budget=200)
    run = small(token_budget=200)
    assert len(written) == len(set(written)) > 2
    pd.testing.assert_frame_equal(run.scores, whole.scores, rtol=1e-4, atol=1e-4)


def test_a_run_without_its_manifest_resumes_by_its_documents(small: Evaluate) -> None:
    """With other batches; a damaged line is dropped."""
    whole = small()
    expected, journal = whole.scores, whole.folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: len(lines) // 2]) + lines[-1][:40])
    for name in ("results.json", "manifest.json"):
        (whole.folder / name).unlink()
    progress = Lines()
    resumed = small(token_budget=4096, progress=progress)
    assert any("1 damaged line(s) dropped" in line for line in progress.said)
    pd.testing.assert_frame_equal(resumed.scores, expected, rtol=1e-5)


def test_samples_are_all_there_or_made_again(small: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of one task, left by a run killed during writing, are not accepted for those of all tasks."""
    plain = small()
    assert not plain.has_samples
    fsync, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        # scores, lm_eval/results, the first task's samples
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with monkeypatch.context() as patch, pytest.raises(RunError, match=r"samples_(arc_easy|piqa)"):
        patch.setattr(os, "fsync", full)
        small(log_samples=True)
    assert len(list(plain.folder.glob("lm_eval/samples_*"))) == 1
    run = small(log_samples=True)
    assert run.has_samples and len(list(run.folder.glob("lm_eval/samples_*"))) == 2


def test_a_window_or_budget_that_is_too_small(small: Evaluate, tmp_path: Path) -> None:
    """Cut documents are counted; a document that does not fit the budget is named with a budget that is enough."""
    run = small(tiny_checkpoint(tmp_path / "narrow", window=160), tasks=("boolq",))
    [boolq] = run.results().tasks
    assert boolq.truncated == (run.scores.groupby("doc_id")["truncated"].max() > 0).sum() > 0
    with pytest.raises(ScoringError, match=r"--token-budget 20 .* \w+ document \d+ ") as error:
        small(token_budget=20)
    assert int(str(error.value).split("give at least ")[1].split(",")[0]) > 20


def test_an_invalid_request_leaves_nothing(small: Evaluate, tmp_path: Path) -> None:
    for changes, noun in (({"token_budget": "lots"}, "--token-budget"), ({"device": "cuda:7"}, "cuda")):
        with pytest.raises(UsageError, match=noun):
            small(**changes)
    (tmp_path / "downloads").mkdir()
    with pytest.raises(DataError, match="no documents of arc_easy, piqa"):
        small(data_dir=tmp_path / "downloads")
    assert not list(tmp_path.glob("runs/*"))
