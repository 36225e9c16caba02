"""The test of a lead, against closed forms on made-up score tables."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from scipy import stats

from evalkit.errors import UsageError
from evalkit.tables.significance import lead_p_value, mcnemar
from tests.tables import Choice, table


def run(**right: list[int]) -> Any:
    """Something with the score table of a run: by task, whether each document was answered right."""
    tables = []
    for task, answers in right.items():
        documents: list[list[Choice]] = [
            [{"ll_continuation": -1.0}, {"ll_continuation": -2.0 + 2 * (not ok)}] for ok in answers
        ]
        tables.append(table(*documents, task=task))
    return SimpleNamespace(scores=pd.concat(tables, ignore_index=True), folder="made_up")


def test_one_task_is_exact_mcnemar() -> None:
    first, second = [1] * 9 + [0] * 3 + [1] * 5, [0] * 9 + [1] * 3 + [1] * 5
    found = lead_p_value(run(piqa=first), run(piqa=second), ["piqa"], "acc")
    assert found == mcnemar(9, 3) == pytest.approx(stats.binomtest(9, 12).pvalue)


def test_a_mean_over_tasks_is_a_paired_z_with_tasks_fixed() -> None:
    one = {"piqa": [1, 1, 1, 0, 1, 0, 1, 1], "boolq": [1, 0, 1, 1, 1]}
    two = {"piqa": [0, 1, 0, 0, 1, 1, 0, 1], "boolq": [1, 0, 0, 1, 0]}
    means, variances = [], []
    for task in one:
        difference = pd.Series(one[task]) - pd.Series(two[task])
        means.append(difference.mean())
        variances.append(difference.var() / len(difference))
    z = sum(means) / 2 / (math.sqrt(sum(variances)) / 2)
    found = lead_p_value(run(**one), run(**two), ["piqa", "boolq"], "acc")
    assert found == pytest.approx(2 * stats.norm.sf(z))
    assert lead_p_value(run(**two), run(**one), ["piqa", "boolq"], "acc") == pytest.approx(found)


def test_other_documents_cannot_be_paired() -> None:
    with pytest.raises(UsageError, match="did not score the same documents of piqa"):
        lead_p_value(run(piqa=[1, 0, 1]), run(piqa=[1, 0]), ["piqa"], "acc")


@pytest.mark.parametrize(
    ("wins", "losses", "expected"), [(0, 0, 1.0), (5, 5, 1.0), (10, 0, 2 / 1024), (8, 1, 20 / 512)]
)
def test_mcnemar_against_the_binomial(wins: int, losses: int, expected: float) -> None:
    assert mcnemar(wins, losses) == mcnemar(losses, wins) == pytest.approx(expected)


def test_mcnemar_of_many() -> None:
    assert mcnemar(700, 800) == pytest.approx(stats.binomtest(700, 1500).pvalue)
    assert 0 <= mcnemar(3000, 2000) < 1e-40
