"""Continuous outcomes, against loops over documents, scikit-learn and lm-eval's own metrics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.runs.accuracies import document_outcomes
from evalkit.runs.rules import RULES, choose
from evalkit.runs.score_table import OUTCOMES, outcome_key, outcome_of, with_default_rule
from tests.comparison.made import scores_of

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
