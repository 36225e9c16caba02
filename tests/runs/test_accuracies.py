"""Accuracies and continuous outcomes, against closed forms, loops over documents, scikit-learn and lm-eval."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lm_eval.api.metrics import mean_stderr

from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.runs.accuracies import document_outcomes, summarise
from evalkit.runs.rules import RULES, choose
from evalkit.runs.score_table import OUTCOMES, outcome_key, outcome_of, with_default_rule
from tests.comparison.made import scores_of
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


# Continuous outcomes

LIKELIHOODS = st.floats(-700, -1e-6)
DOCUMENTS = st.lists(
    st.lists(st.tuples(LIKELIHOODS, st.integers(1, 80), st.integers(1, 20)), min_size=2, max_size=5),
    min_size=1,
    max_size=6,
)


def table_of(documents: list[list[tuple[float, int, int]]], golds: list[int]) -> pd.DataFrame:
    """A score table with (log-likelihood, bytes, tokens) of each choice."""
    rows = [
        {"doc_id": number, "choice": place, "choices": len(choices), "gold": gold, "ll_continuation": likelihood,
         "bytes": size, "chars": size, "n_continuation": tokens}
        for number, (choices, gold) in enumerate(zip(documents, golds, strict=True))
        for place, (likelihood, size, tokens) in enumerate(choices)
    ]  # fmt: skip
    base = scores_of("made", [1]).iloc[:1]
    return pd.concat([base.assign(**row) for row in rows], ignore_index=True)


def values(table: pd.DataFrame, name: str, rule: str = "acc") -> np.ndarray:
    return document_outcomes(table, OUTCOMES[name], RULES[rule])


@settings(max_examples=40)
@given(DOCUMENTS, st.data())
def test_outcomes_are_those_of_loops_over_documents(documents: list[Any], data: st.DataObject) -> None:
    golds = [data.draw(st.integers(0, len(choices) - 1)) for choices in documents]
    table = table_of(documents, golds)
    for number, (choices, gold) in enumerate(zip(documents, golds, strict=True)):
        highest = max(likelihood for likelihood, _, _ in choices)
        total = math.fsum(math.exp(likelihood - highest) for likelihood, _, _ in choices)
        p = [math.exp(likelihood - highest) / total for likelihood, _, _ in choices]
        likelihood, size, _ = choices[gold]
        assert values(table, "bits_per_byte")[number] == pytest.approx(-likelihood / math.log(2) / size, rel=1e-12)
        log_loss = highest - likelihood + math.log(total)
        assert values(table, "log_loss")[number] == pytest.approx(log_loss, rel=1e-9, abs=1e-12)
        brier = math.fsum((one - (place == gold)) ** 2 for place, one in enumerate(p))
        assert values(table, "brier")[number] == pytest.approx(brier, rel=1e-9, abs=1e-12)
        others = [one for place, (one, _, _) in enumerate(choices) if place != gold]
        assert values(table, "margin")[number] == pytest.approx(likelihood - max(others), rel=1e-12)
        per_byte = [one / bytes_ for one, bytes_, _ in choices]
        expected = per_byte[gold] - max(one for place, one in enumerate(per_byte) if place != gold)
        assert values(table, "margin", "acc_bytes")[number] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=40)
@given(DOCUMENTS, st.data(), st.sampled_from(["acc", "acc_norm", "acc_token", "ppl_continuation"]))
def test_a_positive_margin_is_a_right_answer(documents: list[Any], data: st.DataObject, rule: str) -> None:
    golds = [data.draw(st.integers(0, len(choices) - 1)) for choices in documents]
    table = table_of(documents, golds)
    found, margins = choose(table, RULES[rule]), values(table, "margin", rule)
    right = found.prediction == np.array(golds)
    assert (right[margins > 0]).all()
    assert not right[margins < 0].any()
    assert found.tie[margins == 0].all()


def test_against_scikit_learn_and_lm_eval() -> None:
    from lm_eval.api.metrics import bits_per_byte, brier_score
    from sklearn.metrics import log_loss

    dice = np.random.default_rng(3)
    documents = [[(float(one), int(size), 3) for one, size in zip(-dice.gamma(3, 2, 4), dice.integers(1, 60, 4),
                                                                 strict=True)] for _ in range(200)]  # fmt: skip
    golds = dice.integers(0, 4, 200).tolist()
    table = table_of(documents, golds)
    likelihoods = np.array([[one for one, _, _ in choices] for choices in documents])
    p = np.exp(likelihoods) / np.exp(likelihoods).sum(axis=1, keepdims=True)
    assert values(table, "log_loss").mean() == pytest.approx(log_loss(golds, p, labels=range(4)), rel=1e-6)
    assert values(table, "brier").mean() == pytest.approx(brier_score(list(zip(golds, p, strict=True))), rel=1e-6)
    theirs = [bits_per_byte([choices[gold][:2]]) for choices, gold in zip(documents, golds, strict=True)]
    assert values(table, "bits_per_byte") == pytest.approx(np.array(theirs), rel=1e-12)


def test_extreme_tables() -> None:
    """Likelihoods far below the smallest number, and no documents."""
    table = table_of([[(-20_000.0, 10, 1), (-19_000.0, 10, 1)]], [0])
    assert values(table, "log_loss")[0] == pytest.approx(1000)
    assert values(table, "brier")[0] == pytest.approx(2)
    assert [len(values(table.iloc[:0], name)) for name in OUTCOMES] == [0] * len(OUTCOMES)


def test_what_cannot_be_computed_is_an_error() -> None:
    good = table_of([[(-2.0, 3, 1), (-1.0, 3, 1)]], [0])
    with pytest.raises(RunError, match="finite"):
        values(good.assign(ll_continuation=np.nan), "brier")
    with pytest.raises(RunError, match="no bytes"):
        values(good.assign(bytes=0), "bits_per_byte")
    with pytest.raises(RunError, match="gold"):
        values(good.assign(gold=2), "log_loss")
    with pytest.raises(UsageError, match="document 0 has no margin under rule acc"):
        values(good.iloc[:1], "margin")
    with pytest.raises(UsageError, match="document 0 has no margin under rule acc_norm"):
        values(good.assign(chars=[0, 3]), "margin", "acc_norm")


def test_keys() -> None:
    assert outcome_key(None, None) is None and outcome_key("accuracy", "acc") == "acc"
    assert outcome_key("margin", "acc_norm") == "margin:acc_norm" and outcome_key("margin", None) == "margin"
    assert outcome_of("acc_norm") is None and outcome_of("acc@order-2") is None
    found = outcome_of("margin:acc_norm")
    assert found is not None and (found[0].name, found[1]) == ("margin", "acc_norm")
    assert with_default_rule("margin", "ppl") == "margin:ppl" and with_default_rule("brier", "ppl") == "brier"
    with pytest.raises(UsageError, match="does not depend on a rule"):
        outcome_key("brier", "acc")
    with pytest.raises(UnknownNameError, match="did you mean 'bits_per_byte'"):
        outcome_key("bits_per_bytes", None)
