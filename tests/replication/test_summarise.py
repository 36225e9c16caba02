"""The replication's tables: which runs they are made of, and what a plan assumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import evalkit
from evalkit.errors import UsageError
from evalkit.stats.significance import Spread

BENCHMARKS = {"held_out": "perplexity", "zeroshot8": "zeroshot8", "attention": "attention", "needle": "needle"}
"""Benchmarks of study.yaml and their suites."""


def run(suite: str, model: str) -> Any:
    return SimpleNamespace(suite=suite, complete=True, manifest={"model": model})


def all_runs() -> list[Any]:
    return [
        run(suite, f"examples/replication/trained/{model}-seed{seed}/model")
        for suite in BENCHMARKS.values()
        for seed in (3, 1, 2)
        for model in ("vanilla", "cog", "diff", "intg")
    ]


@pytest.fixture
def found(summarise: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any]], Any]:
    """Select among these runs."""

    def select(runs: list[Any]) -> Any:
        monkeypatch.setattr(evalkit, "list_runs", lambda root: runs)
        return summarise.runs_by_model(Path("runs"))

    return select


def test_runs_by_benchmark_model_and_seed(found: Callable[[list[Any]], Any], summarise: ModuleType) -> None:
    selected = found(all_runs())
    assert selected.keys() == BENCHMARKS.keys()
    for name, by_model in selected.items():
        for model, runs in by_model.items():
            assert [run.suite for run in runs] == [BENCHMARKS[name]] * 3
            assert [(run.manifest["model"].split("/")[3]) for run in runs] == [f"{model}-seed{k}" for k in (1, 2, 3)]
            assert [summarise.seed_of(run) for run in runs] == [1, 2, 3]


def test_other_runs_are_left_out_and_missing_or_double_ones_are_errors(found: Callable[[list[Any]], Any]) -> None:
    others = [run("perplexity", f"trained/vanilla-seed1/{name}") for name in ("initial", "checkpoint-300")]
    others += [run("perplexity", "demo"), run("longbench", "trained/vanilla-seed1/model")]
    assert found([*others, *all_runs()]) == found(all_runs())
    with pytest.raises(UsageError, match="2 finished runs of intg seed 3 on held_out"):
        found([*all_runs(), run("perplexity", "trained/intg-seed3/model")])
    with pytest.raises(UsageError, match="0 finished runs of diff seed 2 on needle"):
        found([one for one in all_runs() if one.suite != "needle" or "diff-seed2" not in one.manifest["model"]])


def test_all_documents_gain_what_their_tasks_allow(summarise: ModuleType) -> None:
    counts = [1267, 2376, 1172, 10042, 1838, 500, 3270, 14042]
    documents = {str(task): {"count": count} for task, count in enumerate(counts)}
    stored = {"tasks": [{"task": task, "n": 200} for task in documents]}
    sampled = SimpleNamespace(manifest={"documents": documents}, stored=stored)
    # Variances of means over 200 and over all documents, in each task that of one document
    expected = sum(1 / 200 for _ in counts) / sum(1 / count for count in counts)
    assert summarise.all_documents(sampled) == pytest.approx(expected) == pytest.approx(7.9, abs=0.05)


def test_what_the_primary_outcome_could_show_is_at_the_level_of_its_verdict(summarise: ModuleType) -> None:
    parts = Spread(0.02, 0.03, 0.001, 0.0005, 3, 3)
    line = SimpleNamespace(
        name="Average", difference=0.1, low=0.0, high=0.2, stderr=0.1, freedom=3.0, p=0.02, spread=parts
    )
    comparison = SimpleNamespace(b="cog", tasks=(), average=line)
    shown = {
        (benchmark, outcome): next(summarise.differences([comparison], benchmark, outcome))["could_show"]
        for benchmark, outcome in (("held_out", "bits_per_byte"), ("zeroshot8", "bits_per_byte"))
    }
    assert shown["held_out", "bits_per_byte"] > 1.3 * shown["zeroshot8", "bits_per_byte"]
