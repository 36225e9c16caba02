"""Degenerate comparisons: no difference, only differences, one document, few sources; by one run or several a side."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import pytest
from scipy import stats

from evalkit import Comparison
from evalkit.comparison.comparison_report import comparison_report
from evalkit.comparison.differences import exit_code
from evalkit.stats.power import mcnemar_detectable
from tests.comparison.made import compared, make_run, scores_of
from tests.printed import printed

Answers = dict[str, list[int]]


class Case(NamedTuple):
    """What A and B answer, whether right (1) or wrong (0), and what comes out of it."""

    a: Answers
    b: Answers
    verdict: str = "undecided"
    """Of the first task and of the average."""
    code: int = 4
    """With which a program exits, without a margin."""
    clusters: list[int] | None = None

    def sides(self, root: Path, runs: tuple[int, int]) -> list[list[Path]]:
        """The runs of each side, of different checkpoints with the same answers."""
        return [
            [
                make_run(root, {task: scores_of(task, right, clusters=self.clusters) for task, right in tasks.items()},
                         model=f"{name}{number}")
                for number in range(count)
            ]
            for name, tasks, count in zip("ab", (self.a, self.b), runs, strict=True)
        ]  # fmt: skip


def won(n: int, verdict: str, code: int) -> Case:
    """All of n documents won: what the exact test makes of them."""
    return Case({"piqa": [0] * n}, {"piqa": [1] * n}, verdict, code)


SAME = {"piqa": [0, 1] * 50, "boolq": [1, 0] * 20}
LARGE_SOURCE = [0] * 60 + [60 + number - number % 2 for number in range(60)]
CASES = {
    "identical": Case(SAME, SAME),
    "all won": Case({"piqa": [0] * 60, "boolq": [0] * 40}, {"piqa": [1] * 60, "boolq": [1] * 40}, "better", 0),
    "one": won(1, "undecided", 4),
    "five won": won(5, "undecided", 4),
    "six won": won(6, "better", 0),
    "three won beside a thousand that stay": Case(
        {"piqa": [0] * 3, "boolq": [1] * 1000}, {"piqa": [1] * 3, "boolq": [1] * 1000}
    ),
    "a large source stays": Case(
        {"boolq": [1] * 60 + [0] * 50 + [1] * 10}, {"boolq": [1] * 120}, clusters=LARGE_SOURCE
    ),
    "three sources won": Case(
        {"piqa": [0] * 300}, {"piqa": [1] * 300}, clusters=[100 * (number // 100) for number in range(300)]
    ),
}


def coherent(comparison: Comparison) -> Comparison:
    """The interval holds the difference, and zero if and only if the p value is more than 5 %; all can be printed."""
    printed(comparison_report([comparison]))
    for row in (*comparison.tasks, *comparison.averages):
        assert row.low <= row.difference <= row.high
        assert (row.low <= 0 <= row.high) == (row.p is None or row.p > 0.05)
    return comparison


@pytest.mark.parametrize("runs", [(1, 1), (2, 5)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_verdicts(case: Case, runs: tuple[int, int], tmp_path: Path) -> None:
    a, b = case.sides(tmp_path, runs)
    comparison, back = coherent(compared(a, b)), coherent(compared(b, a))
    first, average = comparison.tasks[0], comparison.average
    assert (first.verdict, average.verdict) == (case.verdict, case.verdict)
    assert exit_code([comparison]) == case.code and exit_code([back]) == (3 if case.code == 0 else 4)
    if case is CASES["identical"]:
        # The average's interval is at least as long as the smaller task's contribution
        for row, n, share in zip((*comparison.tasks, average), (100, 40, 40), (1, 1, 2), strict=True):
            reach = stats.norm.ppf(0.975) * math.sqrt(2) / (n + 2) / share
            assert (row.p, row.difference) == (1, 0)
            assert -row.low == row.high == pytest.approx(reach, rel=0.05)
        for task in comparison.tasks:
            assert (task.detectable or 0) >= (mcnemar_detectable(task.n, 0) or 1)
        assert exit_code([compared(a, b, margin=0.1)]) == 0
    if case is CASES["all won"]:
        for row in (*comparison.tasks, average):
            assert row.p is not None and row.p < 1e-6
            assert row.high == 1 and 0.8 < row.low < 1
    if case is CASES["one"]:
        assert (first.low, first.high, first.stderr, first.detectable) == (-1, 1, None, None)
        assert first.p == (1 if runs == (1, 1) else None)
    if case is CASES["three sources won"]:  # two times in eight three coins agree
        assert first.p == pytest.approx(0.25, abs=0.02)


def test_the_interval_says_what_the_exact_test_says(tmp_path: Path) -> None:
    """60 won and 40 lost: p = 0.057, where the interval alone would lie above zero."""
    case = Case({"piqa": [0] * 60 + [1] * 940}, {"piqa": [1] * 60 + [0] * 40 + [1] * 900})
    first = coherent(compared(*case.sides(tmp_path, (1, 1)))).tasks[0]
    assert first.p == pytest.approx(stats.binomtest(40, 100).pvalue, abs=1e-4)
    assert (first.verdict, first.low) == ("undecided", 0)
