"""Accuracies, their standard errors and averages, compared with closed forms and lm-eval's statistics."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lm_eval.api.metrics import mean_stderr

from evalkit.benchmarks.multiple_choice.results_report import accuracy_table, rules_table
from evalkit.errors import UsageError
from evalkit.runs.accuracies import available_rules, summarise
from tests.printed import printed
from tests.tables.made import table

RIGHT: list[dict[str, Any]] = [{"ll_continuation": -1.0}, {"ll_continuation": -2.0}]
WRONG: list[dict[str, Any]] = [{"ll_continuation": -2.0}, {"ll_continuation": -1.0}]


def task(name: str, right: int, wrong: int, subtask: str | None = None, extra: int = 0) -> pd.DataFrame:
    """A task whose rule `acc` gets so many documents right; `extra` further, hopeless choices each."""
    hopeless = [{"ll_continuation": -9.0}] * extra
    documents = [RIGHT + hopeless] * right + [WRONG + hopeless] * wrong
    return table(*documents, task=name, subtask=subtask)


def manifest(**groups: list[str]) -> dict[str, Any]:
    names = [name for members in groups.values() for name in members]
    return {
        "specification": {"num_fewshot": 0},
        "groups": groups,
        "group_sizes": {name: len(members) for name, members in groups.items()},
        "documents": {name: {"official": True, "source": "made up"} for name in names},
    }


@settings(max_examples=40)
@given(st.integers(0, 12), st.integers(0, 12))
def test_accuracy_and_standard_error_are_lm_evals(right: int, wrong: int) -> None:
    assume(right + wrong >= 2)
    [found] = summarise(task("a", right, wrong), manifest(G=["a"]), "acc").tasks
    outcomes = [1.0] * right + [0.0] * wrong
    assert found.n == right + wrong
    assert found.accuracy == pytest.approx(sum(outcomes) / len(outcomes), abs=1e-15)
    assert found.stderr == pytest.approx(mean_stderr(outcomes), abs=1e-15)


def test_a_single_document_has_no_standard_error() -> None:
    scores = pd.concat([task("a", 1, 0), task("b", 1, 1)])
    results = summarise(scores, manifest(G=["a", "b"]), "acc")
    assert (results.tasks[0].accuracy, results.tasks[0].stderr) == (1.0, None)
    assert results.average.stderr is None
    assert printed(accuracy_table(results, manifest(G=["a", "b"]), {})).splitlines()[2].split()[:4] == [
        "a",
        "1",
        "100.0",
        "–",
    ]


def test_an_average_over_some_of_its_tasks_says_so() -> None:
    some = manifest(First=["a", "b"], Second=["c"]) | {"group_sizes": {"First": 3, "Second": 1}}
    scores = pd.concat([task("a", 1, 1), task("b", 1, 1), task("c", 1, 1)])
    names = [average.name for average in summarise(scores, some, "acc").averages]
    assert names == ["First (2 of 3)", "Second", "Average (3 of 4)"]


def test_averages_are_unweighted_and_their_errors_independent() -> None:
    scores = pd.concat([task("a", 1, 3), task("b", 6, 2), task("c", 3, 0)])
    results = summarise(scores, manifest(First=["a", "b"], Second=["c"]), "acc")
    se_a, se_b, se_c = (math.sqrt(p * (1 - p) / (n - 1)) for p, n in ((1 / 4, 4), (3 / 4, 8), (1.0, 3)))
    assert [(a.name, a.accuracy) for a in results.averages] == [
        ("First", pytest.approx((1 / 4 + 3 / 4) / 2)),
        ("Second", 1.0),
        ("Average", pytest.approx((1 / 4 + 3 / 4 + 1) / 3)),
    ]
    assert results.averages[0].stderr == pytest.approx(math.sqrt(se_a**2 + se_b**2) / 2)
    assert results.average.stderr == pytest.approx(math.sqrt(se_a**2 + se_b**2 + se_c**2) / 3)


def test_one_group_is_its_own_average() -> None:
    results = summarise(task("a", 1, 3), manifest(Only=["a"]), "acc")
    assert [average.name for average in results.averages] == ["Only"]
    assert results.average.accuracy == 1 / 4


def test_subjects_weigh_by_their_documents() -> None:
    scores = pd.concat([task("mmlu", 1, 0, "mmlu_anatomy"), task("mmlu", 1, 4, "mmlu_virology")])
    results = summarise(scores, manifest(Knowledge=["mmlu"]), "acc")
    [mmlu] = results.tasks
    assert (mmlu.n, mmlu.accuracy) == (6, pytest.approx(2 / 6))  # not the mean of 1 and 1/5
    assert [(part.task, part.n, part.accuracy) for part in results.subtasks["mmlu"]] == [
        ("mmlu_anatomy", 1, 1.0),
        ("mmlu_virology", 5, pytest.approx(1 / 5)),
    ]


def test_a_task_without_subjects_has_no_detail() -> None:
    assert summarise(task("a", 1, 1), manifest(G=["a"]), "acc").subtasks == {}


def test_chance_is_that_of_each_documents_choices() -> None:
    scores = pd.concat([task("arc", 1, 1, extra=1), task("arc", 1, 0, extra=2), task("arc", 1, 0, extra=3)])
    [found] = summarise(scores, manifest(G=["arc"]), "acc").tasks
    assert found.chance == pytest.approx((1 / 3 + 1 / 3 + 1 / 4 + 1 / 5) / 4)


def test_ties_and_cut_documents_are_counted_by_document() -> None:
    tied = [{"ll_continuation": -1.0}] * 3
    cut = [choice | {"truncated": 7} for choice in RIGHT]
    scores = table(tied, tied, cut, RIGHT)
    [found] = summarise(scores, manifest(G=["made_up"]), "acc").tasks
    assert (found.n, found.ties, found.truncated) == (4, 2, 1)
    text = printed(accuracy_table(summarise(scores, manifest(G=["made_up"]), "acc"), manifest(G=["made_up"]), {}))
    row = next(line for line in text.splitlines() if line.startswith("made_up")).split()
    assert row == ["made_up", "4", "100.0", "±", "0.0", "41.7", "2", "1", "0.0"]
    assert "ties: documents" in text
    assert "cut: documents" in text


def test_table_shows_percent_errors_chance_and_averages() -> None:
    groups = manifest(First=["a", "b"], Second=["mmlu"])
    groups["documents"]["b"]["official"] = False
    scores = pd.concat([task("a", 1, 3), task("b", 3, 1), task("mmlu", 2, 2)])
    text = printed(accuracy_table(summarise(scores, groups, "acc"), groups, {"a": 1.25, "b": 2.0, "mmlu": 0.5}))
    cells = [line.split() for line in text.splitlines() if line and line[0] != "-"]
    assert cells[:7] == [
        ["task", "n", "acc.", "%", "±", "SE", "chance", "seconds"],
        ["a", "4", "25.0", "±", "25.0", "50.0", "1.3"],
        ["b*", "4", "75.0", "±", "25.0", "50.0", "2.0"],
        ["First", "50.0", "±", "17.7"],
        ["MMLU", "4", "50.0", "±", "28.9", "50.0", "0.5"],
        ["Average", "50.0", "±", "15.2", "3.8"],
        ["rule", "acc:", "highest", "summed", "log-likelihood", "of", "the", "continuation", "(lm-eval's", "acc)"],
    ]
    assert "*: not the official documents of the task" in text


def test_rules_stand_beside_each_other_with_how_far_they_move_the_average() -> None:
    # Right by its sum, wrong by its characters
    document = [{"ll_continuation": -1.0, "chars": 1}, {"ll_continuation": -2.0, "chars": 10}]
    frame = table(document, RIGHT)
    lines = printed(rules_table(frame, manifest(G=["made_up"]), "acc")).splitlines()
    cells = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert cells["acc"] == ["<", "100.0", "100.0"]
    assert cells["acc_norm"] == ["50.0", "50.0", "-50.0"]
    assert lines[-1].startswith("rule pmi needs the unconditional pass")
    assert lines[-1].endswith("repeat the run's command with --rule pmi")


def test_rules_that_a_table_cannot_answer_are_left_out() -> None:
    scores = task("a", 1, 1)
    assert "pmi" not in available_rules(scores)
    with pytest.raises(UsageError, match="unconditional pass"):
        summarise(scores, manifest(G=["a"]), "pmi")


def test_examples_are_reported_under_the_table() -> None:
    shown = manifest(Only=["mmlu"]) | {
        "examples": {"mmlu": {"official": False, "source": "data-dir here/mmlu_dev.jsonl"}}
    }
    shown["specification"] = {"num_fewshot": 5}
    text = printed(accuracy_table(summarise(task("mmlu", 2, 2), shown, "acc"), shown, {"mmlu": 0.5}))
    assert "5-shot: 5 solved examples before each question" in text
    assert "examples: data-dir here" in text
    assert "MMLU*" in text
    assert "*: not the official documents" in text
