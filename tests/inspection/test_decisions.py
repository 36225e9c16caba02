"""Decisions about documents, compared with `scores.rules.decide` and with margins by hand."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalkit.benchmarks.document_views import ChoiceView
from evalkit.errors import UnknownNameError, UsageError
from evalkit.inspection.outcomes import decisions
from evalkit.runs.rules import RULES, decide, find_rule
from evalkit.runs.score_table import ScoreRow, score_table

Document = tuple[int, list[tuple[float, int]]]
"""Gold choice, and (log-likelihood, tokens) of each choice."""


def made(documents: list[Document]) -> ChoiceView:
    rows = [
        ScoreRow("t", "t", number, choice, len(choices), gold, None, None, None, ll, None, 0, 0, 0, tokens, 0,
                 ll / 2, 3 * tokens, 4 * tokens, 0, 0)
        for number, (gold, choices) in enumerate(documents)
        for choice, (ll, tokens) in enumerate(choices)
    ]  # fmt: skip
    return ChoiceView("t", score_table(rows, {}), ("acc",))


CHOICE = st.tuples(st.sampled_from([-1.0, -2.0, -2.5, -4.0]), st.integers(0, 3))
DOCUMENTS = st.lists(
    st.lists(CHOICE, min_size=1, max_size=4).flatmap(lambda c: st.tuples(st.integers(0, len(c) - 1), st.just(c))),
    min_size=1, max_size=6,
).filter(lambda documents: any(len(choices) > 1 for _, choices in documents))  # fmt: skip


@settings(max_examples=200)
@given(rule=st.sampled_from([name for name, rule in RULES.items() if rule.by_task is None]), documents=DOCUMENTS)
def test_decisions_are_the_rules(rule: str, documents: list[Document]) -> None:
    view = made(documents)
    expected = decide(view.scores, find_rule(rule))
    decided = decisions(view, rule)
    assert decided.prediction.tolist() == expected["prediction"].tolist()
    assert decided.tie.tolist() == expected["tie"].tolist()
    assert decided.right.tolist() == expected["correct"].astype(bool).tolist()
    assert not np.isnan(decided.margin).any()
    # A margin has the sign of the decision; of 0, the first of the best choices decides
    assert decided.right[decided.margin > 0].all() and not decided.right[decided.margin < 0].any()
    assert decided.tie[decided.margin == 0].all()


def test_margins_by_hand() -> None:
    view = made([(0, [(-2.0, 2), (-3.0, 1)]), (1, [(-2.0, 2), (-3.0, 1)]), (2, [(-1.0, 1), (-1.0, 1), (-1.0, 1)]),
                 (0, [(-5.0, 1)]), (0, [(-1.0, 0), (-2.0, 1)]), (1, [(-1.0, 0), (-2.0, 0)])])  # fmt: skip
    # L(c): -2 less -3; -3 less -2; a tie; nothing to compare with; as they are
    assert decisions(view, "acc").margin.tolist() == [1.0, -1.0, 0.0, math.inf, 1.0, -1.0]
    # L(c) / n(c): -1 less -3; no token is the worst score; two of these are a tie
    decided = decisions(view, "acc_token")
    assert decided.margin.tolist() == [2.0, -2.0, 0.0, math.inf, -math.inf, 0.0]
    assert decided.starts.tolist() == [0, 2, 4, 7, 8, 10]


def test_what_cannot_be_decided() -> None:
    view = made([(0, [(-2.0, 2), (-3.0, 1)])])
    with pytest.raises(UnknownNameError, match="did you mean 'acc_norm'"):
        decisions(view, "acc_nrom")
    lacking = ChoiceView("t", view.scores.assign(ll_unconditional=np.nan), ("acc",))
    with pytest.raises(UsageError, match="unconditional pass"):
        decisions(lacking, "pmi")
    with pytest.raises(UsageError, match=r"acc .* t have one"):  # no document has several choices
        decisions(made([(0, [(-2.0, 2)])] * 2), "acc")
    empty = ChoiceView("t", pd.DataFrame(view.scores.iloc[:0]), ("acc",))
    assert len(decisions(empty, "acc").margin) == 0
