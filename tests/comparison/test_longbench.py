"""Comparisons of LongBench runs: graded answers, documents of one context, and runs that are not comparable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from evalkit.comparison.comparison_report import comparison_report
from evalkit.comparison.line import MCNEMAR, SIGN_FLIP
from evalkit.errors import RunError, UsageError
from tests.comparison.made import compared, make_longbench, make_run, scores_of
from tests.printed import printed
from tests.sealed import reseal

N = 40


def graded(seed: int, shift: float = 0.0, n: int = N) -> list[float]:
    """Scores between 0 and 1 with two decimals; those of one seed lie apart by their shifts."""
    return np.clip(np.round(np.random.default_rng(seed).random(n) + shift, 2), 0, 1).tolist()


def test_graded_answers_against_scipy(tmp_path: Path) -> None:
    one, other = graded(1), graded(2, 0.2)
    right, wrong = [1.0] * 12 + [0.0] * (N - 12), [0.0] * 3 + [1.0] * 9 + [1.0] * 4 + [0.0] * (N - 16)
    a = make_longbench(tmp_path, {"hotpotqa": one, "trec": right}, model="org/a")
    b = make_longbench(tmp_path, {"hotpotqa": other, "trec": wrong}, model="org/b")
    found = compared(a, b)
    hotpotqa, trec = found.tasks
    difference = np.subtract(other, one)
    assert hotpotqa.difference == pytest.approx(difference.mean(), abs=1e-12)
    assert hotpotqa.stderr == pytest.approx(stats.sem(difference), abs=1e-12)
    exact = stats.permutation_test(
        (difference,), np.mean, permutation_type="samples", n_resamples=200_000, rng=np.random.default_rng(3)
    )
    assert hotpotqa.test == SIGN_FLIP
    t = stats.ttest_rel(one, other).pvalue
    assert hotpotqa.p == pytest.approx(max(exact.pvalue, t), rel=0.2)
    low, high = stats.t.interval(0.95, N - 1, difference.mean(), stats.sem(difference))
    assert hotpotqa.low == pytest.approx(low, abs=0.02) and hotpotqa.high == pytest.approx(high, abs=0.02)
    assert trec.test == MCNEMAR
    assert trec.p == pytest.approx(stats.binomtest(3, 7).pvalue)
    assert found.average.difference == pytest.approx((difference.mean() + 1 / N) / 2)
    assert [mean.name for mean in found.averages] == ["Average (2 of 16)"]
    assert [one.rule for one in found.rules] == ["longbench"]


def test_questions_about_one_document_are_one_draw(tmp_path: Path) -> None:
    one, other = graded(1), graded(1, 0.1)
    for place in range(0, N, 2):  # two questions of a document have the same score
        one[place + 1], other[place + 1] = one[place], other[place]
    whose = {"qasper": [f"document {place // 2}" for place in range(N)]}
    runs = [
        make_longbench(tmp_path, {"qasper": values}, model=f"org/{name}", sources=whose)
        for name, values in (("a", one), ("b", other))
    ]
    [task] = compared(*runs).tasks
    assert (task.n, task.sources) == (N, N // 2)
    alone = np.subtract(other, one)[::2]
    assert task.stderr == pytest.approx(stats.sem(alone), abs=1e-12)
    page = printed(comparison_report([compared(*runs)]))
    assert "Qasper†" in page
    assert (
        "†: documents share sources (Qasper 20): clustered error, p: the larger of the sign-flip test's over whole sou"
        in page
    )
    assert "exact" not in page
    assert "LongBench's own score of each task" in page


def test_runs_that_are_not_comparable(tmp_path: Path) -> None:
    scores = {"hotpotqa": graded(1)}
    a = make_longbench(tmp_path, scores)
    for other, words in (
        (
            make_longbench(tmp_path, scores, max_prompt_tokens=3500),
            r"task hotpotqa: the prompt tokens of run .* \(3500\) is not that of",
        ),
        (make_longbench(tmp_path, scores, suite="longbench-e"), "of suite longbench and run .* of longbench-e"),
        (make_longbench(tmp_path, scores, documents={"hotpotqa": "others"}), "task hotpotqa: the content hash"),
        (make_run(tmp_path, {"piqa": scores_of("piqa", [1, 0])}), "of suite longbench and run .* of zeroshot8"),
    ):
        with pytest.raises(UsageError, match=words):
            compared(a, other)
    b = make_longbench(tmp_path, scores, model="org/b")
    with pytest.raises(UsageError, match="leave out acc"):
        compared(a, b, rule="acc")
    table = pd.read_parquet(b / "generations.parquet")
    table.assign(answers='["others"]').to_parquet(b / "generations.parquet")
    reseal(b)
    with pytest.raises(UsageError, match=r"document hotpotqa-0 has another 'answers' in run"):
        compared(a, b)
    table.drop(columns="source").to_parquet(b / "generations.parquet")
    reseal(b)
    with pytest.raises(RunError, match=r"damaged \(it has no column source\)"):
        compared(a, b)
