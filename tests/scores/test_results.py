"""Accuracies, their standard errors and averages, compared with closed forms and lm-eval's statistics."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lm_eval.api.metrics import mean_stderr

from evalkit.runs.accuracies import summarise
from tests.tables.made import table

RIGHT: list[dict[str, Any]] = [{"ll_continuation": -1.0}, {"ll_continuation": -2.0}]
WRONG: list[dict[str, Any]] = [{"ll_continuation": -2.0}, {"ll_continuation": -1.0}]


def task(name: str, right: int, wrong: int, subtask: str | None = None, extra: int = 0) -> pd.DataFrame:
    """A task whose rule `acc` gets so many documents right; `extra` further, hopeless choices each."""
    hopeless = [{"ll_continuation": -9.0}] * extra
    documents = [RIGHT + hopeless] * right + [WRONG + hopeless] * wrong
    return table(*documents, task=name, subtask=subtask)


def manifest(**groups: list[str]) -> dict[str, Any]:
    return {"groups": groups, "group_sizes": {name: len(members) for name, members in groups.items()}}


@settings(max_examples=40)
@given(st.integers(0, 12), st.integers(0, 12))
def test_accuracy_and_standard_error_are_lm_evals(right: int, wrong: int) -> None:
    assume(right + wrong >= 2)
    [found] = summarise(task("a", right, wrong), manifest(G=["a"]), "acc").tasks
    outcomes = [1.0] * right + [0.0] * wrong
    assert found.n == right + wrong
    assert found.accuracy == pytest.approx(sum(outcomes) / len(outcomes), abs=1e-15)
    assert found.stderr == pytest.approx(mean_stderr(outcomes), abs=1e-15)


def test_averages_are_unweighted_and_their_errors_independent() -> None:
    scores = pd.concat([task("a", 1, 3), task("b", 6, 2), task("c", 3, 0), task("d", 1, 0)])
    results = summarise(scores, manifest(First=["a", "b"], Second=["c"]), "acc")
    se_a, se_b, se_c = (math.sqrt(p * (1 - p) / (n - 1)) for p, n in ((1 / 4, 4), (3 / 4, 8), (1.0, 3)))
    assert [(average.name, average.accuracy) for average in results.averages] == [
        ("First", pytest.approx(0.5)), ("Second", 1.0), ("Average", pytest.approx(2 / 3))
    ]  # fmt: skip
    assert results.averages[0].stderr == pytest.approx(math.hypot(se_a, se_b) / 2)
    assert results.average.stderr == pytest.approx(math.hypot(se_a, se_b, se_c) / 3)
    some = manifest(First=["a", "b"], Second=["d"]) | {"group_sizes": {"First": 3, "Second": 1}}
    results = summarise(scores, some, "acc")
    assert [average.name for average in results.averages] == ["First (2 of 3)", "Second", "Average (3 of 4)"]
    assert results.tasks[2].stderr is None and results.average.stderr is None
    assert [average.name for average in summarise(scores, manifest(Only=["a"]), "acc").averages] == ["Only"]


def test_subjects_weigh_by_their_documents() -> None:
    scores = pd.concat([task("mmlu", 1, 0, "mmlu_anatomy"), task("mmlu", 1, 4, "mmlu_virology"), task("a", 1, 1)])
    results = summarise(scores, manifest(Knowledge=["mmlu"], Rest=["a"]), "acc")
    assert (results.tasks[0].n, results.tasks[0].accuracy) == (6, pytest.approx(2 / 6))  # not the mean of 1 and 1/5
    assert {
        name: [(part.task, part.n, part.accuracy) for part in parts] for name, parts in results.subtasks.items()
    } == {"mmlu": [("mmlu_anatomy", 1, 1.0), ("mmlu_virology", 5, pytest.approx(1 / 5))]}


def test_chance_ties_and_truncation_are_counted_by_document() -> None:
    scores = pd.concat([task("arc", 1, 1, extra=1), task("arc", 1, 0, extra=2), task("arc", 1, 0, extra=3)])
    [found] = summarise(scores, manifest(G=["arc"]), "acc").tasks
    assert found.chance == pytest.approx((1 / 3 + 1 / 3 + 1 / 4 + 1 / 5) / 4)
    tied, cut = [{"ll_continuation": -1.0}] * 3, [choice | {"truncated": 7} for choice in RIGHT]
    [found] = summarise(table(tied, tied, cut, RIGHT), manifest(G=["made_up"]), "acc").tasks
    assert (found.n, found.ties, found.truncated) == (4, 2, 1)
