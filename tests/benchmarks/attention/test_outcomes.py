"""Comparison of finished analyses by document, and the standard errors of their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.attention.results import AttentionDocuments, results_of
from evalkit.comparison.comparison import compare
from evalkit.comparison.pairing import pair
from evalkit.comparison.sides import Side
from evalkit.errors import UnknownNameError, UsageError
from evalkit.runs.folder import Run
from tests.benchmarks.attention.made import made_run, whole_table


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """Two made-up runs on the same documents. Do not modify."""
    root = tmp_path_factory.mktemp("runs")
    return made_run(root, "one", layers=5, seed=1), made_run(root, "two", layers=5, seed=2)


def by_document(run: Run, measure: str, layer: int | None, how: str) -> pd.Series:
    """Return a measure of each document from the run's own rows."""
    table = whole_table(run)
    rows = table[(table["measure"] == measure) & table["position"].isna()]
    if layer is not None:
        rows = rows[rows["layer"] == layer]
    over_heads = rows.groupby(["task", "subtask", "doc_id", "layer"])["value"].agg(how)
    return over_heads.groupby(level=["task", "subtask", "doc_id"]).mean()


@pytest.mark.parametrize(
    ("rule", "measure", "layer", "how"),
    [
        ("bos_abs", "bos_abs", None, "mean"),
        ("entropy@2", "entropy", 2, "mean"),
        ("rank@-1", "rank", 4, "median"),
        ("rank@-2", "rank", 3, "median"),
        ("rank", "rank", None, "median"),
    ],
)
def test_a_difference_is_the_mean_of_paired_differences(
    rule: str, measure: str, layer: int | None, how: str, runs: tuple[Run, Run]
) -> None:
    one, two = runs
    found = compare(pair(Side("one", (one,)), Side("two", (two,)), {}), rule)
    apart = by_document(two, measure, layer, how) - by_document(one, measure, layer, how)
    for task in found.tasks:
        values = apart.loc[task.name]
        assert task.difference == pytest.approx(values.mean(), abs=1e-6)
        assert task.n == len(values)
    tasks = [task.name for task in found.tasks]
    assert found.average.difference == pytest.approx(np.mean([apart.loc[task].mean() for task in tasks]), abs=1e-6)
    assert found.measure.higher_is_better is None


def test_every_layer(runs: tuple[Run, Run]) -> None:
    one, two = runs
    found = compare(pair(Side("one", (one,)), Side("two", (two,)), {}), "distance@all")
    assert [task.layer for task in found.tasks[:5]] == [0, 1, 2, 3, 4]
    apart = by_document(two, "distance", 3, "mean") - by_document(one, "distance", 3, "mean")
    [task] = [task for task in found.tasks if task.layer == 3 and task.name.startswith(found.tasks[0].name.split()[0])]
    assert task.difference == pytest.approx(apart.loc[task.name.split()[0]].mean(), abs=1e-6)


def test_means_over_different_layers_are_not_compared(runs: tuple[Run, Run], tmp_path: Path) -> None:
    """The rank of a shallow model is of all layers, that of a deep one of the last ones."""
    deeper = made_run(tmp_path, "three", layers=5, ranked=4, seed=3)
    found = pair(Side("one", (runs[0],)), Side("deeper", (deeper,)), {})
    with pytest.raises(UsageError, match=r"the last 2 layers in run .* the last 4 layers"):
        compare(found, "rank")
    assert compare(found, "rank@-1").tasks
    assert "mean over all layers" in compare(found, "bos").measure.words


def test_a_measure_of_some_documents_only_does_not_hinder_others(tmp_path: Path) -> None:
    """Sinks need 64 tokens, which only the longer documents have."""
    one, two = (made_run(tmp_path, name, tokens=(40, 90), documents=8, seed=n) for n, name in enumerate("ab"))
    found = pair(Side("a", (one,)), Side("b", (two,)), {})
    assert all("sink" in one.rules for one in found.graded)
    assert compare(found, "rank@-1").tasks
    with pytest.raises(UsageError, match=r"has no sink of \d+ documents, such as .*, which is too short"):
        compare(found, "sink")


def test_runs_of_other_tokenizers_are_not_compared(runs: tuple[Run, Run], tmp_path: Path) -> None:
    """Equal numbers of tokens would not mean equal tokens."""
    other = made_run(tmp_path, "other", layers=5, seed=3, tokenizer=1)
    with pytest.raises(UsageError, match=r"sequence"):
        pair(Side("one", (runs[0],)), Side("other", (other,)), {})


def test_a_measure_must_be_named(runs: tuple[Run, Run]) -> None:
    documents = AttentionDocuments(runs[0])
    with pytest.raises(UsageError, match=r"has several measures: name one with --rule: bos, bos_abs"):
        documents.by_rule("attention")
    with pytest.raises(UnknownNameError, match="did you mean 'rank'"):
        documents.by_rule("rnak@-1")
    for rule in ("bos@5", "bos@-6", "bos@x"):
        with pytest.raises(UsageError, match=rf"--rule {rule}: run .* has bos of layers 0 to 4"):
            documents.measure(rule)


def frame(values: list[float], clusters: list[int], task: str = "boolq") -> pd.DataFrame:
    """Return a table over heads with one measure of one layer."""
    count = len(values)
    own = {"task": task, "subtask": task, "doc_id": range(count), "choice": 0, "cluster": clusters, "tokens": 70}
    return pd.DataFrame(
        own | {"truncated": [0, 3] + [0] * (count - 2), "layer": 0, "measure": "bos_abs", "position": pd.NA,
               "mean": values, "median": 0.0}
    )  # fmt: skip


def of_frame(table: pd.DataFrame) -> dict[str, Any]:
    """Return the results of such a table."""
    return results_of(table, table[["task", "subtask", "doc_id", "choice", "tokens", "truncated"]], {})


def test_errors_are_clustered_by_source() -> None:
    """Two documents of one source with the same value count as one: the error is that of the sources' mean."""
    values = [0.1, 0.4, 0.5, 0.9]
    alone = of_frame(frame(values, [0, 1, 2, 3]))["tasks"][0]["measures"]["bos_abs"]
    assert alone["stderr"] == pytest.approx(pd.Series(values).sem())
    doubled = [value for value in values for _ in range(2)]
    found = of_frame(frame(doubled, [0, 0, 2, 2, 4, 4, 6, 6]))
    assert found["tasks"][0]["measures"]["bos_abs"] == pytest.approx(
        {"n": 8, "value": 0.475, "stderr": alone["stderr"]}
    )
    assert found["tasks"][0]["truncated"] == 1
    assert found["tasks"][0]["tokens"] == 560
    single = of_frame(frame([0.5, 0.5], [0, 0]))["measures"]["bos_abs"]
    assert single["stderr"] is None


def test_tasks_are_strata() -> None:
    """A difference between tasks is no error: each task has its share of the sample."""
    two = pd.concat([frame([0.1, 0.2], [0, 1]), frame([0.8, 0.9], [0, 1], "piqa")], ignore_index=True)
    found = of_frame(two)["measures"]["bos_abs"]
    # Each task's mean has the variance s² / 2 with s² = 0.005; the mean of two has a quarter of their sum
    assert found["value"] == pytest.approx(0.5)
    assert found["stderr"] == pytest.approx((0.0025 * 2 / 4) ** 0.5)
