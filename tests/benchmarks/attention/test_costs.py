"""Estimated costs of an analysis beside those of finished ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import evalkit
from evalkit.benchmarks.attention.documents import AttentionPlan, AttentionRequest, plan_attention, task_costs
from evalkit.benchmarks.attention.groups import RANKED_LAYERS
from evalkit.benchmarks.request import request_of
from evalkit.display import Progress
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import tokenizer_alone
from evalkit.runs.folder import Run

MEASURES = "bos,entropy,negative,sink,distance,similarity,rank"


def plan_of(checkpoint: Path, **options: Any) -> AttentionPlan:
    """The plan of an analysis."""
    return plan_attention(request_of(AttentionRequest, checkpoint, {"device": "cpu"} | options), silent)


def costs_of(checkpoint: Path, **options: Any) -> list[Any]:
    """Estimates with all documents sampled."""
    plan = plan_of(checkpoint, **options)
    return task_costs(plan, tokenizer_alone(plan.checkpoint, silent), 1000, silent)


def run_of(checkpoint: Path, output: Path, **options: Any) -> Run:
    """A finished analysis."""
    settings = {name: options.pop(name) for name in ("measures",)}
    return evalkit.evaluate(checkpoint, suite="attention", device="cpu", output=output, progress=Progress(live=False),
                            settings=settings, **options)  # fmt: skip


@pytest.fixture(scope="module")
def options(documents: Path) -> dict[str, Any]:
    """Options of a run."""
    return {"data_dir": documents, "allow_unofficial_data": True, "tasks": "piqa,mmlu", "sample": 12}


def test_tokens_are_those_of_the_run(checkpoint: Path, options: dict[str, Any], tmp_path: Path) -> None:
    run = run_of(checkpoint, tmp_path, measures=MEASURES, **options)
    found = costs_of(checkpoint, measures=MEASURES, **options)
    sequences = run.table("attention_documents.parquet").drop_duplicates(["task", "subtask", "doc_id", "choice"])
    for one in found:
        mine = sequences[sequences["task"] == one.task]
        assert (one.rows, one.alone) == (len(mine), mine["tokens"].sum())
        assert one.documents == one.sampled == len(mine)


def test_the_time_of_ranks_is_that_of_their_maps(
    checkpoint: Path, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a time that grows as the cube of the length: its sum over sequences, layers and heads."""
    monkeypatch.setattr("evalkit.benchmarks.attention.documents._timed", lambda size: size**3 * 1e-9)
    run = run_of(checkpoint, tmp_path, measures="rank", **options)
    sequences = run.table("attention_documents.parquet").drop_duplicates(["task", "subtask", "doc_id", "choice"])
    heads = run.table("attention.parquet")["head"].nunique()
    layers = run.table("attention.parquet")["layer"].nunique()
    assert layers <= RANKED_LAYERS
    found = sum(one.seconds for one in costs_of(checkpoint, measures="bos,rank", **options))
    expected = float((sequences["tokens"].clip(lower=64).astype(float) ** 3).sum())  # shorter: the time of 64
    assert found == pytest.approx(expected * layers * heads * 1e-9)
    assert not any(one.seconds for one in costs_of(checkpoint, measures="bos", **options))


def test_longer_maps_than_those_timed_grow_by_the_cube(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalkit.benchmarks.attention.documents._SIZES", (8, 16))
    monkeypatch.setattr("evalkit.benchmarks.attention.documents._timed", lambda size: 1.0 if size == 16 else 0.5)
    (tmp_path / "book.txt").write_text("word and word " * 200, encoding="utf-8")
    [one] = costs_of(checkpoint, text=tmp_path / "book.txt", context=32, sample=2, layers="-1", measures="rank")
    [two] = costs_of(checkpoint, text=tmp_path / "book.txt", context=64, sample=2, layers="-1", measures="rank")
    assert two.seconds / one.seconds == pytest.approx((63 / 31) ** 3)
